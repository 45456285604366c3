"""The manifest's parts: weights of all families, each refusal once, the arena of one bucket."""

from pathlib import Path

import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.assemble import make_manifest, weight_specs
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.lower import facts_of, lower
from spark_engine.builder.graph.rewrite import Rewritten
from spark_engine.builder.plan.options import Options, resolve
from spark_engine.errors import GraphError
from spark_engine.manifest import Bucket, Fingerprint, Refusal
from spark_engine.models.open_model import open_model
from spark_engine.models.weights import recipes
from spark_engine.models.weights.recipes import Recipe
from spark_engine.tensors import DType
from spark_engine.weights_file import plan_weights
from tests.checkpoints import write_checkpoint


def family(name: str, **given: Recipe) -> FamilyGraph:
    made = {n: recipes.weight(n, recipe) for n, recipe in given.items()}
    return FamilyGraph(name, gs.Graph(), made, ())


def test_weights_of_all_families_once_by_name() -> None:
    one, two = (recipes.source(n, DType.F32, (2,)) for n in ("one", "two"))
    found = weight_specs([family("decode", b=one, a=two), family("prefill", a=two, c=one)])
    assert [spec.name for spec in found] == ["a", "b", "c"]


def test_weights_of_one_name_must_be_one_value() -> None:
    one, two = (recipes.source(n, DType.F32, (2,)) for n in ("one", "two"))
    with pytest.raises(GraphError, match="weight a differs between families"):
        weight_specs([family("decode", a=one), family("prefill", a=two)])


def test_the_arena_is_the_largest_buckets_and_a_refusal_is_reported_once(tmp_path: Path) -> None:
    model = open_model(write_checkpoint(tmp_path / "model").path)
    plan = resolve(Options(decode=(1,), prefill=(64,), max_seqs=2), facts_of(model))
    shared, own = Refusal("merge", "n", "both"), Refusal("merge", "n", "prefill only")
    graphs = {name: lower(model, plan, name) for name in ("decode", "prefill")}
    rewritten = {
        "decode": Rewritten({"merge": 1}, (shared,)),
        "prefill": Rewritten({"merge": 0}, (shared, own)),
    }
    buckets = [Bucket("decode", 1, 1, "a", 300), Bucket("prefill", 1, 64, "b", 700)]
    layout = plan_weights(weight_specs([*graphs.values()]))
    print_ = Fingerprint("", "", "", "", "")
    made = make_manifest("m", model, plan, graphs, rewritten, buckets, layout, print_, "ort", ())
    assert made.memory.arena == 700 and made.memory.weights == layout.total
    assert made.refusals == (shared, own)
    assert made.fusions == {"decode": {"merge": 1}, "prefill": {"merge": 0}}
    assert made.memory.total == made.to_json()["memory"]["total"]
