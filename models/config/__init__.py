"""The published configuration, read once at the border. Knows no tensor."""
