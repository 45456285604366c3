"""A rehearsal: a process that uses this GPU as if it were another, smaller one.

Knows the environment variable that requests it; knows no driver. It is an environment variable, as
CUDA_VISIBLE_DEVICES is, because builds, servers, checks, tests and benchmarks must all see the same
GPU.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from spark_engine import hints
from spark_engine.errors import OptionError
from spark_engine.kernel import TARGETS, Target

VARIABLE = "SPARK_REHEARSE"  # sm_121a, or sm_121a:occupy
OCCUPY = "occupy"


@dataclass(frozen=True)
class Rehearsal:
    """The requested rehearsal.

    Attributes:
        target: its multiprocessors and limits apply to this process.
        occupy: blocks occupy the other multiprocessors, even if the driver could split them off.
    """

    target: Target
    occupy: bool = False


def requested_rehearsal(environment: Mapping[str, str] | None = None) -> Rehearsal | None:
    """The requested rehearsal; None without one. Raises OptionError for an unknown value."""
    given = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not given:
        return None
    name, _, how = given.partition(":")
    if name not in TARGETS:
        known = ", ".join(TARGETS)
        near = hints.near(name, (*TARGETS,))
        raise OptionError(f"{VARIABLE}={given}: {name!r} is no GPU target{near} ({known})")
    if how not in ("", OCCUPY):
        raise OptionError(f"{VARIABLE}={given}: the only suffix is ':{OCCUPY}'")
    return Rehearsal(TARGETS[name], how == OCCUPY)
