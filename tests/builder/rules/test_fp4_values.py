"""W4A4 products on a GPU without FP4 instructions: what the rule makes of them."""

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, variable
from spark_engine.builder.graph.rewrite import RewriteContext, rewrite
from spark_engine.builder.rules import rules_for
from spark_engine.kernel import GB10, H200, Target, rehearsal
from spark_engine.op import Attrs
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType, TensorSpec
from tests.builder.rules.test_fusions import NoCheckpoint

A4, WIDEN, LINEAR = (REGISTRY[n] for n in ("nvfp4_linear_a4", "nvfp4_widen", "nvfp4_linear"))
BF16: Attrs = {"dtype": "bf16"}


def rewritten(target: Target) -> list[str]:
    """The ops of two products of the same activations."""
    context = RewriteContext(gs.Graph(opset=23), {}, NoCheckpoint(), REGISTRY)

    def given(name: str, dtype: DType, *shape: int | str) -> gs.Variable:
        tensor = variable(TensorSpec(name, dtype, shape))
        context.graph.inputs.append(tensor)
        return tensor

    x = given("xq", DType.U8, "tokens", 32), given("x_scale", DType.F8E4M3, "tokens", 4)
    for name, n in (("a", 48), ("b", 16)):
        w = given(f"{name}.w", DType.U8, n, 32), given(f"{name}.s", DType.F8E4M3, n, 4)
        alpha = given(f"{name}.alpha", DType.F32, n)
        node = add_node(REGISTRY, name, A4.name, [*x, *w, alpha], [name], **BF16)
        context.graph.nodes.append(node)
        context.graph.outputs.append(node.outputs[0])
    rewrite(context, rules_for(target))
    assert [t.name for t in context.graph.outputs] == ["a", "b"]
    return [node.op for node in context.graph.nodes]


def test_values_are_made_once_where_there_is_no_fp4_instruction() -> None:
    assert rewritten(H200) == [WIDEN.name, LINEAR.name, LINEAR.name]
    for target in (GB10, rehearsal(GB10, H200)):
        assert rewritten(target) == [A4.name, A4.name]
