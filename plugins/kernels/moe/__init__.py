"""Kernels of a mixture of experts next to its experts and its router."""
