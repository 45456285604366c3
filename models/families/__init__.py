"""The model families, one folder each, and the table of them."""
