"""Ops that work on one row at a time: embedding, activations, quantisers."""
