"""Trials of the whole server that take minutes: `make abuse`, `make soak-server` and others."""
