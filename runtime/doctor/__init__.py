"""What a machine is, what is wrong with it, and which engines it can serve."""
