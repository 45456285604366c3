"""Attacks on a real server of the embedded model, each a row of a table."""
