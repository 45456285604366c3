"""Kernels over memory that all ranks of an engine read, and calls of NCCL."""
