"""Hand-made bugs that the tests must see, and what runs them (docs/extend/testing.md)."""
