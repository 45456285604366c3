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

VARIABLE = "SPARK_REHEARSE"  # sm_121a
RESERVED = 1024  # bytes per block that the system reserves
GRAIN = 128  # bytes: unit of shared memory allocation


def requested_rehearsal(environment: Mapping[str, str] | None = None) -> Target | None:
    """The GPU that this process acts as; None without a rehearsal. Raises OptionError for an
    unknown value."""
    given = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not given:
        return None
    if given not in TARGETS:
        known, near = ", ".join(TARGETS), hints.near(given, (*TARGETS,))
        raise OptionError(f"{VARIABLE}={given}: {given!r} is no GPU target{near} ({known})")
    return TARGETS[given]


@dataclass(frozen=True)
class SharedMemoryScale:
    """As many blocks per multiprocessor as on the rehearsed GPU: a Hopper's has 228 KiB of shared
    memory, a GB10's 100, so a block that fills one of a GB10 would share a Hopper's.

    Bytes of shared memory per multiprocessor: of the rehearsed GPU, and of this one. `most`: the
    limit of one block on this GPU.
    """

    theirs: int
    here: int
    most: int

    def dynamic(self, dynamic: int, static: int) -> int:
        """Bytes of dynamic shared memory with which a block takes the same part of a multiprocessor
        here as with `dynamic` on the rehearsed GPU; `static`: its static bytes."""
        whole = (dynamic + static + RESERVED) * self.here // self.theirs // GRAIN * GRAIN
        return max(dynamic, min(whole - RESERVED, self.most) - static)
