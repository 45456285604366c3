"""Kernels of the published towers' sizes: taken by both targets, and compiled without spills."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.op import Attrs  # noqa: E402
from spark_engine.plugins.registry import REGISTRY  # noqa: E402
from tests.plugins import packed_node  # noqa: E402

TOWERS = {  # hidden and inner columns of a block, columns of the text network
    "0.8B": (768, 3072, 1024),
    "27B": (1152, 4304, 5120),
    "35B": (1152, 4304, 2048),
}
PATCHES = (256, 8160, 65_536)
Shape = tuple[str, Attrs, dict[str, int]]


def shapes(tower: str, patches: int) -> Iterator[Shape]:
    """(op, attributes, dimensions) of a tower's nodes, and of those that read its rows."""
    hidden, inner, text = TOWERS[tower]
    rows, wide = patches // 4, 4 * hidden
    for gelu, m, n, k in (
        ("", patches, hidden, 768), ("", patches, 3 * hidden, hidden),
        ("", patches, hidden, hidden), ("tanh", patches, inner, hidden),
        ("", patches, hidden, inner), ("erf", rows, wide, wide), ("", rows, text, wide),
    ):  # fmt: skip
        yield "linear_bias", {"gelu": gelu}, {"tokens": m, "N": n, "K": k}
    for group in (1, 4):
        yield "layer_norm", {"eps": 1e-6, "group": group}, {"tokens": patches, "K": hidden}
    sizes = {"tokens": patches, "taps": 4, "P": 768, "T": 2304, "H": hidden}
    yield "vision_patches", {"dtype": "bf16"}, sizes
    yield "store_rows", {"group": 4}, {"rows": rows, "H": text, "I": rows}


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("tower", TOWERS)
def test_nodes_of_towers_compile(tower: str, target: Target, cache: Path) -> None:
    pairs = []
    for op, attrs, sizes in (s for n in PATCHES for s in shapes(tower, n)):
        found = REGISTRY[op]
        given = packed_node.declared(found, attrs, **sizes)
        for specs in (given, given[:-1]) if found.given(attrs)[-1].optional else (given,):
            packed = packed_node.packed_specs(found, attrs, specs)
            plans = [
                (tactic.source, tactic.plan(attrs, packed, target))
                for tactic in found.cuda.tactics
                if tactic.refuse(attrs, packed, target) is None
            ]
            assert plans, (op, sizes)
            pairs += plans
    jobs = nvrtc.jobs_of(pairs)
    for job, cubin in nvrtc.compile_all(jobs, target, cache, 2).items():
        assert not any(usage.spills for usage in cubin.usage.values()), job
