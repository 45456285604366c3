"""HTTP, the engine process and what travels between them."""
