"""Trials of the whole server that take minutes: `make abuse`, `make served`, `make soak-server`."""
