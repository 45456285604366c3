"""The placement plan: which engine, how many replicas, their resources, and scaling.

Validates numbers; knows no placement library.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from spark_engine.errors import CapacityError, OptionError
from spark_engine.manifest import NATIVE, Manifest
from spark_engine.runtime.server.process.options import ServerOptions

START_S = 1800.0  # time limit of a replica's engine load


@dataclass(frozen=True)
class ReplicaPlan:
    """Replicas of one engine.

    Attributes:
        least, most: bounds of the number of replicas; requests decide within them.
        gpus, cpus: resources of one replica; fractions are counted, not enforced.
        follows: those of `gpus` and `target` without a user's value: the engine decides.
    """

    folder: str  # path of the engine folder, equal on every machine
    server: ServerOptions  # server options; an empty host is the address of the replica's machine
    least: int
    most: int
    gpus: float
    cpus: float
    target: float  # running and waiting requests per replica; above it the plan scales up
    follows: tuple[str, ...] = ()
    stamp: str = ""  # digest of the engine's content, by `stamp_of`
    known: bool = False  # the number of machines is fixed

    @property
    def scales(self) -> bool:
        """True if the number of replicas depends on the requests."""
        return self.most > self.least

    @property
    def version(self) -> str:
        """Equal for two plans that may share replicas: numbers and resources are not a
        part of it."""
        server = msgspec.json.encode(self.server)
        found = hashlib.sha256(msgspec.json.encode([self.folder, self.stamp, server]))
        return found.hexdigest()[:32]


def counts(given: str) -> tuple[int, int]:
    """Parses `4`, or `2-8`, to (least, most). Raises OptionError."""
    low, _, high = given.partition("-")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise OptionError(f"--replicas is {given!r}; give a number like 4, or a range like 2-8")
    return least, most


def sizes(manifest: Manifest, **named: float | None) -> dict[str, Any]:
    """`gpus`, `target` and `follows` of a plan for this engine; `named`: the user's values."""
    own = {
        "gpus": float(manifest.ranks) if manifest.executor == NATIVE else 0.0,
        "target": float(manifest.limits.max_seqs),
    }
    given = {name: value for name, value in named.items() if value is not None}
    return {**own, **given, "follows": tuple(name for name in own if name not in given)}


def stamp_of(manifest: Manifest) -> str:
    """A digest of the engine's manifest, which contains the digests of all its files."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def moved(plan: ReplicaPlan, folder: str, manifest: Manifest, **named: float | None) -> ReplicaPlan:
    """The plan for another engine: values in `follows` are recomputed."""
    kept = {name: getattr(plan, name) for name in ("gpus", "target") if name not in plan.follows}
    given = kept | {name: value for name, value in named.items() if value is not None}
    return replace(plan, folder=folder, stamp=stamp_of(manifest), **sizes(manifest, **given))


def wanted(requests: float, plan: ReplicaPlan) -> int:
    """Number of replicas for this total of running and waiting requests."""
    return min(plan.most, max(plan.least, math.ceil(requests / plan.target)))


def check_resources(plan: ReplicaPlan, there: Mapping[str, float]) -> None:
    """Raises CapacityError if the machines' resources `there` cannot hold the least number of
    replicas."""
    for word, each in (("GPU", plan.gpus), ("CPU", plan.cpus)):
        need, have = each * plan.least, there.get(word, 0.0)
        if need > have:
            raise CapacityError(
                f"{plan.least} replicas at {each:g} {word}s each take {need:g} and there are "
                f"{have:g}: give fewer --replicas, or less with --{word.lower()}s"
            )
