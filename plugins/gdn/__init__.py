"""Gated delta net: causal convolution, the recurrence and its replay ring, the gated norm."""
