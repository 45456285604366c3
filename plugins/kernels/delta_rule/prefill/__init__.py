"""Kernels of the delta rule over tiles of 64 tokens."""
