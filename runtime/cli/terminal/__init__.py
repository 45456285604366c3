"""Requests without a server: one answer, or a chat on the terminal."""
