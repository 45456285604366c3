"""Kernels that work on one row at a time: norms, activations, quantisers, copies."""
