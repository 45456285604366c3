"""Ops of the vision tower: patches, layer norm, projections with bias, attention, its results."""
