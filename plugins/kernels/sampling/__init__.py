"""Kernels from logits to the next token."""
