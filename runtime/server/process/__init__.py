"""The server process: options, start, signals, drain and exit."""
