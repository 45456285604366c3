"""Two ranks on two real GPUs: many requests equal each one alone, bit for bit, and one rank within
a tolerance.
"""

import os
import random
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CapacityError, ExecutorError
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Event, Request
from tests.checkpoints import write_checkpoint
from tests.device.on_gpu import GPUS, HERE, on_gpu
from tests.runtime.engine.drive import drain
from tests.runtime.engine.invariants import check_idle
from tests.runtime.random_engines import heard, random_request
from tests.runtime.ranks.test_rank_processes import gone, until_noticed

pytestmark = on_gpu(900)
TWO = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
CONFIG = {
    "linear_num_value_heads": 32,  # so that each rank's projection has 16 rows
    "linear_num_key_heads": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mtp_num_hidden_layers": 1,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
OPTIONS = Options(
    target=HERE or "cpu", decode=(1, 16, 64), verify=((1, 2), (16, 2), (64, 2)), prefill=(256,),
    max_seqs=64, max_context=384, kv_tokens=64 * 150, invariant=True, timing=False,
)  # fmt: skip
REQUESTS = 64
TOLERANCE = 0.05  # of a logprob, as two ranks round other partial sums to bf16


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """An invariant engine of one rank and of two ranks, with drafts."""
    base = tmp_path_factory.mktemp("ranks")
    write_checkpoint(base / "checkpoint", CONFIG, "nvfp4", moe=True)
    made = {}
    for ranks in (1, 2):
        options = replace(OPTIONS, tp=ranks)
        build(base / "checkpoint", base / f"tp{ranks}", options, print)
        made[ranks] = base / f"tp{ranks}"
    return made


def crowd() -> list[Request]:
    rng = random.Random(3)
    return [random_request(rng, 200, 40) for _ in range(REQUESTS)]


def serve(engine: Engine, asked: list[Request]) -> list[list[Event]]:
    events = drain(engine, *asked)
    check_idle(engine)
    return [*events.values()]


@TWO
def test_a_crowd_over_two_ranks_is_each_alone_bit_for_bit(engines: dict[int, Path]) -> None:
    """With drafts, hits in the prefix cache, and more sequences than pages."""
    asked = crowd()
    with closing(Engine.open(engines[2], EngineOptions(seed=1))) as engine:
        assert engine.loaded.group is not None
        pids = engine.loaded.group.pids.values()
        first, again = serve(engine, asked), serve(engine, asked)
        stats = engine.stats()
        assert stats["prefix_hits"] and sum(stats["accepted_by_position"]) >= 0  # type: ignore[call-overload]
        engine.clear_cache()
        alone = [serve(engine, [one])[0] for one in asked[:16]]
    assert gone(pids)
    assert [heard(e) for e in again] == [heard(e) for e in first]
    assert [heard(e) for e in alone] == [heard(e) for e in first[:16]]


@TWO
def test_two_ranks_say_about_what_one_says(engines: dict[int, Path]) -> None:
    asked = crowd()[:16]
    said = {}
    for ranks, path in engines.items():
        with closing(Engine.open(path, EngineOptions(drafts=0))) as engine:
            said[ranks] = [events[0] for events in serve(engine, asked)]
    tops = {r: [dict(e.top) for e in events] for r, events in said.items()}
    pairs = [(a[i], b[i]) for a, b in zip(tops[1], tops[2], strict=True) for i in a.keys() & b]
    assert len(pairs) >= 2 * len(asked)
    one, two = np.array(pairs).T
    assert np.isfinite(two).all() and np.abs(one - two).max() < TOLERANCE * max(1, np.ptp(one))


@TWO
def test_a_rank_that_dies_ends_rank_0s_step(engines: dict[int, Path]) -> None:
    """It is killed between two steps, with no step in flight (depth 0): otherwise rank 0 would end
    with a step that waits on the device."""
    with closing(Engine.open(engines[2], EngineOptions(depth=0))) as engine:
        assert engine.loaded.group is not None
        for one in crowd():
            engine.submit(one)
        for _ in range(3):
            engine.step()
        os.kill(engine.loaded.group.pids[1], signal.SIGKILL)
        until_noticed(engine)
        with pytest.raises(ExecutorError, match="rank 1 is gone"):
            engine.step()


@pytest.mark.skipif(GPUS != 1, reason="needs one GPU")
def test_fewer_gpus_than_ranks_are_refused_with_numbers(engines: dict[int, Path]) -> None:
    with pytest.raises(CapacityError, match=r"built for 2 GPUs, .* this machine shows 1"):
        load(engines[2])
