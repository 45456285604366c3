"""The options of a running engine. Imports no engine: the command line reads it for every mode."""

from __future__ import annotations

from dataclasses import dataclass

from spark_engine.runtime.engine.constraint import Grammars
from spark_engine.runtime.engine.policy.pacing import BALANCED, PrefillPolicy


@dataclass(frozen=True)
class EngineOptions:
    """The options of a running engine; none changes a token.

    Attributes:
        policy: how prefill is paced next to decode.
        depth: steps launched ahead of the one that is being read: 0 or 1; None: 1 for an engine
            with states on a device, which works while the host plans, else 0.
        max_waiting: requests that may queue for admission.
        swap_bytes: budget for the states of preempted sequences; beyond it they are recomputed. At
            most all slots and pages together are used.
        threads: of a CPU executor; 0 for one per core. One is fastest for small models.
        seed: of the seeds drawn for requests that name none; None draws from the system.
        drafts: most drafts of a round, 0 for none; None: as many as the engine has buckets for.
        fixed_drafts: every round has that many, as far as requests can use them, to measure.
        graphs: a GPU replays a bucket as one CUDA graph; without, launch by launch, to compare.
        profile: file of a trace of steps and launches; None for none.
        cache_bytes: of the prefix cache, 0 for none; None: what the free memory allows.
        host_bytes: kept free for the host where GPU and host share memory; None: the default of
            `shared_memory`.
        tp: ranks that the engine must have; None: as many as it was built for.
        hosts: host of each rank, `a,b`, the first being this host; None: all are here.
        cache_dir: folder in which the prefix cache outlives the process, of `cache_dir_bytes`; None
            for none.
        grammars: makes the constraint of a grammar's text; None refuses requests that have one.
    """

    policy: PrefillPolicy = BALANCED
    depth: int | None = None
    max_waiting: int = 1024
    swap_bytes: int = 512 << 20
    threads: int = 1
    seed: int | None = None
    drafts: int | None = None
    fixed_drafts: bool = False
    graphs: bool = True
    profile: str | None = None
    cache_bytes: int | None = None
    host_bytes: int | None = None
    cache_dir: str | None = None
    cache_dir_bytes: int | None = None
    tp: int | None = None
    hosts: str | None = None
    grammars: Grammars | None = None
