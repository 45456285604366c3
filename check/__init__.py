"""Accuracy: any engine against any other, or against its checkpoint. Stands on all other rooms."""
