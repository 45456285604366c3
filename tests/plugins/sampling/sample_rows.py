"""Rows for the sampler as operands of the op, and what the truth says of them."""

from collections.abc import Sequence

import numpy as np

from spark_engine.tensors import Array
from tests.oracles.sampler_truth import Drawn, Row, sample

TOP, BIASES = 20, 4
GRID = (0.0, 1e-3, 0.3, 0.7, 1.0, 2.5, 50.0, 1e4)  # temperatures
CHOICES = {
    "temperature": GRID,
    "top_p": (0.0, 0.25, 0.5, 0.9, 0.999, 1.0),
    "min_p": (0.0, 0.0, 1e-4, 0.06, 0.5, 1.0),
    "repetition": (1.0, 1.0, 1.3, 0.7, 5.0),
    "presence": (0.0, 0.0, 0.7, -1.1, 2.0),
    "frequency": (0.0, 0.0, 0.2, -0.37, 1.9),
    "top_k": (0, 0, 1, 2, 5, 17, 1000),
}


def f32(x: float) -> float:
    return float(np.float32(x))


def drawn_row(rng: np.random.Generator, width: int, vocab: int) -> Row:
    """Any row: flat, coarse (full of ties), smooth or steep logits, any parameters, some biases."""
    style = rng.integers(0, 4)
    spread = (0.0, 1.0, 3.0, 30.0)[style]
    logits = rng.standard_normal(width) * spread
    logits = np.round(logits * 2) / 2 if style < 2 else logits.astype(np.float32)
    picks = {n: float(rng.choice(v)) for n, v in CHOICES.items()}
    ids = rng.choice(vocab, BIASES - 1, replace=False)
    values = rng.choice([-np.inf, -4.0, 2.5, 100.0], BIASES - 1)
    biased = rng.integers(0, 3) == 0
    token_counts = rng.integers(0, 8, width) * rng.integers(0, 2, width)
    words = rng.integers(-(1 << 31), 1 << 31, 2)
    return Row(
        tuple(map(float, logits)),
        vocab,
        tuple(map(int, token_counts)),
        **{n: f32(x) for n, x in picks.items() if n != "top_k"},
        top_k=int(picks["top_k"]),
        seed=(int(words[0]), int(words[1])),
        bias=tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True)) if biased else (),
        position=int(rng.integers(1, 1 << 20)),
        allowed=_allowed(rng, vocab, set(map(int, ids))),
    )


def _allowed(rng: np.random.Generator, vocab: int, biased: set[int]) -> frozenset[int] | None:
    """Of every fourth row some ids, one of which has no bias."""
    share, plain = rng.choice([0.3, 0.6, 0.9]), sorted({*range(vocab)} - biased)
    some = {int(i) for i in np.flatnonzero(rng.random(vocab) < share)}
    one = int(rng.choice(plain))
    return frozenset(some | {one}) if rng.integers(0, 4) == 0 else None


def operands(rows: Sequence[Row]) -> dict[str, Array]:
    """The op's operands by name: row i in slot i, emitting; unused table entries are NaN."""
    n, width = len(rows), len(rows[0].logits)
    floats, values = np.full((n + 1, 8), np.nan), np.full((n + 1, BIASES), np.nan)
    integers, ids = np.full((n + 1, 4), 77), np.full((n + 1, BIASES), -1)
    for i, r in enumerate(rows):
        floats[i, :3] = r.temperature, r.top_p, r.min_p
        floats[i, 3:6] = r.repetition, r.presence, r.frequency
        words = [w - (1 << 32) if w >= 1 << 31 else w for w in r.seed]
        integers[i, :3] = r.top_k, *words
        if r.allowed is not None:
            integers[i, 3] = 1
        for j, (token, value) in enumerate(r.bias):
            ids[i, j], values[i, j] = token, value
    token_counts = np.concatenate([[r.token_counts for r in rows], np.full((1, width), 3)])
    arrays = {
        "logits": np.asarray([r.logits for r in rows], np.float32),
        "token_counts": token_counts.astype(np.int32),
        "sampling_f": floats.astype(np.float32),
        "sampling_i": integers.astype(np.int32),
        "bias_ids": ids.astype(np.int32),
        "bias_values": values.astype(np.float32),
        "bias_until": np.full((n + 1, BIASES), (1 << 31) - 1, np.int32),
        "allow": allow(rows),
    }
    steps = {
        "slots": np.arange(n),
        "starts": [r.position - 1 for r in rows],
        "counts": np.ones(n),
        "emit": np.ones(n),
        "last_tokens": np.full(n + 1, -5),
    }
    return arrays | {name: np.asarray(x, np.int32) for name, x in steps.items()}


def allow(rows: Sequence[Row]) -> Array:
    """u32 [slots, words]: each row's bits, and those of all ids that are never chosen; wild words
    where there is no mask."""
    words = -(-len(rows[0].logits) // 32)
    made = np.full((len(rows) + 1, words), 0xA5A5A5A5, np.uint32)
    for i, row in enumerate(rows):
        if row.allowed is not None:
            wild = set(range(row.vocab, 32 * words))
            bits = [sum(1 << b for b in range(32) if 32 * w + b in row.allowed | wild)
                    for w in range(words)]  # fmt: skip
            made[i] = bits
    return made


def compare(
    rows: Sequence[Row], outputs: Sequence[Array], near: float, top: int = TOP
) -> tuple[int, list[Drawn]]:
    """Holds the op's outputs to the truth; returns how many rows were too near a border to tell."""
    tokens, logprobs, top_ids, top_logprobs, ok, last = outputs
    truth = [sample(r) for r in rows]
    unclear = 0
    for i, (row, want) in enumerate(zip(rows, truth, strict=True)):
        assert ok[i] == want.ok, row
        if not want.ok:
            assert tokens[i] == last[i] == 0, row
            continue
        ranked = want.ranked[:top]
        assert top_ids[i].tolist() == [token for token, _ in ranked], row
        np.testing.assert_allclose(top_logprobs[i], [p for _, p in ranked], rtol=1e-5, atol=3e-5)
        if want.margin < near:
            unclear += 1
            continue
        assert tokens[i] == last[i] == want.token, (row, want)
        np.testing.assert_allclose(logprobs[i], want.logprob, rtol=1e-5, atol=3e-5)
    assert last[-1] == -5, "the scratch row was written"
    return unclear, truth
