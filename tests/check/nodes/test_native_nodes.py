"""The op level of native engines: nodes over places of device memory, on a GPU of numpy."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.check.check import run_check  # noqa: E402
from spark_engine.check.engines import open_engines  # noqa: E402
from spark_engine.check.verdicts.report import CheckReport  # noqa: E402
from spark_engine.errors import EngineError, OptionError  # noqa: E402
from spark_engine.progress import Progress  # noqa: E402
from spark_engine.runtime.engine.load import Loaded, _as_leader, load  # noqa: E402
from spark_engine.runtime.executors import native as runtime_native  # noqa: E402
from spark_engine.runtime.executors.program import MemoryOperand, Program  # noqa: E402
from spark_engine.runtime.ranks.leader import Orders  # noqa: E402
from tests.check.fake_native import Fake, build_fake, open_fake, places_of  # noqa: E402
from tests.check.faulty_engines import corrupt, scaled  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

QUIET = Progress(None)

SHALLOW = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 256,
    "linear_num_value_heads": 8,
}
OPTIONS = Options(
    target="sm_90a", decode=(2,), prefill=(64,), max_context=128, max_seqs=2, timing=False
)
BLUR = 2e-3  # relative, of every value that a kernel rounds to bf16


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Fake]:
    folder = tmp_path_factory.mktemp("native")
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, SHALLOW, format="modelopt_mixed", moe=True, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        fake = build_fake(checkpoint, folder / "engine", OPTIONS, patch)
    return checkpoint, folder / "engine", fake


@pytest.fixture
def engine(built: tuple[Path, Path, Fake], monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = built[2]
    fake.blur, fake.spoil, fake.idle = BLUR, None, set()
    fake.ran.clear()
    open_fake(fake, monkeypatch)
    return fake


def _op(engine: Path, checkpoint: Path) -> CheckReport:
    return run_check(engine, checkpoint, ("op",), QUIET)


def test_a_sound_engine_has_no_findings(built: tuple[Path, Path, Fake], engine: Fake) -> None:
    report = _op(built[1], built[0])
    assert report.passed and report.headlines == [], report.headlines
    (level,) = report.levels
    assert level.name == "op" and level.launches == 2
    nodes = {name for found in engine.nodes.values() for name in found}
    assert {f.name.split(maxsplit=1)[1] for f in level.findings} == nodes, "a node was left out"
    assert max(f.figures.get("rel_l2", 0) for f in level.findings) > 1e-3, "the blur is not seen"


MODULES = {  # the tensor that is larger by 2 %, and the module that the report begins with
    "layers.0.linear_attn.out_proj.weight_scale": "layers.0.linear_attn.out_proj: fp8_linear",
    "layers.0.linear_attn.conv1d.weight": "layers.0.linear_attn: gdn_prefill",
    "layers.0.mlp.experts.w2_scale2+shared": "layers.0.mlp.experts: moe_norm_quant",
    "layers.1.self_attn.kv_scale": "layers.1.self_attn: ",
    "lm_head.w_scale2": "lm_head: nvfp4_linear differs from its reference by 2.0 % (limit 0.",
}


@pytest.mark.parametrize("tensor", MODULES)
def test_a_scale_off_by_two_percent_is_found_and_named_first(
    tensor: str, built: tuple[Path, Path, Fake], engine: Fake, tmp_path: Path
) -> None:
    report = _op(scaled(built[1], tmp_path / "bad", tensor), built[0])
    assert not report.passed
    assert report.headlines and report.headlines[0].startswith(MODULES[tensor])
    module = MODULES[tensor].split(":")[0]
    assert report.first.startswith(module)
    blamed = {line.split(":")[0] for line in report.headlines}
    assert blamed == {module}, "a sound node is blamed"


def test_a_part_of_a_merged_projection_is_found(
    built: tuple[Path, Path, Fake], engine: Fake, tmp_path: Path
) -> None:
    """Only k_proj's 64 of 768 rows: an average over all would hide it."""
    tensor = "layers.1.self_attn.q_proj+k_proj+v_proj.weight_scale"

    def change(data: Any) -> Any:
        values = data.view(np.float32)
        values[640:704] *= np.float32(1.02)
        return values.view(np.uint8)

    report = _op(corrupt(built[1], tensor, tmp_path / "bad", change), built[0])
    assert report.headlines[0].startswith("layers.1.self_attn.q_proj+k_proj+v_proj: fp8_linear")


def test_errors_of_two_layers_are_both_named(
    built: tuple[Path, Path, Fake], engine: Fake, tmp_path: Path
) -> None:
    two = ("layers.1.self_attn.o_proj.weight_scale", "layers.0.linear_attn.out_proj.weight_scale")
    report = _op(scaled(built[1], tmp_path / "bad", *two), built[0])
    named = [line.split(":")[0] for line in report.headlines]
    assert named == ["layers.0.linear_attn.out_proj", "layers.1.self_attn.o_proj"]


def test_the_op_level_leads_and_the_others_follow(
    built: tuple[Path, Path, Fake], engine: Fake, tmp_path: Path
) -> None:
    bad = scaled(built[1], tmp_path / "bad", "layers.0.linear_attn.out_proj.weight_scale", by=1.5)
    report = run_check(bad, built[0], ("op", "layer"), QUIET)
    assert [level.name for level in report.levels] == ["op", "layer"]
    assert report.levels[1].first, "half as much again shows in the states too"
    assert report.first.startswith("layers.0.linear_attn.out_proj (prefill ")


def test_what_a_node_does_not_write_is_poison(built: tuple[Path, Path, Fake], engine: Fake) -> None:
    """A kernel that does not write its output must not return the old contents."""

    def lazy(name: str, results: list[Any]) -> None:
        if name == "layers.0.linear_attn.out_proj.y":
            results[0].view(np.uint16)[1:] = 0xFFFF  # what the poison was

    engine.spoil = lazy
    report = _op(built[1], built[0])
    assert report.headlines[0].startswith("layers.0.linear_attn.out_proj: fp8_linear NaN")


def test_a_lazy_kernel_does_not_pass_on_what_lay_there(
    built: tuple[Path, Path, Fake], engine: Fake
) -> None:
    """The engine's own runs before have left right results in the same places."""
    lazy = {"layers.0.linear_attn.out_proj.y"}
    engine.idle = lazy
    report = _op(built[1], built[0])
    assert report.headlines[0].startswith("layers.0.linear_attn.out_proj: fp8_linear NaN")


def test_a_write_outside_the_states_of_the_launch_is_found(
    built: tuple[Path, Path, Fake], engine: Fake
) -> None:
    def wild(name: str, results: list[Any]) -> None:
        for result in results:
            if result.ndim == 4 and result.dtype == np.float32:  # gdn_state
                result[0, 0, 0, 0] = 7.0

    engine.spoil = wild
    assert "layers.0.linear_attn" in _op(built[1], built[0]).first


def test_payloads_say_where_every_result_is(built: tuple[Path, Path, Fake]) -> None:
    """The twin's tensor names lead to the places that the builder gave to each node."""
    for payload, nodes in built[2].nodes.items():
        places = places_of(payload)
        assert places, "nothing is in the arena"
        for name, node in nodes.items():
            for place, spec in node.outs:
                names = place.name, place.name + ".out"
                own = place.kind in ("state", "output") and spec.name in names
                assert own == (spec.name not in places), (name, spec.name)
                assert own or places[spec.name] == place


def test_an_engine_without_places_is_refused_with_a_remedy(
    built: tuple[Path, Path, Fake], engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Program.read
    monkeypatch.setattr(Program, "read", lambda *given, **_: replace(read(*given), places={}))
    with pytest.raises(OptionError, match="rebuild it, or use --level layer"):
        _op(built[1], built[0])


def test_an_activation_may_not_be_larger_than_its_place(
    built: tuple[Path, Path, Fake], engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Program.read

    def far(payload: bytes, places: bool = True) -> Program:
        found = read(payload)
        small = {n: MemoryOperand("arena", "", 0, 1) for n in found.places}
        return replace(found, places=small)

    monkeypatch.setattr(Program, "read", far)
    with pytest.raises(EngineError, match="its place in the engine has 1: rebuild the engine"):
        _op(built[1], built[0])


def test_of_ranks_on_gpus_rank_0s_nodes_are_run_but_for_what_ranks_do_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other rank runs: a node that waited for one would hang."""
    changes = {**SHALLOW, "linear_num_value_heads": 32, "linear_num_key_heads": 8}
    changes["vocab_size"] = 512  # ids that ranks show each other come by 256
    write_checkpoint(tmp_path / "c", changes, format="nvfp4", seed=4)
    with pytest.MonkeyPatch.context() as patch:
        fake = build_fake(tmp_path / "c", tmp_path / "e", replace(OPTIONS, tp=2), patch)
    shared = {n for found in fake.nodes.values() for n, x in found.items() if "ranks" in x.attrs}
    assert len(shared) > 2
    fake.idle = shared
    open_fake(fake, monkeypatch)
    region = SimpleNamespace(own=1 << 50, table=1 << 51)
    monkeypatch.setattr(runtime_native, "connect_peers", lambda *given: region)
    peer: Any = SimpleNamespace(send=lambda data: None, check=lambda: None)
    group: Any = SimpleNamespace(leave=lambda: None, close=lambda: None)

    def led(path: Path, cache_bytes: int) -> Loaded:
        both = lambda array: np.stack([array, array])  # noqa: E731
        comm: Any = SimpleNamespace(rank=0, ranks=2, here=True, all_gather=both)
        return _as_leader(load(path, cache_bytes=cache_bytes, comm=comm), group, Orders(peer))

    monkeypatch.setattr(open_engines, "load", led)
    fake.spoil = lambda name, results: results[0].fill(1) if name == "embed" else None
    (level,) = _op(tmp_path / "e", tmp_path / "c").levels
    own = {name for found in fake.nodes.values() for name in found} - shared
    assert {f.name.split(maxsplit=1)[1] for f in level.findings} == own and level.launches == 2
    failed = {f.name for f in level.findings if not f.passed}
    assert failed == {"prefill embed", "decode embed"}
