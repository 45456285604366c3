"""Prompts with images on ranks that are processes: the tokens of one rank."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event
from spark_engine.runtime.ranks import leader
from tests.oracles.test_parity_images import PROMPTS, request, run
from tests.oracles.test_parity_vision import write

HALVES = {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
OPTIONS = Options(
    target="cpu", decode=(4,), prefill=(64,), max_context=192, max_seqs=4, kv_dtype="f32",
    max_image_pixels=36 * 1024, drafts=0,
)  # fmt: skip


def test_two_ranks_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many packets to the other rank; twice, from the prefix cache, and after it was emptied."""
    write(tmp_path, "moe", **HALVES)  # of f32: ranks sum in another order
    monkeypatch.setattr("spark_engine.builder.plan.images.CPU_SIZES", ())
    monkeypatch.setattr(leader, "PIECE", 10_000)
    found: list[list[list[Event]]] = []
    for ranks in (1, 2):
        path = tmp_path / f"tp{ranks}"
        build(tmp_path, path, replace(OPTIONS, tp=ranks), lambda text: None)
        with closing(Engine.open(path, EngineOptions())) as engine:
            for _ in range(2):
                found.append(run(engine, [request(length) for length in PROMPTS]))
            engine.clear_cache()
            found += [run(engine, [request(length)]) for length in PROMPTS]
    one, two = found[: len(found) // 2], found[len(found) // 2 :]
    for alone, together in zip(one, two, strict=True):
        for a, b in zip(alone, together, strict=True):
            assert [e.token for e in a] == [e.token for e in b]
            assert [e.logprob for e in b] == pytest.approx([e.logprob for e in a], abs=2e-4)
