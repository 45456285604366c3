"""Linear layers in every weight format."""
