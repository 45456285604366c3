"""Engines opened for a check, computed by reference or by rank, and what they are run on."""
