"""How the state of a sequence is stored: replay rings, pages. Knows no op."""
