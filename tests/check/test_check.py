"""`spark-check` on real engines: sound ones pass, a corrupted one fails at the right place."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.check import LEVELS, run_check
from spark_engine.check.cli import main
from spark_engine.check.engines.open_engines import (
    build_twin,
    by_reference,
    folder_of,
    is_fused,
    open_by_reference,
    open_engine,
)
from spark_engine.check.engines.prompts import sessions
from spark_engine.check.engines.runner import SessionRunner, feeds
from spark_engine.check.levels import compare_runs
from spark_engine.check.verdicts.report import CheckReport, show
from spark_engine.check.verdicts.thresholds import thresholds_for
from spark_engine.engine_file import MANIFEST, read_manifest
from spark_engine.errors import InternalError, OptionError
from spark_engine.interface import STATE_OUT, Precision
from spark_engine.manifest import StateInfo
from spark_engine.progress import Progress
from spark_engine.runtime.executors.executor import Executor, Specs, Wait
from spark_engine.runtime.executors.memory import EngineMemory, HostStates
from spark_engine.tensors import DType, TensorSpec
from tests.check.faulty_engines import corrupt, scaled
from tests.checkpoints import write_checkpoint

QUIET = Progress(None)

SHALLOW = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "vocab_size": 256,
}
OPTIONS = Options(decode=(2,), prefill=(64,), max_context=70, max_seqs=2, kv_dtype="f32")


def _quiet(text: str) -> None:
    del text


def _built(folder: Path, format: str, moe: bool = False) -> tuple[Path, Path]:
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, SHALLOW, format=format, moe=moe, seed=4)
    build(checkpoint, folder / "engine", OPTIONS, _quiet)
    return checkpoint, folder / "engine"


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _built(tmp_path_factory.mktemp("nvfp4"), "nvfp4")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _built(tmp_path_factory.mktemp("fp8"), "modelopt_mixed", moe=True)


def _first(report: CheckReport, level: str) -> str:
    return next(x.first for x in report.levels if x.name == level)


def _zero_a_block(data: Any) -> Any:
    """The codes of 32 neighbours of one row become zero."""
    data[:16] = 0
    return data


def test_a_sound_engine_agrees_with_its_references(nvfp4: tuple[Path, Path]) -> None:
    report = run_check(nvfp4[1], None, LEVELS, QUIET)
    assert report.passed and report.first == ""
    assert [level.name for level in report.levels] == ["op", "model", "layer", "text"]
    names = {f.name for level in report.levels for f in level.findings}
    assert names >= {
        "logits",
        "layers.0.gdn_state",
        "layers.1.k_pages",
        "layers.2.out",
        "token_counts",
    }
    kinds = {name.split()[0] for name in names if " " in name}
    assert kinds == {"prefill", "decode", "greedy"}
    logits = next(f for f in report.levels[1].findings if f.name == "logits")
    assert 0 < logits.figures["rel_l2"] < 2e-5, "equal to the last bit is no comparison"
    text = report.levels[-1].findings[0].figures
    assert text["texts"] == 2 and text["tokens"] > 2 * 20
    assert text["flips"] == text["near_ties"]


def test_it_agrees_with_its_checkpoint(nvfp4: tuple[Path, Path]) -> None:
    assert run_check(nvfp4[1], nvfp4[0], LEVELS, QUIET).passed


def test_rounded_activations_pass_at_every_level(fp8: tuple[Path, Path]) -> None:
    report = run_check(fp8[1], fp8[0], LEVELS, QUIET)
    assert report.passed, report.first
    assert report.levels[1].thresholds["name"] == "f32 quantised"


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("layers.0.mlp.gate_proj+up_proj.weight", "layers.0 (layers.0.out)"),
        ("layers.1.self_attn.q_proj+k_proj+v_proj.weight", "layers.1 (layers.1."),
        ("layers.2.linear_attn.out_proj.weight", "layers.2 (layers.2.mixed)"),
    ],
)
def test_an_altered_weight_block_is_found(
    tensor: str, layer: str, nvfp4: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, engine = nvfp4
    bad = corrupt(engine, tensor, tmp_path / "bad", _zero_a_block)
    report = run_check(bad, checkpoint, ("layer", "op"), QUIET)
    assert not report.passed
    assert _first(report, "layer").startswith(layer)
    assert report.first.startswith(tensor.rsplit(".", 1)[0]), "the node leads"
    assert [line.split(":")[0] for line in report.headlines] == [tensor.rsplit(".", 1)[0]]


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("layers.0.linear_attn.out_proj.weight_scale", "layers.0.linear_attn.out_proj"),
        ("layers.1.mlp.experts.w2_scale2+shared", "layers.1.mlp.experts"),
        ("lm_head.w_scale2", "lm_head"),
    ],
)
def test_a_scale_off_by_two_percent_is_named_first(
    tensor: str, module: str, fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    """Though activations are rounded, and whole runs merely alike."""
    bad = scaled(fp8[1], tmp_path / "bad", tensor)
    report = run_check(bad, fp8[0], ("op",), QUIET)
    assert [line.split(":")[0] for line in report.headlines] == [module]
    assert report.first.startswith(f"{module} (prefill ")
    console = Console(file=io.StringIO(), width=120)
    show(report, console)
    assert console.file.getvalue().startswith(f"{module}: ")


def test_a_twin_rounded_to_bf16_is_near_and_not_equal(
    nvfp4: tuple[Path, Path], tmp_path: Path
) -> None:
    """What a native engine is compared with; here it is compared with the engine in f32."""
    checkpoint, engine = nvfp4
    one = open_engine(engine)
    manifest = read_manifest(engine)
    rounded = Precision(DType.BF16, DType.BF16, DType.F32)
    like = replace(one, folder=replace(folder_of(one), manifest=replace(manifest, dtypes=rounded)))
    twin = build_twin(checkpoint, like, tmp_path, _quiet, True)
    assert read_manifest(twin).dtypes == rounded and is_fused(read_manifest(twin))
    limits = thresholds_for([manifest, read_manifest(twin)])
    assert limits.name == "bf16"
    plan = sessions(one.limits, list(one.executors))[:2]
    sides = [("layer", one)], ("twin", open_by_reference(twin))
    (level,) = compare_runs(*sides, plan, limits, QUIET)
    figures = {f.name: f.figures for f in level.findings}
    assert level.passed, level.first
    assert 1e-4 < figures["logits"]["rel_l2"] and 1e-4 < figures["layers.0.conv_state"]["rel_l2"]


def test_an_engine_with_a_block_drafter_names_its_remedy(
    nvfp4: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, engine = nvfp4
    one, manifest = open_engine(engine), read_manifest(engine)
    pages = StateInfo(TensorSpec("dflash.layers.0.k_pages", DType.F32, (2, 2, 2, 2)), "page")
    drafting = replace(manifest, states=(*manifest.states, pages))
    like = replace(one, folder=replace(folder_of(one), manifest=drafting))
    with pytest.raises(OptionError, match="with the same --drafter, and give that engine"):
        build_twin(checkpoint, like, tmp_path, _quiet, True)


def test_an_altered_block_shows_among_rounded_activations(
    fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    """Where whole runs are merely alike, the node by itself is not excused."""
    checkpoint, engine = fp8
    tensor = "layers.1.self_attn.o_proj.weight"
    bad = corrupt(engine, tensor, tmp_path / "bad", _zero_a_block)
    assert "layers.1.self_attn" in _first(run_check(bad, checkpoint, ("op",), QUIET), "op")


def test_engine_against_engine(nvfp4: tuple[Path, Path], tmp_path: Path) -> None:
    bad = corrupt(nvfp4[1], "lm_head.weight", tmp_path / "bad", lambda d: d[::-1])
    assert run_check(nvfp4[1], nvfp4[1], ("model",), QUIET).passed
    report = run_check(bad, nvfp4[1], ("model", "layer", "text"), QUIET)
    assert report.first == "logits"
    text = report.levels[-1]
    assert text.first == "greedy text" and text.findings[0].figures["same"] == 0


def test_an_engine_with_rings_agrees_with_its_checkpoint_and_with_one_without(
    nvfp4: tuple[Path, Path], tmp_path: Path
) -> None:
    build(nvfp4[0], tmp_path / "ringed", replace(OPTIONS, gdn_ring=4), _quiet)
    assert run_check(tmp_path / "ringed", nvfp4[0], LEVELS, QUIET).passed
    report = run_check(tmp_path / "ringed", nvfp4[1], ("model", "layer", "text"), QUIET)
    assert report.passed
    names = {f.name for level in report.levels for f in level.findings}
    assert "layers.0.gdn_state" in names and "layers.0.gdn_ring" not in names


def test_engines_of_other_limits_are_refused(nvfp4: tuple[Path, Path], tmp_path: Path) -> None:
    build(nvfp4[0], tmp_path / "wide", replace(OPTIONS, max_seqs=3), _quiet)
    with pytest.raises(OptionError, match="--max-seqs"):
        run_check(nvfp4[1], tmp_path / "wide", ("model",), QUIET)
    with pytest.raises(OptionError, match="neither"):
        run_check(nvfp4[1], tmp_path, ("model",), QUIET)


def test_the_command(nvfp4: tuple[Path, Path], tmp_path: Path) -> None:
    good = CliRunner().invoke(main, [str(nvfp4[1]), "--level", "op"])
    assert good.exit_code == 0 and "no divergence" in good.output
    bad = corrupt(nvfp4[1], "norm.weight", tmp_path / "bad", lambda d: d[::-1])
    arguments = [str(bad), "--against", str(nvfp4[1]), "--level", "model", "--json"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 3
    report = json.loads(found.stdout)
    assert report["passed"] is False and report["first_divergence"] == "logits"
    missing = CliRunner().invoke(main, [str(tmp_path / MANIFEST)])
    assert missing.exit_code == 2 and "spark-build" in missing.output


def test_a_pure_iteration_equals_the_session(nvfp4: tuple[Path, Path]) -> None:
    """States handed from feed to feed give what states kept inside give."""
    engine = open_engine(nvfp4[1])
    steps = list(feeds(sessions(engine.limits, list(engine.executors))[:1]))
    specs = {key: executor.specs for key, executor in engine.executors.items()}
    memory = EngineMemory(engine.states, engine.tables, specs)
    states = {i.spec.name: np.zeros(i.spec.dims, i.spec.dtype.numpy) for i in engine.states}
    with SessionRunner("session", engine) as session:
        for feed in steps:
            key = session._key(feed)
            buffers = memory.buffers(*key, 0)
            found = []
            for _ in range(2):
                for name, array in {**feed, **states}.items():
                    if name in buffers:
                        buffers[name][...] = array
                    elif name in memory.states:
                        memory.states[name][...] = array
                engine.executors[key].run(buffers)
                found.append(buffers["logits"].copy())
            states = {name: memory.states[name].copy() for name in states}
            live = feed["counts"] > 0
            np.testing.assert_array_equal(found[0][live], session.infer(feed)["logits"])
            np.testing.assert_array_equal(found[0][live], found[1][live])


class _Apart:
    """An executor with separate states, as a device has: it works on copies of a store's."""

    def __init__(self, inner: Executor, store: HostStates) -> None:
        self._inner, self._store = inner, store

    @property
    def specs(self) -> Specs:
        return self._inner.specs

    def run(self, buffers: Mapping[str, Any]) -> None:
        states = self._store.arrays
        assert not set(states) & set(buffers)
        outs = {name + STATE_OUT: array for name, array in states.items()}
        self._inner.run({**buffers, **states, **outs})

    def launch(self, buffers: Mapping[str, Any]) -> Wait:
        raise AssertionError("not called")

    def close(self) -> None:
        self._inner.close()


def test_states_on_a_device_are_fetched_and_poisoned(nvfp4: tuple[Path, Path]) -> None:
    """What is shown is what an engine with states on the host shows, from poisoned states on."""
    plain, other = open_engine(nvfp4[1]), open_engine(nvfp4[1])
    store = HostStates(other.states)
    executors = {key: _Apart(e, store) for key, e in other.executors.items()}
    apart = replace(other, executors=executors, device_states=store)
    steps = list(feeds(sessions(plain.limits, list(plain.executors))))
    with SessionRunner("host", plain) as host, SessionRunner("device", apart) as device:
        for feed in steps:
            want, got = host.infer(feed), device.infer(feed)
            assert list(want) == list(got)
            for name in want:
                np.testing.assert_array_equal(want[name], got[name], err_msg=name)
    poisoned = store.arrays["layers.0.gdn_state"]
    slots = plain.limits.max_seqs
    assert np.isnan(poisoned[slots]).all(), "the row behind the slots: a snapshot's, or scratch"
    assert not np.isnan(poisoned[:slots]).all()


def test_a_runner_refuses_a_bucket_it_lacks(nvfp4: tuple[Path, Path]) -> None:
    engine = by_reference(open_engine(nvfp4[1]))
    feed = next(feeds(sessions(engine.limits, [("decode", 1), ("prefill", 2)])))
    with SessionRunner("session", engine) as session, pytest.raises(InternalError, match="bucket"):
        session.infer(feed)
