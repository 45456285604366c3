"""Checkpoint to engine files. Never imports the runtime."""
