"""What is placed: which engine, how many, on what each stands, when there are to be more.

Knows numbers and refuses those that cannot be; knows no library that places.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from spark_engine.errors import CapacityError, OptionError
from spark_engine.manifest import NATIVE, Manifest
from spark_engine.runtime.server.process.server import ServerOptions

START_S = 1800.0  # that a replica may take to load its engine


@dataclass(frozen=True)
class Plan:
    """One engine, several times.

    Attributes:
        folder: the engine folder, on every machine under this path.
        server: how each serves; an empty host is the address of the machine that it stands on.
        least, most: replicas; more than `least` only while requests ask for it.
        gpus, cpus: what each takes of a machine; parts of one are counted, not enforced.
        follows: those of `gpus` and `target` that nobody named: they are the engine's.
        target: requests, running or waiting, that one replica is to have; beyond that there are to
            be more of them.
        stamp: of the engine's content, by `stamp_of`.
        known: the machines will not become more.
    """

    folder: str
    server: ServerOptions
    least: int
    most: int
    gpus: float
    cpus: float
    target: float
    follows: tuple[str, ...] = ()
    stamp: str = ""
    known: bool = False

    @property
    def scales(self) -> bool:
        """Does the number follow the requests?"""
        return self.most > self.least

    @property
    def version(self) -> str:
        """Equal where the replicas of one plan may be those of the other: how many does not
        count, nor does what each takes of a machine."""
        server = msgspec.json.encode(self.server)
        found = hashlib.sha256(msgspec.json.encode([self.folder, self.stamp, server]))
        return found.hexdigest()[:32]


def counts(given: str) -> tuple[int, int]:
    """`4`, or `2-8`, as (least, most). Raises OptionError."""
    low, _, high = given.partition("-")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise OptionError(f"--replicas is {given!r}; give a number like 4, or a range like 2-8")
    return least, most


def sizes(manifest: Manifest, **named: float | None) -> dict[str, Any]:
    """`gpus`, `target` and `follows` of a plan for this engine; `named`: what the user gave."""
    own = {
        "gpus": float(manifest.ranks) if manifest.executor == NATIVE else 0.0,
        "target": float(manifest.limits.max_seqs),
    }
    given = {name: value for name, value in named.items() if value is not None}
    return {**own, **given, "follows": tuple(name for name in own if name not in given)}


def stamp_of(manifest: Manifest) -> str:
    """A digest of the engine: the manifest holds those of all its files."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def moved(plan: Plan, folder: str, manifest: Manifest, **named: float | None) -> Plan:
    """The plan for another engine: what followed the engine follows this one."""
    kept = {name: getattr(plan, name) for name in ("gpus", "target") if name not in plan.follows}
    given = kept | {name: value for name, value in named.items() if value is not None}
    return replace(plan, folder=folder, stamp=stamp_of(manifest), **sizes(manifest, **given))


def wanted(requests: float, plan: Plan) -> int:
    """Replicas for so many requests, running or waiting, of all together."""
    return min(plan.most, max(plan.least, math.ceil(requests / plan.target)))


def check_room(plan: Plan, there: Mapping[str, float]) -> None:
    """Raises CapacityError where the machines, `there` together, cannot hold the least replicas."""
    for word, each in (("GPU", plan.gpus), ("CPU", plan.cpus)):
        need, have = each * plan.least, there.get(word, 0.0)
        if need > have:
            raise CapacityError(
                f"{plan.least} replicas at {each:g} {word}s each take {need:g} and there are "
                f"{have:g}: give fewer --replicas, or less with --{word.lower()}s"
            )
