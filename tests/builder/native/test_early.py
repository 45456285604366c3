"""Launches that start while others run: which do, and that they read nothing recent then."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.build import pack_all, rewrite_graph
from spark_engine.builder.graph.lower import facts_of, lower
from spark_engine.builder.graph.memory import lifetimes
from spark_engine.builder.native.early import begin_early, small_behind
from spark_engine.builder.native.program import BucketTactics
from spark_engine.builder.native.tactics import Chooser, Chosen, TacticChoice
from spark_engine.builder.plan.buckets import Size
from spark_engine.builder.plan.options import Options, gpu_of, resolve
from spark_engine.interface import PREFILL
from spark_engine.kernel import H200, MOST_OPEN, Early, Launch, Plan
from spark_engine.models.open_model import open_model, with_ranks
from spark_engine.models.weights.shards import TILE
from spark_engine.plugins.registry import REGISTRY
from tests.checkpoints import write_checkpoint
from tests.repository import ROOT

NONE = Chooser({}, H200)
LETS, BEGINS = Early(begins=True, lets=True), Early(begins=True)
HEADS = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def decided(*rows: tuple[str, Early] | tuple[str, Early, str]) -> BucketTactics:
    """A node a launch: its name, its hints, and the node that it reads (by default the one
    before)."""
    nodes: dict[str, Any] = {}
    made = []
    for name, early, *source in rows:
        of = source[0] if source else (made[-1][0].name if made else "")
        tensor = SimpleNamespace(inputs=[nodes[of]] if of else [])
        nodes[name] = SimpleNamespace(name=name, op="", inputs=[tensor])
        launch = Launch(name, (1, 1, 1), (32, 1, 1), (), 7, (1, 1, 1), (("A", "1"),), True)
        launch = Launch(**{**vars(launch), "early": early})
        made.append((nodes[name], TacticChoice(None, Plan((launch,)), 0.0, {})))
    return BucketTactics(gs.Graph(), Size("decode", 1), tuple(made))


def early_of(bucket: BucketTactics) -> dict[str, str]:
    """The macros that each launch got, as EARLY LATE; only those that got some."""
    found = {}
    for _, choice in begin_early(bucket, NONE).nodes:
        assert choice.plan is not None
        (launch,) = choice.plan.launches
        names = [name for name, _ in launch.defines if name in ("EARLY", "LATE")]
        if names:
            found[launch.symbol] = " ".join(names)
    return found


def test_a_launch_triggers_only_what_reads_nothing_recent() -> None:
    assert early_of(decided(("norm", LETS), ("gemm", BEGINS), ("norm2", LETS))) == {"norm": "EARLY"}
    assert early_of(decided(("norm", LETS), ("experts", Early()))) == {}
    assert early_of(decided(("gemm", BEGINS), ("gemm2", BEGINS))) == {}


def test_no_more_launches_are_open_than_their_readers_know_of() -> None:
    """Of six in a row that could let the next begin, the third waits: otherwise four launches
    would be open when the fourth begins."""
    rows = decided(*((str(i), LETS) for i in range(6)))
    assert list(early_of(rows)) == ["0", "1", "3", "4"] and MOST_OPEN == 3


def test_a_late_wait_is_for_what_is_older_than_the_launch_before() -> None:
    late = Early(begins=True, lets=True, late=True)
    older = decided(("norm", Early()), ("gemm", BEGINS), ("small", late, "norm"), ("gdn", BEGINS))
    assert early_of(older) == {"small": "EARLY LATE"}
    newer = decided(("norm", Early()), ("small", late), ("gemm", BEGINS))
    assert early_of(newer) == {"small": "EARLY"}
    overlapping = decided(
        ("norm", Early()), ("act", LETS), ("small", late, "norm"), ("gdn", BEGINS)
    )
    assert early_of(overlapping) == {"act": "EARLY", "small": "EARLY"}, (
        "norm may run when small begins"
    )


def test_deep_rings_are_for_gemms_that_begin_early() -> None:
    deep = Early(begins=True, stages=((("A", "5"),), 99))
    rows = decided(("norm", LETS), ("gemm", deep), ("gemm2", deep))
    found = [choice.plan.launches[0] for _, choice in begin_early(rows, NONE).nodes if choice.plan]
    assert [(one.defines, one.shared) for one in found[1:]] == [
        ((("A", "5"),), 99), ((("A", "1"),), 7)
    ]  # fmt: skip
    plain = begin_early(rows, NONE, deep=False).nodes
    assert all(c.plan.launches[0].shared == 7 for _, c in plain if c.plan)


def test_a_small_projection_goes_behind_the_large_one_of_its_input() -> None:
    def order(small: int, reads: str, op: str = "fp8_linear") -> list[str]:
        sizes = {"x": 8, "y": 8, "ba": small, "out": 512}
        x, norm, ba, out = (gs.Variable(name, shape=(1, n)) for name, n in sizes.items())
        given = {"norm": norm, "small": ba, "else": x}[reads]
        nodes = [
            gs.Node("norm_quant", "norm", {}, [x], [norm]),
            gs.Node("linear", "ba", {}, [norm], [ba]),
            gs.Node(op, "qkvz", {}, [given], [out]),
        ]
        choice = TacticChoice(None, Plan(()), 0.0, {})
        pairs = [(node, choice) for node in nodes]
        assert [node for node, _ in small_behind(pairs, lambda node: None)] == nodes
        late = TacticChoice(None, Plan(()), 1.0, {})
        found = small_behind(pairs, lambda node: late)
        moved = [node.name for node, _ in found] != [node.name for node in nodes]
        assert {node.name for node, one in found if one is late} == ({"ba"} if moved else set())
        return [node.name for node, _ in found]

    assert order(96, "norm") == ["norm", "qkvz", "ba"]
    for kept in ((512, "norm"), (96, "small"), (96, "else"), (96, "norm", "silu_mul")):
        assert order(*kept) == ["norm", "ba", "qkvz"]


Whole = Callable[[Sequence[Sequence[Chosen]]], list[float] | None]


def early_kernels(
    folder: Path, tp: int = 1, across: bool = False, whole: Whole | None = None
) -> dict[Size, dict[str, str]]:
    """The macros by kernel of each bucket of a small model, which `whole` times."""
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native.backend import NativeBackend

    write_checkpoint(folder, HEADS, "nvfp4")
    options = Options(
        "sm_90a", decode=(1, 32), prefill=(128,), max_seqs=32, max_context=256, tp=tp,
        across_hosts=across, timing=False,
    )  # fmt: skip
    options = Options(**{**vars(options), "gpu": gpu_of(options)})
    model = with_ranks(open_model(folder), tp, TILE, across)
    plan = resolve(options, facts_of(model))
    graphs = {family: lower(model, plan, family) for family in ("decode", PREFILL)}
    for graph in graphs.values():
        rewrite_graph(model, plan, graph)
    pack_all(graphs)
    backend = NativeBackend(plan, REGISTRY, folder / "cubins")
    if whole is None:
        backend.choose([*graphs.values()])
    else:
        chooser = Chooser(REGISTRY, H200)
        backend._decided = backend._decide([*graphs.values()], chooser)
        backend._compile = lambda *_: {}  # type: ignore[method-assign]
        backend.notes = backend._begin_early(chooser, whole)
        assert "begin early" in backend.notes[0]
    found: dict[Size, dict[str, str]] = {}
    for size, bucket in backend._decided.items():
        for _, choice in bucket.nodes:
            assert choice.plan is not None
            for launch in choice.plan.launches:
                names = [name for name, _ in launch.defines if name in ("EARLY", "LATE")]
                if names:
                    found.setdefault(size, {})[launch.symbol] = " ".join(names)
    return found


SOME = {"linear_small_n": "EARLY LATE", "gdn_decode": "EARLY", "paged_decode": "EARLY"}
SOME |= {"act_quant": "EARLY"}
ONE, MANY = Size("decode", 1), Size("decode", 32)


@pytest.mark.parametrize(("tp", "across"), [(1, False), (2, False), (2, True)])
def test_launches_begin_early_untimed(tmp_path: Path, tp: int, across: bool) -> None:
    """Of several ranks those that read each other's memory; of one rank in small buckets."""
    some = SOME | {"norm_quant": "EARLY"} | ({"reduce_norm": "EARLY"} if tp > 1 else {})
    found = early_kernels(tmp_path, tp, across)
    assert found == ({} if across else {ONE: some, MANY: some})


def test_each_bucket_is_launched_as_takes_less_time(tmp_path: Path) -> None:
    """The same nodes are timed in each form; equal nodes are one work."""
    asked = []

    def whole(variants: Sequence[Sequence[Chosen]]) -> list[float] | None:
        waiting, early, _ = variants
        assert {w.key for w, _, _ in waiting} == {w.key for w, _, _ in early}
        assert len(waiting) == len(early) > len({id(w) for w, _, _ in waiting})
        asked.append(waiting)
        return [1.0, 0.99, 1.0] if len(asked) == 1 else [1.0, 0.999, 0.9985]  # noise

    found = early_kernels(tmp_path, whole=whole)
    assert list(found) == [ONE] and len(asked) == 2
    assert list(early_kernels(tmp_path, whole=lambda _: None)) == [ONE, MANY], "by the rule"


def test_memory_follows_the_order_of_launches() -> None:
    """The small projection runs behind the large one, so what it reads is kept until then."""
    x, y, q, small, large = (gs.Variable(n, np.float32, (1, 512)) for n in "xyqsl")
    out = gs.Variable("out", np.float32, (1, 512))
    norm = gs.Node("Split", "norm", {}, [x], [y, q])
    ba, qkvz = gs.Node("Relu", "ba", {}, [y], [small]), gs.Node("Relu", "qkvz", {}, [q], [large])
    graph = gs.Graph([norm, ba, qkvz, gs.Node("Add", "o", {}, [small, large], [out])], [x], [out])
    spans = {b.name: (b.first, b.last) for b in lifetimes(graph, {}, {})}
    assert spans["y"] == (0, 1) and spans["l"] == (2, 3)
    order = [norm, qkvz, ba, graph.nodes[3]]
    spans = {b.name: (b.first, b.last) for b in lifetimes(graph, {}, {}, order)}
    assert spans["y"] == (0, 2) and spans["l"] == (1, 3)


def test_every_early_kernel_has_the_macro() -> None:
    """A launch that says it lets the next begin has a source that heeds EARLY."""
    sources = (
        "ranks/reduce_norm_peer",
        "gemm/linear_small_n_cluster_sm90",
        "delta_rule/delta_decode_fma",
        "moe/moe_norm_fma",
        "rowwise/act_quant_fma",
        "rowwise/norm_quant_fma",
        "attention/attention_decode_mma",
    )
    for name in sources:
        text = (ROOT / "plugins/kernels" / f"{name}.cu").read_text()
        bodies = 1 + ("act_quant" in name)  # with scales of tokens it is another one
        assert '"common/early.cuh"' in text and text.count("wait_and_let_next_begin();") == bodies
        assert text.count("wait_for_previous();") == ("small_n" in name)
