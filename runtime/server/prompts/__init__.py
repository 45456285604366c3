"""The text of requests: read, checked and tokenised in worker processes with limits."""
