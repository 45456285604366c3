"""Answers of each API, whole or as server-sent events, and errors as status and body."""
