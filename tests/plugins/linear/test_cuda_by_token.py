"""FP8 linears and quantisers by token at the served shapes: compilation, and the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spark_engine.kernel import TARGETS, Attrs, Target
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import Array
from tests.plugins.packed_node import declared, packed_specs

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

LINEAR, QUANT = REGISTRY["fp8_linear"], REGISTRY["fp8_quant"]
# N, K of the layers and the head of the 27B and of the 35B.
LAYERS = (
    *((16384, 5120), (5120, 6144), (14336, 5120), (34816, 5120), (5120, 17408), (248320, 5120)),
    *((12288, 2048), (2048, 4096), (9216, 2048), (248320, 2048)),
)
HEADS = (248320,)  # their results are f32
# What decodes or prefills a token of the published models: K, and what else sets the row.
MAKERS: tuple[tuple[str, Attrs, dict[str, int]], ...] = (
    *(("fp8_quant", {"by_token": 1}, {"K": k}) for k in (2048, 4096, 5120, 6144)),
    *(("norm_quant", {"eps": 1e-6, "add": 1, "keep": 0}, {"K": k}) for k in (2048, 5120)),
    *(
        ("act_quant", {"act": "silu_mul", "keep": 0}, {"Y": 2 * k})
        for k in (512, 1024, 17408, 32768)
    ),
    ("gated_norm_quant", {"eps": 1e-6, "heads": 48, "offset": 10240, "keep": 0},
     {"K": 6144, "X": 16384, "Dv": 128}),
)  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_decode_compiles_without_spills(target: Target, rows: int, cache: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native import nvrtc

    jobs = {}
    for n, k in LAYERS:
        attrs: Attrs = {"dtype": "f32" if n in HEADS else "bf16", "by_token": 1}
        specs = packed_specs(LINEAR, attrs, declared(LINEAR, attrs, tokens=rows, N=n, K=k))
        for tactic in LINEAR.cuda.tactics:
            if tactic.refuse(attrs, specs, target) is None:
                for launch in tactic.plan(attrs, specs, target).launches:
                    job = nvrtc.Job(tactic.source, launch.defines, (launch.symbol,))
                    jobs[job] = f"{tactic.name} {n}x{k}"
    for name, own, sizes in MAKERS:
        op, attrs = REGISTRY[name], dict(own)
        if name != "fp8_quant":
            attrs |= {"quant": "fp8_token", "n": 1}
        specs = declared(op, attrs, tokens=rows, **sizes)
        (tactic,) = op.cuda.tactics
        assert tactic.refuse(attrs, specs, target) is None, (name, sizes)
        (launch,) = tactic.plan(attrs, specs, target).launches
        jobs[nvrtc.Job(tactic.source, launch.defines, (launch.symbol,))] = f"{name} {sizes}"
    for job, label in jobs.items():
        (usage,) = nvrtc.compile(job, target, cache).usage.values()
        assert usage.spills == 0 and usage.stack == 0, (label, usage)


def operands(m: int, n: int, k: int) -> tuple[Array, ...]:
    rng = np.random.default_rng(m + n + k)
    x = rng.standard_normal((m, k), dtype=np.float32) * np.exp2(rng.integers(-9, 9, (m, 1)))
    xq, x_scale = numpy_codecs.fp8_token_quantise(x.astype(np.float32))
    w = numpy_codecs.e4m3(rng.standard_normal((n, k), dtype=np.float32) * 100)
    return xq, w, x_scale, rng.uniform(0.0005, 0.001, n).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    "shape",
    [(1, 176, 80), (7, 173, 80), (16, 2120, 1040), (33, 1040, 1024), (129, 272, 256)]
    + [(2200, 2120, 400), (2200, 2117, 256), (128, 5120, 6144), (8, 16384, 5120)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_a_token_has_its_own_scale(bench: Bench, shape: tuple[int, int, int], dtype: str) -> None:
    """The bits of one scale of 1 for all tokens, times theirs: in f32, exactly."""
    bench.gpu.wait()
    xq, w, x_scale, w_scale = operands(*shape)
    found = []
    for attrs, scale in (({}, np.float32(1)), ({"by_token": 1}, x_scale)):
        arrays = (xq, w, np.asarray(scale), w_scale)
        found.append(bench.results(LINEAR, arrays, {"dtype": dtype, **attrs}))
    static, by_token = found
    assert static.keys() == by_token.keys()
    for tactic, got in by_token.items():
        want = static[tactic].astype(np.float32) * x_scale
        if dtype == "f32":
            np.testing.assert_array_equal(got, want, tactic)
        else:
            np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-7, err_msg=tactic)
