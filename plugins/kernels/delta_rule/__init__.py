"""Kernels of the gated delta net: decode, rounds of drafts, convolution, gated norm."""
