"""Kernels of the experts: few tokens to many, by instruction."""
