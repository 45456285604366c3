"""Engines of random f32 checkpoints against transformers in f32, eager, on the CPU.

Compared are the logits of every token, and at the end of each prompt the convolution states
(transformers keeps one column more), the recurrent states (transposed there) and keys and
values. Where torch is not installed, what transformers computed once is read from
tests/golden/parity.npz: last logits and recurrent states of the longest prompt.
`SPARK_WRITE_GOLDEN=1` writes that file again.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.load import Loaded, load
from tests.checkpoints import write_checkpoint
from tests.repository import ROOT
from tests.solo import Solo

Floats = NDArray[Any]
TOLERANCE = 2e-5  # of the range of what is compared
GOLDEN = ROOT / "tests" / "golden" / "parity.npz"
OPTIONS = Options(
    decode=(1, 2), prefill=(64, 192), max_context=192, max_seqs=2, kv_dtype="f32", debug=True
)
# (tokens, where prefill launches end, tokens decoded one by one at the end)
RUNS = (
    (1, (), 0),
    (3, (1,), 0),
    (4, (3,), 0),
    (5, (), 2),
    (63, (), 0),
    (64, (7,), 1),
    (65, (), 0),
    (150, (37, 101), 3),
    (150, (), 0),
)
LONGEST = 150


@dataclass(frozen=True)
class Network:
    moe: bool = False
    prefix: str = "model."
    experts: str = "split"
    config: dict[str, Any] = field(default_factory=dict)


def _heads(heads: int, kv: int, keys: int, values: int, **more: Any) -> dict[str, Any]:
    named = {"num_attention_heads": heads, "num_key_value_heads": kv}
    return named | {"linear_num_key_heads": keys, "linear_num_value_heads": values} | more


NESTED = "model.language_model."
WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
NARROW = {"linear_key_head_dim": 48, "linear_value_head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64, "mrope_section": [6, 5, 5]}
YARN |= {"mrope_interleaved": True}
FULL_FIRST = ["full_attention", "linear_attention", "full_attention"]
NETWORKS = {
    "dense": Network(),
    "dense r1 gqa1": Network(config=_heads(4, 4, 2, 2)),
    "dense r3 gqa3 nested": Network(prefix=NESTED, config=_heads(6, 2, 2, 6) | WIDE),
    "dense gqa8": Network(config=_heads(8, 1, 1, 3, head_dim=32) | NARROW),
    "dense tied nested": Network(prefix=NESTED, config={"tie_word_embeddings": True}),
    "dense 8 layers": Network(config={"num_hidden_layers": 8}),
    "dense yarn": Network(config={"rope_parameters": YARN, "max_position_embeddings": 256}),
    "dense own layers": Network(
        config={"layer_types": FULL_FIRST, "num_hidden_layers": 3, "linear_conv_kernel_dim": 3}
    ),
    "moe split": Network(True),
    "moe fused nested": Network(True, NESTED, "fused"),
    "moe split nested gqa8 r1": Network(True, NESTED, config=_heads(8, 1, 2, 2, head_dim=32)),
    "moe fused r3 gqa3": Network(True, experts="fused", config=_heads(6, 2, 2, 6) | WIDE),
    "moe fused top3": Network(
        True, experts="fused", config={"num_experts": 12, "num_experts_per_tok": 3} | NARROW
    ),
}


@dataclass(frozen=True)
class Truth:
    """What transformers computed of one prompt; states by layer, in the engine's layouts."""

    logits: Floats  # [T, V]
    states: dict[str, Floats]  # "layers.0.gdn_state" ..., k_pages and v_pages as [T, kv, D]


def _ids(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(99).integers(0, 512, LONGEST)][:length]


def _write(network: Network, folder: Path) -> None:
    write_checkpoint(
        folder,
        network.config,
        "f32",
        moe=network.moe,
        prefix=network.prefix,
        experts=network.experts,
        shards=2 if network.moe else 1,
        seed=5,
    )


@dataclass(frozen=True)
class Made:
    name: str
    folder: Path
    engine: Loaded


@pytest.fixture(scope="module", params=NETWORKS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Once for both tests, which start with separate states."""
    folder = tmp_path_factory.mktemp("network") / "checkpoint"
    _write(NETWORKS[request.param], folder)
    build(folder, folder.with_name("engine"), OPTIONS, lambda text: None)
    return Made(request.param, folder, load(folder.with_name("engine"), threads=1))


def _run(engine: Loaded, length: int, splits: tuple[int, ...], decoded: int) -> Solo:
    solo, ids = Solo(engine), _ids(length)
    ends = [*splits, length - decoded]
    for start, end in zip([0, *ends], ends, strict=False):
        solo.prefill(ids[start:end], rows=1 if end - start <= 64 else 3)
    for i, token in enumerate(ids[length - decoded :]):
        solo.decode(token, rows=1 + i % 2)
    return solo


class Transformers:
    def __init__(self, folder: Path, moe: bool) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        kind = transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        self.model.eval()

    def forward(self, ids: list[int]) -> Truth:
        import torch

        with torch.no_grad():
            out = self.model(torch.tensor([ids]), use_cache=True)
        states: dict[str, Floats] = {}
        kinds = self.model.config.get_text_config().layer_types
        for i, kind in enumerate(kinds):
            states |= dict(_states(f"layers.{i}", kind, out.past_key_values.layers[i]))
        return Truth(out.logits[0].numpy(), states)


def _states(layer: str, kind: str, cache: Any) -> Iterator[tuple[str, Floats]]:
    if kind == "full_attention":
        yield f"{layer}.k_pages", cache.keys[0].transpose(0, 1).numpy()
        yield f"{layer}.v_pages", cache.values[0].transpose(0, 1).numpy()
    else:
        yield f"{layer}.conv_state", cache.conv_states[0][0].numpy().T[1:]  # the oldest is not kept
        yield f"{layer}.gdn_state", cache.recurrent_states[0][0].numpy().swapaxes(1, 2)


def _near(ours: Floats, truth: Floats, what: str) -> None:
    assert ours.shape == truth.shape, what
    error = np.abs(ours.astype(np.float64) - truth).max() / max(float(np.ptp(truth)), 1e-30)
    assert error <= TOLERANCE, f"{what}: {error:.3g} of the range"


def _ours(solo: Solo, name: str) -> Floats:
    _, index, state = name.split(".")
    pick = solo.pages_of if state.endswith("pages") else solo.state
    return pick(int(index), state)


def test_parity(made: Made) -> None:
    if not all(importlib.util.find_spec(m) for m in ("torch", "transformers")):
        pytest.skip("the oracle extra is not installed; test_golden replaces it")
    engine, theirs = made.engine, Transformers(made.folder, NETWORKS[made.name].moe)
    for length, splits, decoded in RUNS:
        solo, truth = _run(engine, length, splits, decoded), theirs.forward(_ids(length))
        what = f"{length} tokens, prefill ends at {splits}, {decoded} decoded"
        _near(np.stack(solo.logits), truth.logits, f"{what}: logits")
        for state, value in truth.states.items():
            _near(_ours(solo, state), value, f"{what}: {state}")


def test_golden(made: Made) -> None:
    name = made.name
    if os.environ.get("SPARK_WRITE_GOLDEN"):
        _keep(name, Transformers(made.folder, NETWORKS[name].moe).forward(_ids(LONGEST)))
    solo = _run(made.engine, LONGEST, (1, 65), 2)
    with np.load(GOLDEN) as golden:
        _near(solo.logits[-1], golden[f"{name}: logits"], "logits")
        states = [key for key in golden if key.startswith(f"{name}: layers.")]
        assert states
        for key in states:
            state = key.removeprefix(f"{name}: ")
            _near(_ours(solo, state)[0], golden[key], state)


def _keep(name: str, truth: Truth) -> None:
    """Adds last logits, and the first head's recurrent states, to the golden file."""
    rows: dict[str, Floats] = {}
    if GOLDEN.exists():
        with np.load(GOLDEN) as old:
            rows = {k: old[k] for k in old if not k.startswith(f"{name}: ")}
    rows[f"{name}: logits"] = truth.logits[-1]
    kept = [s for s in truth.states if s.endswith("gdn_state")][-1:]
    rows |= {f"{name}: {s}": truth.states[s][0] for s in kept}
    GOLDEN.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN, allow_pickle=False, **rows)
