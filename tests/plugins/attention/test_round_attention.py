"""Attention over a round of drafts: a token's bits are those it has alone, one after the other."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from spark_engine.op import Attrs
from spark_engine.plugins.ops.attention import append_kv, attention_decode, paged_attention
from spark_engine.tensors import Array, DType
from tests.plugins import run_op
from tests.plugins.cases.attention.paged_attention import ROUNDS, Launch

F32, B16, F8 = DType.F32, DType.BF16, DType.F8E4M3
SHAPES = {
    "small": {},
    "alone": {"heads": 3, "kv_heads": 3, "page": 16},
    "three share": {"heads": 6, "kv_heads": 2, "dim": 64, "half": 8},
    "27B": {"heads": 6, "dim": 256, "half": 32},
    "35B": {"heads": 8, "dim": 256, "half": 32, "page": 128},
}
Operands = Mapping[str, Array]


def _token(operands: Operands, tile: int, t: int) -> dict[str, Array]:
    """The launch of token t of every row."""
    there = operands["counts"] > t
    return {
        **operands,
        "qkv": operands["qkv"].reshape(len(there), tile, -1)[:, t],
        "slots": np.where(there, operands["slots"], -1).astype(np.int32),
        "starts": (operands["starts"] + t).astype(np.int32),
        "counts": there.astype(np.int32),
    }


def _given(launch: Launch) -> dict[str, Array]:
    arrays = launch.inputs(np.random.default_rng(launch.tile))
    return run_op.named(paged_attention.OP, arrays, launch.attrs)


def _live(launch: Launch) -> Array:
    return np.arange(launch.tile) < np.asarray(launch.counts)[:, None]


@pytest.mark.parametrize("kv", [F32, B16, F8], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", ROUNDS)
def test_a_round_is_its_tokens_one_by_one(tile: int, shape: str, kv: DType) -> None:
    launch = replace(Launch(tile, *ROUNDS[tile]), kv=kv, **SHAPES[shape])
    given = _given(launch)
    o, *pages = run_op.run(paged_attention.OP, launch.attrs, given)
    one: Attrs = {**launch.attrs, "tile": 1}
    after, parts = dict(given), []
    for t in range(tile):
        part, *kept = run_op.run(paged_attention.OP, one, _token(after, tile, t))
        after |= dict(zip(("k_pages", "v_pages"), kept, strict=True))
        parts.append(part)
    want = np.stack(parts, axis=1)
    live = _live(launch)
    assert o.reshape(want.shape)[live].tobytes() == want[live].tobytes()
    for got, name in zip(pages, ("k_pages", "v_pages"), strict=True):
        assert got[:-1].tobytes() == after[name][:-1].tobytes()


@pytest.mark.parametrize("tile", [2, 4, 8])
def test_the_gated_round_is_its_tokens_one_by_one(tile: int) -> None:
    launch = replace(Launch(tile, *ROUNDS[tile]), heads=4, kv_heads=2, dim=64, half=8)
    given = {k: np.nan_to_num(v) if k == "qkv" else v for k, v in _given(launch).items()}
    attrs = {**launch.attrs, "keep": 1, "quant": "none", "n": 1}
    op, outs = attention_decode.OP, ["k_pages_out", "v_pages_out", "result0"]
    *_, y = run_op.run_named(op, attrs, given, outs)
    after, parts = dict(given), []
    for t in range(tile):
        ks, vs, part = run_op.run_named(op, {**attrs, "tile": 1}, _token(after, tile, t), outs)
        after |= {"k_pages": ks, "v_pages": vs}
        parts.append(part)
    want = np.stack(parts, axis=1)
    live = _live(launch)
    assert y.reshape(want.shape)[live].tobytes() == want[live].tobytes()


@pytest.mark.parametrize("kv", [F32, B16, F8], ids=str)
@pytest.mark.parametrize("tile", [1, *ROUNDS, 64])
def test_append_kv_leaves_what_attention_leaves(tile: int, kv: DType) -> None:
    rows = ROUNDS.get(tile, ((3, -1, 0, 2), (61, 5, 0, 15), (1, 0, 1, 1)))
    launch = replace(Launch(tile, *rows), kv=kv, heads=4, kv_heads=2, dim=64, half=8)
    given = _given(launch)
    _, *want = run_op.run(paged_attention.OP, launch.attrs, given)
    kv_columns = given["qkv"][:, -2 * launch.kv_heads * launch.dim :]
    attrs = {k: v for k, v in launch.attrs.items() if k != "heads"}
    operands = {n: kv_columns if n == "kv" else given[n] for n in append_kv.OP.inputs}
    got = run_op.run(append_kv.OP, attrs, operands)
    for g, w, name in zip(got, want, ("k_pages", "v_pages"), strict=True):
        assert g[:-1].tobytes() == w[:-1].tobytes()
        assert g[:-1].tobytes() != given[name][:-1].tobytes()
