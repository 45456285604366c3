"""The oracle itself is held against transformers, and its rounding against exhaustive search."""

import ast
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints import Written, write_checkpoint
from tests.oracles import oracle

CASES: dict[str, dict[str, Any]] = {
    "dense": {"format": "f32"},
    "moe": {"format": "f32", "moe": True},
    "moe-r3": {
        "format": "f32",
        "moe": True,
        "experts": "fused",
        "prefix": "model.language_model.",
        "config_kwargs": {
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 64,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    },
    "w4a16": {"format": "nvfp4"},
    "compressed": {"format": "ct_nvfp4", "moe": True},
}


def _transformers(written: Written, ids: list[int]) -> Any:
    """(logits [T, V], cache) of the eager float32 model with the values in the file."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    moe = "num_experts" in written.config
    config_class = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    model_class = transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM
    config = config_class(**json.loads(json.dumps(written.config)))
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    model.load_state_dict(_state_dict(written, set(model.state_dict()), torch), strict=True)
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True)
    return out.logits[0].numpy(), out.past_key_values


def _state_dict(written: Written, wanted: set[str], torch: Any) -> dict[str, Any]:
    values = {
        name.replace("model.language_model.", "model."): torch.from_numpy(np.array(value))
        for name, value in written.values.items()
    }
    for name in wanted - set(values):  # experts that the model keeps fused
        stem = name.rsplit(".", 1)[0]
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        experts = range(written.config["num_experts"])
        values[name] = torch.stack(
            [torch.cat([values[f"{stem}.{e}.{p}.weight"] for p in parts]) for e in experts]
        )
    return {name: values[name] for name in wanted}


def _first(states: Any, rank: int) -> Any:
    """The one sequence's array, whether the cache holds tensors or lists of them."""
    while not hasattr(states, "ndim") or states.ndim > rank:
        states = states[0]
    return states.numpy()


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_transformers(case: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, seed=3, **CASES[case])
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 512, 70)]
    logits, cache = _transformers(written, ids)
    ours = oracle.forward(tmp_path, ids)
    assert np.abs(ours.logits - logits).max() <= 2e-5 * np.ptp(logits)
    for i, state in ours.gdn.items():
        theirs = _first(cache.layers[i].recurrent_states, 3).transpose(0, 2, 1)
        np.testing.assert_allclose(state, theirs, rtol=0, atol=2e-5 * np.ptp(theirs))
        columns = _first(cache.layers[i].conv_states, 2).T[1:]
        np.testing.assert_allclose(ours.conv[i], columns, rtol=0, atol=2e-5 * np.ptp(columns))
    for i, keys in ours.keys.items():
        theirs = _first(cache.layers[i].keys, 3).transpose(1, 0, 2)
        np.testing.assert_allclose(keys, theirs, rtol=0, atol=2e-5 * np.ptp(theirs))


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
