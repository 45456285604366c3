"""What ranks of one engine exchange within a step."""
