"""Describes a machine, its problems, and the engines that it can serve."""
