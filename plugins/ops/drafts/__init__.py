"""A round of drafts: its start, what is accepted, and the tokens that are drafted next."""
