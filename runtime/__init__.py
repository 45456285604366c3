"""Runs engine files. Knows no op and no model."""
