"""Full attention over paged KV, with RoPE."""
