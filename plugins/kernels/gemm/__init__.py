"""Kernels of linear layers: skinny, split-K, and formats of stream-K."""
