"""A sequence in a batch and alone, on a GPU: texts, logits bit by bit, and what invariance costs.

`python -m tests.runtime.batch_trial prepare FOLDER [CHECKPOINT…]` builds, where the builder is,
each checkpoint (and two random ones) plainly and with `--invariant`; `… run FOLDER` serves 64
ragged requests together, then each of them alone, and prints one line for each engine:

    texts that are the same; first differences that are near ties; positions with bit-equal
    logits; milliseconds of a decode step of 64 rows and of one
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.executors.executor import Executor, Specs, SynchronousExecutor, Wait
from spark_engine.runtime.executors.native import NativeExecutor
from spark_engine.tensors import Array
from tests.runtime.engine.drive import said
from tests.runtime.engine.invariants import check_idle

TARGET = "sm_90a"
SIZES: dict[str, Any] = {"decode": (1, 4, 16, 64), "prefill": (64, 256)}
LIMITS: dict[str, Any] = {"max_seqs": 64, "max_context": 256}
KINDS = {"plain": False, "invariant": True}
TIE = 0.02  # of the range of a row's logits: what two may differ by and be as good
Logits = dict[tuple[int, int], Array]  # by request and position


def prepare(base: Path, *checkpoints: str) -> None:
    """Checkpoints and their engines, under `base`."""
    from spark_engine.builder.build import build
    from spark_engine.builder.plan.options import Options
    from tests.checkpoints import write_checkpoint

    found = {Path(c).resolve().parent.name: Path(c) for c in checkpoints}
    for name, moe in (("dense_mixed", False), ("moe_mixed", True)):
        found[name] = base / f"{name}_checkpoint"
        if not found[name].exists():
            write_checkpoint(found[name], format="modelopt_mixed", moe=moe)
    for name, checkpoint in found.items():
        for kind, invariant in KINDS.items():
            options = Options(target=TARGET, invariant=invariant, **SIZES, **LIMITS)
            report = build(checkpoint, base / f"{name}_{kind}", options, lambda text: None)
            took = ", ".join(f"{stage} {s:.1f} s" for stage, s in report.seconds.items())
            timed = sum(row["timed"] for row in report.manifest.tactics)
            print(f"{name}_{kind}: {took}; {timed} decisions timed {report.notes}", flush=True)


class Recording(SynchronousExecutor):
    """An executor that keeps the logits of every row that emits."""

    def __init__(self, inner: Executor, keep: Callable[[Mapping[str, Array]], None]) -> None:
        self._inner, self._keep = inner, keep

    @property
    def specs(self) -> Specs:
        return self._inner.specs

    def run(self, buffers: Mapping[str, Array]) -> None:
        self._inner.run(buffers)

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """At once, with all outputs."""
        self._inner.run(buffers)
        self._keep(buffers)
        return lambda: None

    def close(self) -> None:
        self._inner.close()


def run(base: Path) -> None:
    """Every pair of engines under `base`."""
    for folder in sorted(p for p in base.iterdir() if p.name.rpartition("_")[2] in KINDS):
        print(f"{folder.name}: {compare(folder)}; {times(folder)}", flush=True)


def compare(folder: Path) -> str:
    engine, logits = recorded(folder)
    with closing(engine):
        return _compare(engine, logits)


def _compare(engine: Engine, logits: Logits) -> str:
    requests = ragged(engine.loaded.limits.vocab)
    texts = said(engine, *requests)
    together, launches = dict(logits), engine.stats()["buckets"]
    same = ties = bits = 0
    for i, request in enumerate(requests):
        logits.clear()
        (alone,) = said(engine, request)
        own = {at: row for (_, at), row in logits.items()}
        bits += sum(row.tobytes() == together[i, at].tobytes() for at, row in own.items()
                    if (i, at) in together)  # fmt: skip
        same += alone == texts[i]
        ties += alone != texts[i] and near(own, alone, texts[i], len(request.prompt))
    check_idle(engine)
    count = len(requests)
    return (
        f"{same} of {count} texts same, {count - same} differ ({ties} at a near tie), "
        f"{bits} of {len(together)} logits bit-equal, launches {launches}"
    )


def near(rows: Mapping[int, Array], one: list[int], other: list[int], prompt: int) -> bool:
    """Whether the texts part where the logits held both tokens to be as good."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        return False  # one ended early
    row = rows[prompt + at].astype(np.float64)
    return bool(abs(row[one[at]] - row[other[at]]) <= TIE * np.ptp(row))


def poison(executors: Iterable[Executor]) -> None:
    """Fills the scratch memory of native executors with NaN: reads of unwritten memory show."""
    for executor in executors:
        if isinstance(executor, NativeExecutor):
            owner = executor._engine
            owner.gpu.fill(owner.arena, 0xFF, owner.arena_bytes)
            return


def recorded(folder: Path) -> tuple[Engine, Logits]:
    """An engine, and where the logits of what it runs are gathered, by request and position.

    Without drafts, since a round gives no logits of a position that it does not keep.
    """
    logits: Logits = {}
    loaded = load(folder)
    poison(loaded.executors.values())

    def keep(buffers: Mapping[str, Array]) -> None:
        owner = {seq.slot: seq for seq in engine.scheduler.running}
        live = buffers["counts"] > 0
        # A decode step of an engine with a draft head is a round: every row of it samples.
        for row in np.flatnonzero(live & (buffers.get("emit", live) == 1)).tolist():
            seq = owner[int(buffers["slots"][row])]
            at = len(seq.tokens)  # nothing runs ahead, so all of them were fed
            logits[seq.id, at] = buffers["logits"][row].copy()
            if not np.isfinite(buffers["logits"][row]).all():
                count, rows = int(live.sum()), len(buffers["slots"])
                print(f"NaN in row {row} of {count} in {rows}, position {at}")

    executors = {key: Recording(e, keep) for key, e in loaded.executors.items()}
    engine = Engine(replace(loaded, executors=executors), EngineOptions(depth=0, drafts=0))
    return engine, logits


def ragged(vocab: int) -> list[Request]:
    """64 prompts of 1 to 200 tokens, to be continued by 4 to 40, greedily."""
    rng = random.Random(3)
    return [
        Request(
            tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 200))),
            SamplingParams(temperature=0.0, max_tokens=rng.randint(4, 40), ignore_eos=True),
        )
        for _ in range(64)
    ]


def times(folder: Path, tokens: int = 60) -> str:
    """Median milliseconds of a decode step of 64 rows, and of one, at depth 1."""
    engine = Engine.open(folder, EngineOptions(depth=1))
    found = []
    for rows in (64, 1):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for seed in range(rows):
            engine.submit(Request(tuple(range(seed, seed + 60)), params))
        steps = []
        while not engine.idle:
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        found.append(f"{rows}: {statistics.median(steps[-tokens // 2 :]) * 1e3:.3f} ms")
    engine.close()
    return f"steps of {', '.join(found)}"


if __name__ == "__main__":
    {"prepare": prepare, "run": run}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
