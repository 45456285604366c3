"""What ranks of one engine tell each other within a step."""
