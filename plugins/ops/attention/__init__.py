"""Full attention over paged keys and values, with RoPE."""
