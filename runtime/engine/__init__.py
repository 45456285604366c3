"""The engine's loop: requests, scheduling, what a step is fed, loading."""
