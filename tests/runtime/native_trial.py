"""Native engines compared with the CPU's, over random checkpoints: a trial in two halves.

`python -m tests.runtime.native_trial prepare FOLDER` builds both kinds where the builder is and
keeps the CPU's logits; `… compare FOLDER` runs the native ones where a GPU is, prints how far the
logits are, then serves requests at both depths and counts what differs from each request alone,
and says which calls of the driver a step of decoding makes and how long the host and it take.
"""

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.device import gpu as device
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.native import NativeExecutor
from tests.runtime.engine.invariants import check_idle
from tests.solo import Solo

MODELS = (("dense_bf16", "bf16", False), ("dense_mixed", "modelopt_mixed", False),
          ("moe_mixed", "modelopt_mixed", True))  # fmt: skip
TARGET, VOCAB = "sm_90a", 512


def prepare(base: Path) -> None:
    """Checkpoints, engines of both targets, the CPU's logits."""
    from spark_engine.builder.build import build
    from spark_engine.builder.plan.options import Options
    from tests.checkpoints import write_checkpoint

    sizes: dict[str, Any] = {"decode": (1, 4), "prefill": (64, 128), "max_seqs": 4}
    for name, format, moe in MODELS:
        checkpoint = base / f"{name}_checkpoint"
        heads = {"linear_num_value_heads": 8}
        write_checkpoint(checkpoint, format=format, moe=moe, config_kwargs=heads)
        for target in ("cpu", TARGET):
            options = Options(target=target, max_context=256, kv_tokens=640, **sizes)
            build(checkpoint, base / f"{name}_{target}", options, lambda text: None)
        np.savez(base / f"{name}.npz", *logits(base / f"{name}_cpu"))


def logits(path: Path) -> list[NDArray[np.float32]]:
    """After two prefills and six decode steps of one sequence on poisoned states."""
    engine = load(path, threads=1)
    poison(engine.executors.values())
    solo, rng = Solo(engine), np.random.default_rng(5)
    solo.prefill(rng.integers(0, VOCAB, 128).tolist(), 2)
    solo.prefill(rng.integers(0, VOCAB, 37).tolist(), 1)
    for i in range(6):
        solo.decode(int(rng.integers(0, VOCAB)), (1, 4)[i % 2])
    for executor in engine.executors.values():
        executor.close()
    return [row.astype(np.float32) for row in solo.logits]


def poison(executors: Iterable[Executor]) -> None:
    """Fills the scratch memory of native executors with NaN: reads of unwritten memory show."""
    for executor in executors:
        if isinstance(executor, NativeExecutor):
            owner = executor._engine
            owner.gpu.fill(owner.arena, 0xFF, owner.arena_bytes)
            return


def compare(base: Path) -> None:
    """Prints one line for each launch, then one for each mode of serving."""
    for name, _, _ in MODELS:
        want = list(np.load(base / f"{name}.npz").values())
        for i, (g, w) in enumerate(zip(logits(base / f"{name}_{TARGET}"), want, strict=True)):
            far = float(np.linalg.norm(g - w) / np.linalg.norm(w))
            print(f"{name} {i}: distance {far:.4f}, argmax {g.argmax()} and {w.argmax()}")
        serve(base / f"{name}_{TARGET}")
        steady(base / f"{name}_{TARGET}")


class Calls:
    """Counts the driver's calls by name and the seconds in them, in `device.driver`'s place."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.made: list[tuple[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        return self._counted(name, found) if name.startswith("cu") else found

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.made.append((name, time.perf_counter() - start))
            return result

        return call


def steady(path: Path) -> None:
    """Prints the calls of steps without a table change, with counts, and the median times."""
    engine = Engine.open(path)
    prompt = tuple(range(1, 30))
    for seed in range(4):
        engine.submit(Request(prompt, SamplingParams(ignore_eos=True, max_tokens=150, seed=seed)))
    for _ in range(8):
        engine.step()
    walls, calls = [], Calls(device.driver)
    device.driver = calls
    steps: Counter[tuple[str, ...]] = Counter()
    costs: dict[str, list[float]] = {}
    for _ in range(100):
        calls.made.clear()
        start = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - start)
        steps[tuple(name for name, _ in calls.made)] += 1
        for name, took in calls.made:
            costs.setdefault(name, []).append(took)
    device.driver = calls._driver
    for names, count in steps.most_common():
        print(f"  {count} steps: {', '.join(names)}")
    each = ", ".join(f"{n} {statistics.median(c) * 1e6:.1f}" for n, c in costs.items())
    print(f"  microseconds: {each}; step {statistics.median(walls) * 1e6:.1f}")
    while not engine.idle:
        engine.step()
    engine.close()


def serve(path: Path) -> None:
    """Eight requests, more than the pages hold, at depths 0 and 1, and each alone."""
    rng = random.Random(1)
    requests = [_request(rng, seed) for seed in range(8)]
    many = [_run(path, requests, depth) for depth in (0, 1)]
    alone = [_run(path, [request], 0)[0] for request in requests]
    same = sum(a == b for a, b in zip(many[0], alone, strict=True))
    print(f"{path.name}: depths agree: {many[0] == many[1]}; as alone: {same} of {len(alone)}")


def _request(rng: random.Random, seed: int) -> Request:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(3, 150)))
    temperature = rng.choice((0.0, 0.8))
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=seed)
    return Request(prompt, params)


def _run(path: Path, requests: list[Request], depth: int) -> list[list[int]]:
    engine = Engine.open(path, EngineOptions(depth=depth))
    poison(engine.loaded.executors.values())
    made: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    start, count = time.monotonic(), 0
    while not engine.idle:
        for event in engine.step():
            made[event.request_id] += [] if event.token is None else [event.token]
            if event.message:
                print(f"request {event.request_id}: {event.message}")
        count += 1
    took = (time.monotonic() - start) / count * 1e3
    swaps = engine.stats()["preempted_swap"]
    print(f"  {len(requests)} requests, depth {depth}: {took:.3f} ms a step, {swaps} swaps")
    check_idle(engine)
    engine.close()
    return list(made.values())


if __name__ == "__main__":
    {"prepare": prepare, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
