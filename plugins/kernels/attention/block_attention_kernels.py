"""Planner of block_attention."""

from spark_engine.plugins.launch import Candidate

CANDIDATES: tuple[Candidate, ...] = ()
