"""The engine process: its loop, its messages, and the client and supervisor in the HTTP process."""
