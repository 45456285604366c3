"""The prefix cache's copies on a disk, which outlive the engine's process."""
