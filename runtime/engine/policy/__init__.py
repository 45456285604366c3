"""What the scheduler asks: each policy returns a decision and writes no field of a sequence."""
