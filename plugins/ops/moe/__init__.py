"""Mixture of experts: router, experts, shared expert's gate."""
