"""The vision tower's attention compiles at the sizes of the published towers. Needs no GPU."""

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.plugins.ops.vision.vision_attention import OP  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("heads", "dim"),
    [(16, 72), *(pytest.param(*size, marks=pytest.mark.kernels) for size in ((12, 64), (8, 128)))],
)
def test_nothing_spills(heads: int, dim: int, target: Target, cache: Path) -> None:
    specs = (
        TensorSpec("qkv", DType.BF16, (65_536, 3 * heads * dim)),
        TensorSpec("coords", DType.I32, (65_536, 2)),
        TensorSpec("inv_freq", DType.F32, (dim // 4,)),
        TensorSpec("live", DType.I32, (1,)),
    )
    attrs = {"heads": heads}
    taken = [t for t in OP.cuda.tactics if t.refuse(attrs, specs, target) is None]
    assert len(taken) == (3 if target.wgmma and dim < 96 else 1)
    for tactic in taken:
        for launch in tactic.plan(attrs, specs, target).launches:
            job = nvrtc.Job(launch.source or tactic.source, launch.defines, (launch.symbol,))
            cubin = nvrtc.compile(job, target, cache)
            usage, launch = cubin.usage[launch.symbol], cubin.launched(launch)
            assert usage.spills == 0, (launch.symbol, usage)
            assert usage.shared + launch.shared <= target.shared_bytes
            assert max(launch.grid[1:]) < 1 << 16
