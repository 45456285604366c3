"""The whole engine over native executors on a fake GPU in numpy: calls per step, and tokens.

The one kernel of a bucket is the fake executor's work over device memory. A table row that was not
copied, or a staging buffer that was reused too early, changes a token.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine import manifest  # noqa: E402
from spark_engine.engine_file import EngineHeader  # noqa: E402
from spark_engine.errors import ExecutorError  # noqa: E402
from spark_engine.interface import Limits, tables, tile_of  # noqa: E402
from spark_engine.runtime.engine.engine import Engine, EngineOptions  # noqa: E402
from spark_engine.runtime.engine.load import Loaded  # noqa: E402
from spark_engine.runtime.engine.request import Event, Request, SamplingParams  # noqa: E402
from spark_engine.runtime.executors import native  # noqa: E402
from spark_engine.runtime.executors.memory import BucketKey  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from spark_engine.weights_file import plan_weights  # noqa: E402
from tests.runtime.engine.invariants import check_idle  # noqa: E402
from tests.runtime.fake_executor import EOS, VOCAB, Device, FakeExecutor, build_fake, fake_states  # noqa: E402
from tests.runtime.fake_gpu import FakeGpu  # noqa: E402
from tests.runtime.native_folder import encode, tabled  # noqa: E402
from tests.spark_engine.written_weights import write_weights  # noqa: E402

LIMITS = Limits(8, 340, 40, VOCAB, page_size=16, bias_slots=8, top_logprobs=3)
DECODE, PREFILL = (1, 2, 8), (1, 4)
KEYS: tuple[BucketKey, ...] = (*(("decode", n) for n in DECODE), *(("prefill", n) for n in PREFILL))


class Bucket:
    def __init__(self, key: BucketKey) -> None:
        self.fake = FakeExecutor(LIMITS, *key, Device())
        specs = self.fake.specs
        self.specs = (*specs.inputs, *specs.states, *specs.outputs)
        tile = tile_of(key[0])
        self.header = EngineHeader(
            "native", "sm_90a", *key, tile, specs.inputs, specs.states, specs.outputs, {}
        )
        kinds = ["input"] * len(specs.inputs) + ["state"] * len(specs.states)
        kinds += ["output"] * len(specs.outputs)
        one = [1, 1, 1]
        row = {
            **{"node": "n", "kernel": 0, "grid": one, "block": one, "cluster": one, "shared": 0},
            **{"pdl": False, "resident": False},
            "args": [[k, s.name] for k, s in zip(kinds, self.specs, strict=True)],
        }
        self.symbol = "_".join(map(str, key))
        body = {
            **{"arena_bytes": 256, "zeroed_bytes": 0, "cubins": [5], "launches": [row]},
            "kernels": [{"cubin": 0, "symbol": self.symbol, "shared": 0}],
        }
        self.payload = encode(tabled(body))

    def __call__(self, gpu: FakeGpu, *addresses: int) -> None:
        arrays = {
            spec.name: gpu.view(address, spec.dtype.numpy, spec.dims)
            for spec, address in zip(self.specs, addresses, strict=True)
        }
        for spec in self.fake.specs.outputs:
            arrays[spec.name].fill(-99)
        self.fake._work(arrays)


Make = Callable[[int | None, int], tuple[Engine, FakeGpu]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes an engine of a depth with so many bytes of swap, and its GPU; closes the engine at the
    end."""
    owners: list[native.NativeEngine] = []

    def made(depth: int | None, swap_bytes: int) -> tuple[Engine, FakeGpu]:
        buckets = {key: Bucket(key) for key in KEYS}
        gpu = FakeGpu({bucket.symbol: bucket for bucket in buckets.values()})
        monkeypatch.setattr(native, "Gpu", lambda: gpu)
        spec = TensorSpec("w", DType.F32, (4,))
        write_weights(tmp_path / "w", plan_weights([spec]), [np.zeros(4, np.float32)])
        states = fake_states(LIMITS)
        described = SimpleNamespace(
            states=states,
            tables=tables(LIMITS),
            card="h200",
            buckets=[manifest.Bucket("x", 8, 1, "f", 256)],
        )
        where: Any = SimpleNamespace(
            manifest=described, weights_of=lambda rank: tmp_path / "w", check_chunk=lambda *_: None
        )
        owner = native.NativeEngine(where, lambda available: 0, lambda stage: None)
        owner.wait()
        owners.append(owner)
        executors = {k: owner.open(b.header, b.payload, Path(), 1) for k, b in buckets.items()}
        kept = (None, owner.states, owner.tables)
        loaded = Loaded(LIMITS, EOS, states, tables(LIMITS), executors, *kept)
        return Engine(loaded, EngineOptions(depth=depth, swap_bytes=swap_bytes)), gpu

    yield made
    for owner in owners:
        owner.close()


def requests(count: int) -> list[Request]:
    rng, found = random.Random(3), []
    for seed in range(count):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(40, 170)))
        params = SamplingParams(
            max_tokens=rng.randint(20, 90),
            ignore_eos=rng.random() < 0.8,
            min_tokens=0 if seed % 3 else 1,
            logit_bias={9: 1.5} if seed % 4 == 0 else {},
            seed=seed,
            logprobs=rng.choice((None, 2)),
        )
        found.append(Request(prompt, params))
    return found


def run(engine: Engine, asked: Sequence[Request]) -> list[list[tuple[Any, ...]]]:
    made: dict[int, list[tuple[Any, ...]]] = {}
    for request in asked:
        made[engine.submit(request)] = []
        _note(made, engine.step())
    while not engine.idle:
        _note(made, engine.step())
    check_idle(engine)
    return list(made.values())


def _note(made: dict[int, list[tuple[Any, ...]]], events: Sequence[Event]) -> None:
    for e in events:
        made[e.request_id].append((e.token, e.logprob, e.top, e.finish))


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
@pytest.mark.parametrize("depth", [0, None])
def test_tokens_equal_those_of_each_request_alone_on_the_host(
    make: Make, depth: int | None, swap_bytes: int
) -> None:
    engine, _ = make(depth, swap_bytes)
    asked = requests(16)
    found = run(engine, asked)
    stats = engine.stats()
    assert stats["preempted_swap"] or stats["preempted_recompute"], "the pages must run out"
    alone = Engine(build_fake(LIMITS, (1,), (1,), lazy=False), EngineOptions())
    for request, events in zip(asked, found, strict=True):
        assert events == run(alone, [request])[0]


def test_a_decode_step_is_four_calls_and_waits_for_the_one_before(make: Make) -> None:
    engine, gpu = make(None, 0)
    assert engine.depth == 1, "the default where a device keeps the states"
    for seed in range(4):
        engine.submit(Request((1, 2, 3), SamplingParams(ignore_eos=True, seed=seed)))
    for _ in range(4):
        engine.step()
    steady = ["upload", "replay", "download", "record", "blocks"]
    grown = ["passes", "upload", "record", *steady]  # one table, consecutive rows
    found = []
    for _ in range(40):
        gpu.calls.clear()
        assert len(engine.step()) == 4, "every sequence moves in every step"
        found.append(gpu.calls.copy())
        assert any(callable(work) for work in gpu._queue), "the next step was launched before"
    assert {tuple(calls) for calls in found} == {tuple(steady), tuple(grown)}
    gaps = [i for i, calls in enumerate(found) if calls == grown]
    assert len(gaps) >= 2 and {b - a for a, b in itertools.pairwise(gaps)} == {LIMITS.page_size}


def test_a_device_that_fails_is_said_by_the_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gpu = make(None, 0)
    for request in requests(9):
        engine.submit(request)

    def broken(graph: object) -> None:
        raise ExecutorError("the CUDA driver says CUDA_ERROR_ILLEGAL_ADDRESS (700)")

    engine.step()
    monkeypatch.setattr(gpu, "replay", broken)
    with pytest.raises(ExecutorError, match="ILLEGAL_ADDRESS"):
        engine.step()
