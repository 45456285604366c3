"""Measures servers as their clients see them."""
