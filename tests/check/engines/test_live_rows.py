"""A launch over its own slots and pages computes what it computes over all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.engines.live_rows import LiveRows
from spark_engine.check.engines.open_engines import open_by_reference
from spark_engine.check.engines.prompts import CheckSession, sessions
from spark_engine.check.engines.runner import SessionRunner, feeds
from spark_engine.interface import Limits
from spark_engine.manifest import StateInfo
from spark_engine.runtime.engine.load import Loaded
from spark_engine.tensors import DType, TensorSpec
from tests.checkpoints import write_checkpoint

LIMITS = Limits(max_seqs=4, max_context=192, pages=9, vocab=50, snapshots=2)
STATES = (
    StateInfo(TensorSpec("pages", DType.F32, (10, 2)), "page"),
    StateInfo(TensorSpec("counts", DType.F32, (5, 2)), "slot"),
    StateInfo(TensorSpec("state", DType.F32, (7, 2)), "sequence"),
)


def launch() -> dict[str, Any]:
    """Slot 3 starts from snapshot 5 and is saved to 4; slot 1 continues; slot 0 is left out."""
    table = np.full((5, 3), -1, np.int32)
    table[0, 0], table[1, :2], table[3, :3] = 2, (8, 0), (5, 1 << 30, -1)
    table[4] = 1 << 30  # the scratch row holds anything
    rows = {"slots": [3, 1, -1, -1], "sources": [5, 1, -1, -1], "saves": [4, -1, -1, -1]}
    return {
        "page_table": table,
        "prompt_lens": np.arange(5, dtype=np.int32),
        "token_ids": np.arange(4 * 64, dtype=np.int32),
        **{name: np.array(row, np.int32) for name, row in rows.items()},
        **{i.spec.name: np.arange(i.spec.nbytes // 4.0).reshape(i.spec.dims) for i in STATES},
    }


def test_rows_and_pages_are_renumbered() -> None:
    given = launch()
    live = LiveRows.of(given, LIMITS, STATES)
    assert live.rows.tolist() == [1, 3, 4, 5] and live.pages.tolist() == [0, 5, 8]
    cut = {name: live.cut(name, array) for name, array in given.items()}
    assert [cut[name].tolist() for name in ("slots", "sources", "saves")] == [
        [1, 0], [3, 0], [2, -1],
    ]  # fmt: skip
    assert cut["page_table"][:2].tolist() == [[2, 0, -1], [1, -1, -1]]
    assert cut["page_table"].dtype == np.int32 and len(cut["page_table"]) == 5
    assert cut["prompt_lens"].tolist() == [1, 3, 4, 4, 4]
    assert cut["token_ids"].tolist() == [*range(2 * 64)]
    for name, index in (("pages", [0, 5, 8, 9]), ("counts", [1, 3, 4, 4, 4]),
                        ("state", [1, 3, 4, 5, 6])):  # fmt: skip
        assert cut[name].tolist() == given[name][index].tolist(), name


def test_neighbours_are_cut_too_where_they_are_asked_for() -> None:
    given = launch()
    live = LiveRows.of(given, LIMITS, STATES, near=1)
    assert live.rows.tolist() == [0, 1, 2, 3, 4, 5] and live.pages.tolist() == [0, 1, 4, 5, 6, 7, 8]
    table = live.cut("page_table", given["page_table"])
    assert table[3].tolist() == [3, -1, -1] and table[0].tolist() == [-1] * 3, (
        "no row of the launch"
    )
    assert live.numbers("counts").tolist() == [0, 1, 2, 3]
    cut = live.cut("counts", given["counts"])
    assert live.owned("counts", cut).tolist() == given["counts"][:4].tolist()


def test_what_is_put_back_reaches_its_own_rows_alone() -> None:
    given = launch()
    live = LiveRows.of(given, LIMITS, STATES)
    for name, rows in (("pages", {0, 5, 8, 9}), ("counts", {1, 3, 4}), ("state", {1, 3, 4, 5, 6})):
        buffer, value = given[name].copy(), -1 - live.cut(name, given[name])
        live.put(name, buffer, value)
        changed = np.flatnonzero((buffer != given[name]).any(axis=1))
        assert {*changed.tolist()} == rows
        expected = given[name].copy()
        expected[sorted(rows)] = -1 - given[name][sorted(rows)]
        assert buffer.tolist() == expected.tolist(), name


def test_an_output_has_zeros_in_the_rows_that_were_not_taken() -> None:
    live = LiveRows.of(launch(), LIMITS, STATES)
    for unit in (1, 64):  # of a row, of a token
        buffer = np.full((4 * unit, 3), np.nan)
        live.put_output(buffer, np.ones((2 * unit, 3)))
        assert buffer.sum(axis=1).tolist() == [3.0] * (2 * unit) + [0.0] * (2 * unit)


def test_a_value_of_rows_or_tokens_is_padded_and_no_other() -> None:
    live = LiveRows.of(launch(), LIMITS, STATES)
    for unit in (1, 64):
        whole = live.padded(np.ones((2 * unit, 3), np.float32))
        assert whole.shape == (4 * unit, 3) and whole.dtype == np.float32
        assert whole.sum() == 2 * unit * 3 == whole[: 2 * unit].sum()
    for other in (np.ones((5, 2)), np.float32(3.0)):
        assert live.padded(other) is other  # type: ignore[arg-type]


def test_a_launch_of_no_row_reaches_the_scratch_rows() -> None:
    given = launch() | {name: np.full(2, -1, np.int32) for name in ("slots", "sources", "saves")}
    live = LiveRows.of(given, LIMITS, STATES)
    assert len(live.rows) == len(live.pages) == 0
    assert live.cut("slots", given["slots"]).tolist() == [-1]
    assert live.cut("state", given["state"]).tolist() == given["state"][-1:].tolist()
    assert len(live.cut("page_table", given["page_table"])) == 1


CONFIG = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
          "vocab_size": 256, "mtp_num_hidden_layers": 1}  # fmt: skip
OPTIONS = Options("cpu", decode=(1, 4), prefill=(128,), max_context=140, max_seqs=4, cache_gib=0.01)


@pytest.fixture(scope="module", params=[0, 2])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine without drafts and one with, which stores states by position."""
    folder = tmp_path_factory.mktemp("live")
    write_checkpoint(folder / "m", CONFIG)
    options = replace(OPTIONS, drafts=request.param)
    build(folder / "m", folder / "engine", options, lambda text: None)
    return folder / "engine"


def buffers_of(loaded: Loaded, plan: list[CheckSession]) -> list[dict[str, bytes]]:
    """All outputs and states after each launch; a prefix is saved between two launches."""
    found = []
    with SessionRunner("x", loaded) as runner:
        for number, feed in enumerate(feeds(plan)):
            if len(feed["token_ids"]) == 64 * len(feed["slots"]):
                last = np.flatnonzero(feed["counts"] > 0)[-1]
                feed["saves"][last] = loaded.limits.max_seqs + number % 2
            runner.launch(feed)
            key = runner._key(feed)
            held, taken = {**runner._states}, int(np.flatnonzero(feed["slots"] >= 0)[-1]) + 1
            assert runner._memory is not None
            buffers = runner._memory.buffers(*key, 0)
            for spec in loaded.executors[key].specs.outputs:
                output = buffers[spec.name]
                held[spec.name] = output[: len(output) // len(feed["slots"]) * taken]
            found.append({name: array.tobytes() for name, array in held.items()})
    return found


def test_every_bit_is_that_of_the_launch_over_all_rows(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = open_by_reference(engine)
    assert loaded.limits.snapshots >= 2
    buckets = [*loaded.executors]
    assert ("verify_k2", 4) in buckets or not loaded.limits.drafts
    plan = sessions(loaded.limits, buckets)
    found, of = buffers_of(loaded, plan), LiveRows.of

    def whole(*given: Any) -> LiveRows:
        live = of(*given[:3], near=1 << 40)
        rows = loaded.limits.sequence_rows - 1
        assert (len(live.rows), len(live.pages)) == (rows, loaded.limits.pages)
        return live

    monkeypatch.setattr(LiveRows, "of", whole)
    assert buffers_of(loaded, plan) == found
