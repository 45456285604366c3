"""Kernels of the vision tower that move rows: patches, norms, results."""
