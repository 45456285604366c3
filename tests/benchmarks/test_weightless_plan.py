"""Full-size models are planned from their configs alone."""

from pathlib import Path

import pytest

from benchmarks.weightless_plan import opened, options, plan_of
from spark_engine.builder.graph.lower import facts_of
from spark_engine.builder.plan.options import Options, resolve
from tests.checkpoints import write_checkpoint
from tests.models import next_configs


@pytest.mark.parametrize("model", ["qwen36-27b", "qwen36-35b-a3b"])
def test_a_spark_drafts_from_the_list(model: str) -> None:
    """And an H200 from all ids: its memory is fast."""
    facts = facts_of(opened(model))
    found = [resolve(Options(target), facts).draft for target in ("sm_121a", "sm_90a")]
    assert [d and d.shortlist and len(d.shortlist) for d in found] == [65_536, None]


@pytest.mark.parametrize("format", next_configs.FORMATS)
def test_every_node_of_qwen3_next_has_a_tactic(format: str, tmp_path: Path) -> None:
    """At the published widths, of a layer of each kind, with drafts."""
    path = next_configs.write(tmp_path, format, num_hidden_layers=2, full_attention_interval=2)
    wishes = {"decode": (1, 32), "prefill": (4096,), "verify": ((32, 3),), "max_seqs": 32}
    for target in ("sm_90a", "sm_121a"):
        plan = plan_of(path, options(target, **wishes))
        assert {family for family, _ in plan} == {"decode", "prefill", "verify_k3"}
        ops = [node.op for node in plan["decode", 1].nodes]
        experts = ops.count("moe_norm_quant"), ops.count("grouped_moe"), ops.count("shared_gate")
        # of nvfp4_a4 the shared expert is bf16, so it is not one of the grouped ones
        assert experts == ((0, 2, 2) if format == "nvfp4_a4" else (2, 0, 0))


@pytest.mark.parametrize("format", ["ct_fp8_channel", "ct_nvfp4_a4", "modelopt_mixed", "gptq"])
def test_families_of_a_mixture_share_its_weights(format: str, tmp_path: Path) -> None:
    """The last layer's experts are followed by other norms in decode than in verification."""
    write_checkpoint(tmp_path, {"mtp_num_hidden_layers": 1}, format=format, moe=True)
    wishes = {"decode": (1, 32), "prefill": (64,), "verify": ((32, 3),), "max_seqs": 32}
    assert len(plan_of(tmp_path, options("sm_90a", **wishes, max_context=128))) == 4
