"""Kernels of the router."""
