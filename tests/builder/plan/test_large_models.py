"""122B-A10B and 397B-A17B: every node of every bucket has a kernel, in each format, on each target.

Configs are the published ones with one group of layers (of alike ones two); no weight is drawn.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks.weightless_plan import decided_of, options  # noqa: E402
from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.builder.native.tactics import TacticChoice  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.models.checkpoint.tensor_list import linears  # noqa: E402
from spark_engine.models.families.registry import family_of, read_config  # noqa: E402
from tests.checkpoint_files import quantisation_configs  # noqa: E402
from tests.models import nvidia_configs  # noqa: E402
from tests.repository import ROOT  # noqa: E402

FORMATS = ("bf16", "fp8", "fp8_block", "nvfp4", "nvfp4_a4", "modelopt_mixed", "published")
ROWS: dict[str, Any] = {"decode": (1, 128), "prefill": (8192,), "max_seqs": 128, "drafts": 3}
ROWS |= {"verify": ((1, 1), (128, 3))}
GROUP = 4  # layers; the first two are alike, but the published files name layers by number
GROWN = ("attention_decode", "moe_router", "grouped_moe", "moe_norm_quant")
TO_EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
OF_EACH_SIZE = pytest.mark.parametrize("model", nvidia_configs.LARGE)


def checkpoint(folder: Path, model: str, format: str) -> Path:
    """A folder of configs, in one of the formats."""
    config, hf = nvidia_configs.large(model)
    text = config["text_config"]
    kinds = text["layer_types"][format != "published" : GROUP]
    text |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    if format != "published":
        known = read_config(config)
        names = [linear.module for linear in linears(family_of(known).tensors(known))]
        full = [n if n == "lm_head" else f"model.language_model.{n}" for n in names]
        config["quantization_config"], hf = quantisation_configs(format, full)
    files = {"config.json": config, "hf_quant_config.json": hf, "synthetic.json": {"seed": 0}}
    for name, content in files.items():
        if content:
            (folder / name).write_text(json.dumps(content))
    return folder


class Plans:
    """The choices of builds, which are planned once: (family, op, tactic) of each node."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._open: tuple[tuple[str, str], Path] = (("", ""), Path())
        self._made: dict[tuple[str, str, str, int], list[tuple[str, str, TacticChoice]]] = {}

    def of(
        self, model: str, format: str, target: Target, ranks: int = 1
    ) -> list[tuple[str, str, TacticChoice]]:
        """Those of all buckets. Raises what a build raises where a node has no kernel."""
        asked = (model, format, target.name, ranks)
        if asked not in self._made:
            if self._open[0] != (model, format):
                folder = self._folders.mktemp("checkpoint")
                self._open = (model, format), checkpoint(folder, model, format)
            decided = decided_of(self._open[1], options(target.name, **ROWS, tp=ranks))
            self._made[asked] = [(b.size.family, n.op, c) for b in decided for n, c in b.nodes]
        return self._made[asked]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return Plans(tmp_path_factory)


@OF_EACH_SIZE
@pytest.mark.parametrize("format", FORMATS)
def test_every_bucket_has_its_kernels(format: str, model: str, plans: Plans) -> None:
    for target in TARGETS.values():
        found = plans.of(model, format, target)
        families = {family for family, _, _ in found}
        assert families >= {"decode", "verify_k1", "verify_k3", "prefill"}
        assert {op for _, op, _ in found} >= {"attention_decode", "moe_router"}
        for ranks in (2, 4) if format == "nvfp4" else ():
            assert plans.of(model, format, target, ranks)


@pytest.mark.kernels
@TO_EACH_TARGET
@OF_EACH_SIZE
@pytest.mark.parametrize("format", ["published", "nvfp4", "fp8_block", "bf16"])
def test_the_chosen_kernels_of_decode_compile_without_spills(
    format: str, model: str, target: Target, plans: Plans, cache: Path
) -> None:
    found = plans.of(model, format, target)
    for choice in (c for family, op, c in found if family == "decode" and op in GROWN):
        assert choice.tactic is not None and choice.plan is not None
        for launch in choice.plan.launches:
            source = launch.source or choice.tactic.source
            cubin = nvrtc.compile(
                nvrtc.Job(source, launch.defines, (launch.symbol,)), target, cache
            )
            usage = cubin.usage[launch.symbol]
            assert usage.spills == 0, (choice.tactic.name, usage)
            assert usage.shared + cubin.launched(launch).shared <= target.shared_bytes
            assert launch.block[0] * usage.registers <= 65536, (choice.tactic.name, usage)


@TO_EACH_TARGET
def test_the_published_drafter_of_the_27b_has_kernels(target: Target) -> None:
    """Its configs are drawn with those of the network that it drafts for."""
    sizes = {"decode": (1, 8), "prefill": (2048,), "verify": ((1, 7), (8, 7)), "drafts": 7}
    drafter = str(ROOT / "benchmarks" / "configs" / "qwen38-27b-dflash2")
    wanted = options(target.name, **sizes, max_seqs=8, drafter=drafter)
    found = {(d.size.family, d.size.rows) for d in decided_of("27b:nvfp4", wanted)}
    assert found == {
        ("decode", 1),
        ("decode", 8),
        ("prefill", 32),
        ("verify_k7", 1),
        ("verify_k7", 8),
    }
