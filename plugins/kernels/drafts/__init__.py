"""Kernels of a round of drafts."""
