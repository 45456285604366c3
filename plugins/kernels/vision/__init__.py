"""Kernels of the vision tower: patches, norms, projections, results."""
