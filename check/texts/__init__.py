"""Greedy texts: against the reference, against decode, and repeated."""
