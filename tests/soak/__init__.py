"""Trials of the whole server that take minutes; `make abuse` runs one."""
