"""Gated delta net: causal convolution, the recurrence, the gated norm."""
