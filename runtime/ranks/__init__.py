"""The ranks of one engine: processes that run the same step over their own weights."""
