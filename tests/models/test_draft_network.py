"""Graphs with drafts: inputs, outputs, states and their updates, wiring, names."""

from collections import Counter

import onnx_graphsurgeon as gs
import pytest

from spark_engine import interface
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.graph_checks import Subject, verify
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import Network, build_network
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.open_model import describe
from spark_engine.models.weights.draft_weights import with_draft_dtype
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType
from tests.checkpoints import text_config
from tests.models import nvidia_configs

LIMITS = Limits(4, 256, 16, 512, drafts=3, gdn_ring=8, snapshots=6)
BF16 = Precision(DType.BF16, DType.F8E4M3, DType.F32)
FAMILIES = interface.families(3)
UPDATED = {"last_tokens", "token_counts", "positions", "mtp.k_pages", "mtp.v_pages"}


def _build(family: str, moe: bool = False, debug: bool = False, short: bool = False) -> Network:
    model = describe(text_config(moe, {"mtp_num_hidden_layers": 1}))
    options = DraftOptions(shortlist=(2, 3, 5) if short else None)
    return build_network(model, family, LIMITS, BF16, debug, options)


def _node(network: Network, name: str) -> gs.Node:
    return next(n for n in network.graph.nodes if n.name == name)


def _reads(network: Network, name: str) -> list[str]:
    """The names of a node's operands but for weights."""
    return [t.name for t in _node(network, name).inputs if t.name not in network.weights]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_with_drafts_are_legal(family: str, moe: bool, short: bool) -> None:
    for debug in (False, True):
        network = _build(family, moe, debug, short)
        network.graph.toposort()
        graph = FamilyGraph(family, network.graph, dict(network.weights), network.states)
        verify(Subject.of(graph, LIMITS, REGISTRY), "lowered")


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_what_updates_them(family: str) -> None:
    network = _build(family)
    states = {spec.name: (spec.shape, unit) for spec, unit in network.states}
    written = {t.name for t in network.graph.outputs if t.name.endswith(".out")}
    common = UPDATED | ({"drafts"} if family.startswith("verify") else set())
    common -= {"positions"} if family == "prefill" else set()
    assert {n for n in written if not n.startswith("layers.")} == {f"{n}.out" for n in common}
    assert ("drafts" in states) is ("positions" in states) is (family != "prefill")
    assert states["mtp.k_pages"] == states["layers.3.k_pages"] == ((17, 2, 64, 64), "page")
    assert states["layers.0.conv_state"] == ((5 + 6, 4 + 3, 256), "sequence")
    assert states["layers.0.gdn_ring"][0][:2] == (5 + 6, 8 + 2 * 3 + 1)
    by_sequence = {name for name, (_, unit) in states.items() if unit == "sequence"}
    assert {name.split(".")[-1] for name in by_sequence} == {"conv_state", "gdn_ring", "gdn_state"}
    shared = [*interface.steps(family, 3), *interface.tables(LIMITS)]
    names = {s.name for s in shared} | set(states) | set(network.weights)
    assert {t.name for t in network.graph.inputs} == names
    results = {t.name for t in network.graph.outputs} - written
    assert results == {s.name for s in interface.outputs(LIMITS, family)}


def test_the_wiring_of_a_round() -> None:
    network = _build("verify_k2")
    ops = Counter(n.op for n in network.graph.nodes)
    assert (ops["paged_attention"], ops["append_kv"], ops["draft_token"]) == (3, 1, 2)
    assert ops["mtp_input"] == 2  # the last draft feeds nothing
    assert {n.attrs["tile"] for n in network.graph.nodes if "tile" in n.attrs} == {1, 3}
    for op in ("causal_conv", "gated_delta_step"):
        assert {n.attrs["drafts"] for n in network.graph.nodes if n.op == op} == {3}
    row = ["slots", "row_starts", "counts"]
    assert _reads(network, "embed") == ["ids", "last_tokens", "slots"]
    assert _reads(network, "layers.3.self_attn.o")[-3:] == row
    assert _reads(network, "token_counts.marked")[-4:] == [*row[:2], "certain", "prompt_lens"]
    assert _reads(network, "next_tokens")[0] == "logits" and _reads(network, "logits") == ["hidden"]
    assert _reads(network, "hidden") == ["layers.3.out"]
    assert _reads(network, "mtp.input") == ["next_tokens", "hidden"]
    assert _reads(network, "mtp.k_pages.filled")[-3:] == ["slots", "row_starts", "accepted"]
    assert _reads(network, "draft.last") == ["mtp.fc.y", "accepted"]
    assert _reads(network, "draft.0.token") == [
        *("draft.0.logits", "drafts", "slots", "draft_starts", "certain")
    ]
    assert _reads(network, "draft.1.token")[1:4] == [
        "draft.0.drafts",
        "slots",
        "draft.0.next_starts",
    ]
    assert _reads(network, "draft.1.mtp.layers.0.input_layernorm.y") == ["draft.0.mtp.fc.y"]
    assert _reads(network, "draft.0.mtp.input") == ["draft.0.token", "draft.0.mtp.hidden"]
    reads = [_reads(network, f"draft.{i}.mtp.layers.0.self_attn.o") for i in range(2)]
    assert {r[1] for r in reads} == {"rope_offsets"}
    pages = [r[2] for r in reads]
    assert pages == ["mtp.k_pages.filled", "draft.0.mtp.k_pages"]
    assert _node(network, "draft.1.mtp.layers.0.self_attn.o").outputs[1].name == "mtp.k_pages.out"


def test_prefill_fills_the_head_and_samples_as_without() -> None:
    network = _build("prefill")
    assert _reads(network, "shifted_ids") == ["token_ids", "next_ids", "next_tokens", "counts"]
    assert _reads(network, "mtp.input") == ["shifted_ids", "hidden"]
    assert _reads(network, "mtp.k_pages.out")[-3:] == ["slots", "starts", "counts"]
    assert not [n.op for n in network.graph.nodes if n.op in ("round_rows", "draft_token")]
    alone = build_network(
        describe(text_config(False)), "prefill", Limits(4, 256, 16, 512, gdn_ring=8), BF16
    )
    names = {n.name: n.op for n in network.graph.nodes}
    assert {n.name: n.op for n in alone.graph.nodes}.items() <= names.items()


def test_decode_fills_the_head_and_drafts_nothing() -> None:
    network = _build("decode")
    assert _reads(network, "mtp.k_pages.out")[-3:] == ["slots", "row_starts", "accepted"]
    assert not any(n.name.startswith("draft.") for n in network.graph.nodes)


def test_debug_marks_what_is_drafted_and_changes_nothing() -> None:
    plain, debug = _build("verify_k2"), _build("verify_k2", debug=True)
    extra = {t.name: tuple(t.shape) for t in debug.graph.outputs}
    for tensor in plain.graph.outputs:
        del extra[tensor.name]
    assert {n: s for n, s in extra.items() if not n.startswith("layers.")} == {
        "hidden": ("tokens", 128),
        "logits_all": ("tokens", 512),
        **{f"draft.{i}.mtp.hidden": ("rows", 128) for i in range(2)},
        **{f"draft.{i}.logits": ("rows", 512) for i in range(2)},
    }
    names = {n.name: n.op for n in debug.graph.nodes}
    assert {n.name: n.op for n in plain.graph.nodes}.items() <= names.items()
    assert debug.weights == plain.weights


def test_a_shortlist_narrows_the_drafts_alone() -> None:
    network = _build("verify_k2", short=True)
    assert list(_node(network, "draft.1.logits").outputs[0].shape) == ["rows", 3]
    assert list(_node(network, "logits").outputs[0].shape) == ["tokens", 512]
    token = _node(network, "draft.1.token")
    assert token.attrs["shortlist"] == 1 and token.inputs[1].name == "mtp.shortlist"


def test_weights_of_families_are_one() -> None:
    """Name by name, so that the engine holds each once."""
    known = dict(_build("verify_k3").weights)
    for family in FAMILIES:
        for name, weight in _build(family).weights.items():
            assert known[name] == weight


def test_families_share_what_reads_the_experts() -> None:
    """Ten thousand recipes of a model are made once, also where the head is quantised."""
    model = with_draft_dtype(describe(text_config(True, {"mtp_num_hidden_layers": 1})), "nvfp4")
    built = [build_network(model, f, LIMITS, BF16, draft=DraftOptions("nvfp4")) for f in FAMILIES]
    recipes = [{id(weight.recipe) for weight in network.weights.values()} for network in built]
    experts = {id(recipe) for of in model.of_experts.values() for recipe in of.values()}
    assert len(model.of_experts) == len(model.config.layers) + 1, "one for each MLP"
    assert set.intersection(experts, *recipes)


@pytest.mark.parametrize("name", nvidia_configs.MODELS)
def test_published_models_lower_with_drafts(name: str) -> None:
    model = describe(*nvidia_configs.pair(name))
    limits = Limits(4, 256, 16, model.config.vocab, drafts=2, gdn_ring=8)
    options = DraftOptions("nvfp4", tuple(range(0, model.config.vocab, 8)))
    network = build_network(model, "verify_k2", limits, BF16, draft=options)
    network.graph.toposort()
    graph = FamilyGraph("verify_k2", network.graph, dict(network.weights), network.states)
    verify(Subject.of(graph, limits, REGISTRY), "lowered")
