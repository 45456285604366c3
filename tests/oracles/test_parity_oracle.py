"""Engines of random checkpoints of every format against the independent float64 computation.

Weights of any format are exact numbers, so formats that leave activations alone are compared on
long prompts. Formats that round activations to a few bits are discontinuous: the engine's float32
and the oracle's float64 differ in the seventh digit, and an activation within that distance of the
border between two codes may be rounded differently, which is no mistake and moves the logits by
far more than the tolerance. The oracle knows how near its nearest decision was, so for those
formats the prompts are drawn until no decision was nearer than MARGIN; they are short and the
networks shallow, because the number of decisions grows with both.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.load import Loaded, load
from tests.checkpoints import write_checkpoint
from tests.oracles import oracle
from tests.solo import Solo

TOLERANCE = 1e-5  # of the range of the logits
STATE_TOLERANCE = 2e-5  # of the range of the state; keys of the last layer reach 1.3e-5
MARGIN = 3e-7  # of the largest magnitude of a row; float32 keeps rows to about 1e-7
EXACT = ("f32", "bf16", "fp16", "nvfp4", "ct_nvfp4", "gptq", "awq", "ct_int4")
ROUNDED = ("fp8", "fp8_block", "nvfp4_a4", "modelopt_mixed", "ct_nvfp4_a4", "ct_fp8_channel")
SHALLOW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
OPTIONS = Options(
    decode=(1, 2), prefill=(64, 192), max_context=192, max_seqs=2, kv_dtype="f32", debug=True
)

SHORT: dict[str, Any] = {"decode": (1,), "prefill": (64,)}  # the buckets of prompts of few tokens


def _engine(folder: Path, name: str, **changes: object) -> Loaded:
    options = Options(**{**OPTIONS.to_json(), **changes})  # type: ignore[arg-type]
    build(folder, folder.with_name(name), options, lambda text: None)
    return load(folder.with_name(name), threads=1)


def _run(engine: Loaded, ids: list[int], splits: tuple[int, ...], decoded: int) -> Solo:
    """Prefills in parts that end at `splits`, then decodes the last tokens."""
    solo = Solo(engine)
    prompt = len(ids) - decoded
    ends = [*(s for s in splits if s < prompt), prompt]
    for start, end in zip([0, *ends], ends, strict=False):
        solo.prefill(ids[start:end], rows=1 if end - start <= 64 else 3)
    for i, token in enumerate(ids[prompt:]):
        solo.decode(token, rows=1 + i % 2)
    return solo


def _near(ours: NDArray[Any], truth: NDArray[Any], tolerance: float, what: str) -> None:
    error = np.abs(np.asarray(ours, np.float64) - truth).max() / max(np.ptp(truth), 1e-30)
    assert error <= tolerance, f"{what}: {error:.3g} of the range"


def _compare(solo: Solo, truth: oracle.Result) -> None:
    _near(np.stack(solo.logits), truth.logits, TOLERANCE, "logits")
    for i, state in truth.gdn.items():
        _near(solo.state(i, "gdn_state"), state, STATE_TOLERANCE, f"gdn_state of layer {i}")
        _near(solo.state(i, "conv_state"), truth.conv[i], STATE_TOLERANCE, f"conv_state of {i}")
    for i, keys in truth.keys.items():
        _near(solo.pages_of(i, "k_pages"), keys, STATE_TOLERANCE, f"keys of layer {i}")
        _near(solo.pages_of(i, "v_pages"), truth.values[i], STATE_TOLERANCE, f"values of {i}")


def _ids(seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 512, length)]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", EXACT)
def test_exact_activations(format: str, moe: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, format=format, moe=moe, seed=11)
    engine = _engine(folder, "engine")
    for length, splits, decoded in ((1, (), 0), (4, (), 3), (67, (), 2), (150, (37, 101), 3)):
        ids = _ids(length, length)
        _compare(_run(engine, ids, splits, decoded), oracle.forward(folder, ids))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", ROUNDED)
def test_rounded_activations(format: str, moe: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, SHALLOW, format=format, moe=moe, seed=11)
    engine = _engine(folder, "engine", **SHORT)
    drawn = (_ids(seed, 3) for seed in range(200))
    runs = ((ids, oracle.forward(folder, ids)) for ids in drawn)
    clear = list(islice((run for run in runs if run[1].margin > MARGIN), 2))
    assert len(clear) == 2, "no prompt without a near tie"
    for ids, truth in clear:
        _compare(_run(engine, ids, (), decoded=1), truth)


@pytest.mark.parametrize(("names", "format"), [("modelopt", "bf16"), ("compressed", "ct_nvfp4")])
def test_fp8_pages(names: str, format: str, tmp_path: Path) -> None:
    """Each side by its own scale, whatever its name."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, SHALLOW, format=format, seed=11, kv_scales=names)
    engine = _engine(folder, "engine", kv_dtype="fp8", **SHORT)
    drawn = (_ids(seed, 4) for seed in range(200))
    runs = ((ids, oracle.forward(folder, ids, fp8_kv=True)) for ids in drawn)
    clear = list(islice((run for run in runs if run[1].margin > MARGIN), 2))
    assert len(clear) == 2, "no prompt without a near tie"
    for ids, truth in clear:
        solo = _run(engine, ids, (2,), decoded=1)
        _near(np.stack(solo.logits), truth.logits, TOLERANCE, "logits")
        for side, held, scale in zip("kv", (truth.keys, truth.values), (0.02, 0.3), strict=True):
            codes = solo.pages_of(1, f"{side}_pages").view(ml_dtypes.float8_e4m3fn)
            _near(codes.astype(np.float64) * scale, held[1], 1e-6, f"{side}_pages")
