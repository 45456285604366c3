"""The graph of one family: lowered, verified, rewritten, and its lifetimes. Knows no executor."""
