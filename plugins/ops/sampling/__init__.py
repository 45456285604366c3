"""From logits to the next token; counts of tokens."""
