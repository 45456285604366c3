"""One command for the layouts' steps: what it asks to build, its table, and what it passes over."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks import time_layouts, time_step
from benchmarks.published import folder_of, name_of
from spark_engine.builder.cli import main as build

KNOWN = {one.layout: one for one in time_layouts.LAYOUTS}


def row(layout: str, npl: int, ctx: int, **more: Any) -> dict[str, Any]:
    known = {"model": layout, "npl": npl, "ctx": ctx, "card": "NVIDIA H200", "floor_ms": 6.5}
    return known | {"step_ms": 7.0, "prefill_tok_s": 16000.0} | more


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
    assert int(given["kv_tokens"]) >= max(args.rows) * (args.ctx + args.steps)
    time_step.check_context(int(given["max_context"]), args)


def test_the_table_has_floors_of_the_card_and_what_was_asked() -> None:
    rows = [
        row("27b:fp8-block", 1, 1024),
        row("27b:fp8-block", 8, 1024, step_ms=8.0, ring_floor_ms=5.0),
        row("27b:fp8-block", 1, 8192),
        row("27b:fp8-channel", 8, 1024, card="NVIDIA H100 80GB HBM3"),
        row("27b:fp8-channel", 1, 8192),
        row("27b:nvfp4", 1, 1024, step_ms=5.0),
        row("27b:int4-all", 1, 1024),
    ]
    found = {(r["model"], r["npl"], r["ctx"]): r for r in rows}
    lines = list(time_layouts.table(found))
    assert lines[2:] == [
        "| 27b:fp8-block | 7.00 (6.50; 7.20) | 8.00 (5.00; 7.80) |  |  |  | 16,000 (16,500) |",
        "| 27b:fp8-channel |  | 7.00 (9.32; 8.00) |  |  |  | 16,000 (16,000) |",
        "| 27b:nvfp4 | 5.00 (6.50) |  |  |  |  |  |",
        "| 27b:int4-all | 7.00 (6.50; 5.40) |  |  |  |  |  |",
    ]


def test_layouts_that_fail_or_are_timed_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "o.json", []
    keys = KNOWN["80b-a3b:nvfp4-experts"].keys
    out.write_text(json.dumps({"rows": [row(*key) for key in keys]}))

    def run(limit: dict[str, float], command: str, folder: Path) -> tuple[int, float]:
        asked.append(command.split()[4])
        engine = Path(command.split()[3])
        (engine / "weights").mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        (folder / "output.txt").write_text("…\nspark-build: it does not fit\n")
        assert 0 < limit["limit"] <= 560 and len([*engine.parent.iterdir()]) == 2, "one engine"
        return 1, 2.0

    monkeypatch.setattr(time_layouts, "run", run)
    names = "27b:int4-all,80b-a3b:nvfp4-experts,122b-a10b:nvfp4-experts"
    assert time_layouts.main(["--out", str(out), "--layouts", names]) == 1
    assert asked == ["27b:int4-all", "122b-a10b:nvfp4-experts"]
    printed = capsys.readouterr().out
    assert "27b:int4-all: code 1, 2 s: spark-build: it does not fit" in printed
    assert "| 80b-a3b:nvfp4-experts | 7.00 (6.50) | 7.00 (6.50) | 7.00 (6.50) |  |  |" in printed
    assert time_layouts.main(["--out", str(out), "--layouts", "80b-a3b:nvfp4-experts"]) == 0
    assert time_layouts.main(["--out", str(out), "--seconds", "0"]) == 1 and len(asked) == 2
    with pytest.raises(SystemExit):
        time_layouts.main(["--layouts", "27b"])


def test_a_layout_is_planned_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert time_layouts.main(["--plan", "--layouts", "27b:fp8-channel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == [
        f"fp8-channel {size}" for size in ("decode 1", "decode 8", "decode 32", "decode 64",
                                           "decode 128", "prefill 8192")
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["28b:int4", "27b:gguf", "27b", "nothing/here"])
def test_an_unknown_layout_names_those_that_there_are(name: str) -> None:
    with pytest.raises(SystemExit, match=f"{name} is no model: .* 122b-a10b, .* fp8-channel"):
        folder_of(name)
