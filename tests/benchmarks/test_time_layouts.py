"""One command for the layouts' steps: what it asks to build, its table, and what it passes over."""

import shlex
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks import time_layouts, time_step
from benchmarks.published import folder_of, name_of
from spark_engine.builder.cli import main as build
from spark_engine.interface import Limits

KNOWN = {one.layout: one for one in time_layouts.LAYOUTS}


@pytest.mark.parametrize("layout", KNOWN)
def test_an_engine_has_the_timed_buckets_alone(layout: str, tmp_path: Path) -> None:
    wanted = KNOWN[layout]
    words = shlex.split(time_layouts.command(wanted, tmp_path / "an engine", tmp_path / "o.json"))
    args = time_step.arguments(words[3:])
    assert args.engine == tmp_path / "an engine" and name_of(folder_of(args.config)) == layout
    keys = [(layout, n, args.ctx) for n in args.rows] + [(layout, 1, *args.prefill)]
    assert keys == wanted.keys and not args.split
    given = build.make_context("spark-build", ["C", *shlex.split(args.build)]).params
    assert given["decode"] == ",".join(map(str, args.rows)) and given["prefill"] == "8192"
    assert given["drafts"] == "0" and given["record"] is False
    sizes = max(args.rows), int(given["max_context"]), int(given["kv_tokens"]) // 64
    time_step.check_limits(Limits(*sizes, vocab=9), 8192, args)


@pytest.mark.parametrize("name", ["28b:int4", "27b:gguf", "27b", "nothing/here"])
def test_an_unknown_layout_names_those_that_there_are(name: str) -> None:
    with pytest.raises(SystemExit, match=f"{name} is no model: .* 122b-a10b, .* fp8-channel"):
        folder_of(name)
