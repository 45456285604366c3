"""Kernels of the vision tower."""
