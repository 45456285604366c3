"""Planner of block_conv, top_ids and draft_path."""

from spark_engine.plugins.launch import Candidate

CONV: tuple[Candidate, ...] = ()
TOP_IDS: tuple[Candidate, ...] = ()
PATH: tuple[Candidate, ...] = ()
