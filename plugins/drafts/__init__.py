"""A round of drafts: where it begins, what is accepted, and the tokens that are drafted next."""
