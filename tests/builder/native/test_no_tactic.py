"""What a user reads where no kernel takes an op of the checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_graphsurgeon as gs
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.native.no_tactic import check  # noqa: E402
from spark_engine.builder.native.tactics import TacticChoice  # noqa: E402
from spark_engine.builder.plan.buckets import Size  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.errors import OptionError  # noqa: E402
from spark_engine.kernel import H200  # noqa: E402
from spark_engine.plugins.registry import REGISTRY  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

SIZES: dict[str, Any] = {"decode": (1, 4), "prefill": (64,), "max_seqs": 4, "max_context": 256}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_blocks_that_no_head_fills_are_refused_in_a_few_lines(tmp_path: Path, target: str) -> None:
    """No GPU serves this size, and the remedy that the message names is one."""
    write_checkpoint(tmp_path / "checkpoint", format="fp8_block")
    with pytest.raises(OptionError) as refused:
        build(tmp_path / "checkpoint", tmp_path / "e", Options(target, **SIZES), lambda text: None)
    first, *lines, attention, gdn, last = str(refused.value).splitlines()
    assert first == f"--target {target}: no CUDA tactic yet for attention_decode, gdn_decode"
    where, values, reason = lines[:3]
    assert where == (
        "  attention_decode: layers.3.self_attn.gated in decode_b1 (nodes: 1, buckets: 2)"
    )
    assert "head_dim 64" in values and "quant fp8_block" in values
    assert values.endswith("qkv bf16 [1, 768]"), "neither states nor steps"
    assert reason.startswith(
        "    heads of 64 columns do not come in 128-column blocks of fp8_block"
    )
    assert reason.endswith("(chunks_128_8, chunks_256_3, 8_chunks_1024_12 and 4 more)")
    assert len(lines) == 7 and "a head of 32 columns is not one" in lines[-2]
    assert (
        lines[-1].startswith("    1 tokens are no round of three or four") and "chunk" in lines[-1]
    )
    assert "(nodes: 3, buckets: 2)" in lines[3]
    assert attention == (
        "no GPU target serves attention_decode of this size: "
        "heads of 64 columns do not come in 128-column blocks of fp8_block"
    )
    assert gdn.startswith("no GPU target serves gdn_decode of this size: ")
    assert last == "--no-fuse leaves attention_decode, gdn_decode in parts that may have one"
    options = Options(target, **SIZES, fuse=False)
    build(tmp_path / "checkpoint", tmp_path / "e", options, lambda text: None)
    assert (tmp_path / "e").is_dir()


def test_an_operator_without_kernels_is_named_with_its_operands() -> None:
    tensor = gs.Variable("hidden", dtype="float32", shape=("rows", 8))
    node = gs.Node("Mul", "twice", {}, [tensor, tensor], [])
    buckets: Iterable[Any] = [
        SimpleNamespace(size=Size("decode", 2), nodes=[(node, TacticChoice(None, None, 0.0, {}))])
    ]
    with pytest.raises(OptionError) as refused:
        check(buckets, H200, REGISTRY)
    assert str(refused.value).splitlines()[1:] == [
        "  Mul: twice in decode_b2 (nodes: 1, buckets: 1)",
        "    hidden f32 [2, 8], hidden f32 [2, 8]",
        "no GPU target serves Mul of this size",
    ]
