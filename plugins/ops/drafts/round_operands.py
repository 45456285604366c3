"""Operands that the ops of a round share."""

import numpy as np

from spark_engine.operand import Operand, Role, TimedLaunch
from spark_engine.tensors import Array

DRAFTS = Operand("drafts", Role.STATE, "i32[S+1,K]")
POSITIONS = Operand("positions", Role.STATE, "i32[S+1]")


def _various(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.asarray(rng.integers(0, 1000, dims), np.int32)


ID_PAGES = Operand("id_pages", Role.STATE, "i32[P+1,1,page,1]", fill=_various)
