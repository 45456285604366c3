"""Accuracy: any engine against any other, or against its checkpoint. Imports all others."""
