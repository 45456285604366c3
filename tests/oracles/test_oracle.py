"""The oracle itself is held against transformers, and its rounding against exhaustive search."""

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints import write_checkpoint
from tests.oracles import oracle


@pytest.mark.parametrize("name", ["oracle", "sampler_truth", "attention_truth", "delta_truth"])
def test_a_truth_imports_nothing_of_the_package(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {a.name for n in nodes for a in n.names if isinstance(n, ast.Import)}
    modules |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    assert "numpy" in modules or "math" in modules
    assert not [m for m in modules if m.split(".")[0] in ("spark_engine", "tests")]


def test_e4m3_rounds_as_the_type_does() -> None:
    x = np.concatenate([oracle.E4M3, (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2])
    x = np.concatenate([x, -x, np.random.default_rng(0).normal(size=1000) * 100]).astype(np.float32)
    ours = oracle._Rounder().nearest(x, oracle.E4M3, np.ones_like(x, np.float64))
    theirs = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)


def test_e2m1_ties_go_to_the_even_code() -> None:
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.75], np.float32)
    ours = oracle._Rounder().nearest(x, oracle.E2M1, np.ones(9))
    np.testing.assert_array_equal(ours, [0, 1, 1, 2, 2, 4, 4, 6, -1])


def test_the_margin_is_the_nearest_border() -> None:
    rounder = oracle._Rounder()
    rounder.nearest(np.array([1.0, 2.25, 6.0], np.float32), oracle.E2M1, np.full(3, 6.0))
    assert rounder.margin == pytest.approx(0.25 / 6)


@pytest.mark.parametrize(
    ("format", "low", "high"),
    [
        ("nvfp4", 0, 1e-6),
        ("ct_nvfp4", 0, 1e-6),
        ("fp8", 0.01, 0.05),
        ("fp8_block", 0.01, 0.05),
        ("nvfp4_a4", 0.05, 0.15),
        ("ct_nvfp4_a4", 0.05, 0.15),
    ],
)
def test_a_quantised_linear_is_as_far_off_as_its_format(
    format: str, low: float, high: float, tmp_path: Path
) -> None:
    written = write_checkpoint(tmp_path, format=format, seed=5)
    x = np.random.default_rng(0).normal(size=(64, 128))
    module = "model.layers.3.self_attn.q_proj"
    exact = x @ written.values[f"{module}.weight"].astype(np.float64).T
    ours = oracle._Net(tmp_path).linear(x, module)
    error = np.sqrt(np.mean((ours - exact) ** 2) / np.mean(exact**2))
    assert low <= error < high
