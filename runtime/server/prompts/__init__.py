"""The text of requests: read, checked and tokenised in processes of its own, with limits."""
