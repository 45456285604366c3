"""Engines with drafts that onnxruntime runs, rules applied, against the float64 definition."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.engines.prompts import default_tables
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.executors.memory import EngineMemory
from tests.checkpoints import write_checkpoint
from tests.models.draft_run import ROWS, Array, DraftRun
from tests.models.test_drafts import SMALL, _check, _prompt, _rounds

OPTIONS = Options(
    "cpu", decode=(ROWS,), prefill=(128, 192, 256), max_context=192, max_seqs=3, kv_dtype="f32",
    debug=True, drafts=3,
)  # fmt: skip


class OrtEngine:
    """`draft_run.Runs` over an opened engine. Every state begins as NaN or wild."""

    def __init__(self, engine: Loaded) -> None:
        specs = {key: executor.specs for key, executor in engine.executors.items()}
        self.engine, self.limits = engine, engine.limits
        self.memory = EngineMemory(engine.states, engine.tables, specs)
        self.states, self.tables = self.memory.states, self.memory.tables
        for state in self.states.values():
            state[...] = np.nan if state.dtype.kind not in "iu" else 0x7F
        for name, table in default_tables(self.limits).items():
            self.tables[name][...] = table

    def run(self, family: str, steps: Mapping[str, Array]) -> Mapping[str, Array]:
        """A launch of the bucket of so many rows."""
        buffers = self.memory.buffers(family, len(steps["slots"]), 0)
        for name, value in steps.items():
            buffers[name][...] = value
        self.engine.executors[family, len(steps["slots"])].run(buffers)
        return {name: value.copy() for name, value in buffers.items()}


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_rounds_of_an_engine_are_the_definition(tmp_path: Path, moe: bool) -> None:
    path = tmp_path / "checkpoint"
    write_checkpoint(path, SMALL, "f32", moe=moe, seed=5)
    build(path, tmp_path / "engine", OPTIONS, lambda text: None)
    engine = load(tmp_path / "engine", threads=1)
    for length, ends in {1: (), 65: (13,), 150: (37, 101)}.items():
        run = DraftRun(OrtEngine(engine))
        run.prefill(_prompt(length), ends)
        _rounds(path, run, 3)
        for _ in range(2):
            _check(path, run, run.round(0))
            _check(path, run, run.round(3))
