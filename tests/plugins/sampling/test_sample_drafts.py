"""Sampling behind every token of a round equals sampling one by one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spark_engine.op import Attrs, Case
from spark_engine.plugins.ops.sampling import sample
from spark_engine.tensors import Array
from tests.plugins.cases.sampling import sample as sample_cases
from tests.plugins.cases.sampling.sample import Launch
from tests.plugins.run_op import named, run

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

OP = sample.OP
MADE = 5  # results that both forms have
Sampler = Callable[[Attrs, Mapping[str, Array]], list[Array]]
PENALTIES = {"repetition": 1.4, "presence": 0.9, "frequency": 0.35}
RULES = {
    "greedy": Launch(0.0, **PENALTIES, bias=True),
    "greedy, raw": Launch(0.0),
    "plain draw": Launch(1.2, **PENALTIES, bias=True),
    "presence": Launch(0.9, presence=2.0),
    "frequency and top_k": Launch(1.5, top_k=9, frequency=1.1),
    "top_p": Launch(1.1, 0.8, repetition=2.0, bias=True),
    "min_p": Launch(1.3, min_p=0.05, repetition=0.6),
    "everything": Launch(1.7, 0.9, 0.01, **PENALTIES, top_k=30, bias=True),
    "flat": Launch(0.7, 0.9, **PENALTIES, spread=0.0),
}


def by_reference(attrs: Attrs, operands: Mapping[str, Array]) -> list[Array]:
    return list(OP.reference(attrs, tuple(operands.values())))


def by_body(attrs: Attrs, operands: Mapping[str, Array]) -> list[Array]:
    return run(OP, attrs, operands)


def by_kernel(bench: Bench) -> Sampler:
    def go(attrs: Attrs, operands: Mapping[str, Array]) -> list[Array]:
        from tests.plugins import cuda_node

        case = Case("round", attrs, lambda _: tuple(operands.values()))
        (work,) = cuda_node.planned(OP, case, bench.target)
        return list(cuda_node.run(bench, work, tuple(operands.values())))

    return go


def one_by_one(sampler: Sampler, launch: Launch, operands: Mapping[str, Array]) -> list[Array]:
    """The results of all tokens; between launches `token_counts` gets what the round brought."""
    tile, rows = launch.tile, len(launch.slots)
    per_token = {"logits", "ids"}
    counts, slots = operands["counts"], operands["slots"]
    token_counts = operands["token_counts"].copy()
    ids = operands["ids"].reshape(rows, tile)
    found: list[list[Array]] = []
    for j in range(tile):
        live = counts > j
        for row in np.flatnonzero(live) if j else ():
            token_counts[slots[row], ids[row, j]] += 2
        step = {n: a for n, a in operands.items() if n not in per_token}
        step |= {
            "token_counts": token_counts,
            "slots": np.where(live, slots, -1),
            "starts": operands["starts"] + j,
            "counts": live.astype(np.int32),
            "emit": live.astype(np.int32),
            "last_tokens": np.zeros(len(token_counts), np.int32),
        }
        given = {"logits": operands["logits"][j::tile], **step}
        made = sampler({**launch.attrs, "drafts": 0, "tile": 1}, given)
        found.append(made[:MADE])
    return [
        np.stack(x, axis=1).reshape(rows * tile, *x[0].shape[1:]) for x in zip(*found, strict=True)
    ]


def check(sampler: Sampler, launch: Launch, seed: int) -> Array:
    """Asserts it and returns the tokens that are there."""
    operands = named(OP, launch.inputs(np.random.default_rng(seed)), launch.attrs)
    live = launch.live.reshape(-1)
    together = sampler(launch.attrs, operands)
    apart = one_by_one(sampler, launch, operands)
    assert len(together) == MADE
    for index, (got, want) in enumerate(zip(together, apart, strict=True)):
        assert got[live].tobytes() == want[live].tobytes(), f"output {index}"
        assert np.isfinite(got.astype(np.float64)).all(), f"output {index} of nothing"
    assert not together[0][~live].any() and not together[4][~live].any()
    return together[0][live]


@pytest.mark.parametrize("how", [by_reference, by_body])
@pytest.mark.parametrize("tile", [2, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_at_once_equals_one_by_one(rule: str, tile: int, how: Sampler) -> None:
    check(how, replace(RULES[rule], tile=tile, slots=tuple(range(sample_cases.UNITS))), tile)


def test_the_drafts_before_a_token_matter() -> None:
    """The same launch with other ids in the round gives other tokens: the test above can fail."""
    launch = replace(RULES["presence"], tile=4, spread=0.3)
    operands = named(OP, launch.inputs(np.random.default_rng(0)), launch.attrs)
    before = by_reference(launch.attrs, operands)[0]
    operands["ids"] = np.where(launch.live.reshape(-1), before, 0).astype(np.int32)
    after = by_reference(launch.attrs, operands)[0]
    first = np.arange(len(before)) % 4 == 0
    assert before[first].tolist() == after[first].tolist()
    assert before[~first].tolist() != after[~first].tolist()


@pytest.mark.parametrize("how", [by_reference, by_body])
def test_literal_each_draft_counts_once_more_from_its_own_token_on(how: Sampler) -> None:
    """Logit 5 of id 1, presence 1 and frequency 1, against ids at 4.5, 2.5, 1.5: the round holds
    1 (certain, counted already), 1, 0, 1."""
    operands = {
        "logits": np.tile(np.float32([4.5, 5, 2.5, 1.5]), (4, 1)),
        "token_counts": np.int32([[0, 2, 0, 0], [0] * 4]),
        "sampling_f": np.float32([[0, 1, 0, 1, 1, 1, 0, 0]] * 2),
        "sampling_i": np.zeros((2, 4), np.int32),
        "bias_ids": np.full((2, 1), -1, np.int32),
        "bias_values": np.full((2, 1), np.nan, np.float32),
        "bias_until": np.zeros((2, 1), np.int32),
        "allow": np.zeros((2, 1), np.uint32),
        "slots": np.int32([0]),
        "starts": np.int32([7]),
        "counts": np.int32([4]),
        "ids": np.int32([1, 1, 0, 1]),
    }
    tokens = how({"vocab": 4, "top": 4, "drafts": 1, "tile": 4}, operands)[0]
    # id 1 at 5 - 2 = 3, then 5 - 3 = 2, 2, 1; id 0 at 4.5, 4.5, then 4.5 - 2 = 2.5, less than id 2
    assert tokens.tolist() == [0, 0, 0, 0]
    operands["logits"][:, 0] = 2.75
    assert how({"vocab": 4, "top": 4, "drafts": 1, "tile": 4}, operands)[0].tolist() == [1, 0, 2, 2]


UNTIL = 10  # the bias forbids id 1 of new tokens at positions below it


@pytest.mark.parametrize("how", [by_reference, by_body])
@pytest.mark.parametrize("tile", [0, 1, 4])
def test_literal_a_bias_ends_at_its_position(tile: int, how: Sampler) -> None:
    """New tokens at 8, 9, 10, 11: the first two may not be id 1. A plain bias applies to all."""
    n = 4 if tile < 4 else 1
    operands = {
        "logits": np.tile(np.float32([1, 3, 2]), (4, 1)),
        "token_counts": np.zeros((2, 3), np.int32),
        "sampling_f": np.float32([[0, 1, 0, 1, 0, 0, 0, 0]] * 2),
        "sampling_i": np.zeros((2, 4), np.int32),
        "bias_ids": np.int32([[1, 0, 1], [-1] * 3]),
        "bias_values": np.float32([[0.25, 1.5, -np.inf], [np.nan] * 3]),
        "bias_until": np.int32([[(1 << 31) - 1, (1 << 31) - 1, UNTIL], [0] * 3]),
        "allow": np.zeros((2, 1), np.uint32),
        "slots": np.zeros(n, np.int32),
        "starts": np.int32([7, 8, 9, 10][:n]),
        "counts": np.full(n, max(1, tile), np.int32),
    }
    if tile:
        operands["ids"] = np.int32([2, 2, 2, 2])
    else:
        operands |= {"emit": np.zeros(n, np.int32), "last_tokens": np.zeros(2, np.int32)}
    attrs = {"vocab": 3, "top": 3} | ({"drafts": 1, "tile": tile} if tile else {})
    assert how(attrs, operands)[0].tolist() == [0, 0, 1, 1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("width", [600, 20_000])
@pytest.mark.parametrize("tile", [2, 4, 8])
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_at_once_equals_itself_one_by_one(
    rule: str, tile: int, width: int, bench: Bench
) -> None:
    slots = tuple(range(sample_cases.UNITS))
    launch = replace(RULES[rule], tile=tile, slots=slots, width=width, vocab=width - 7)
    check(by_kernel(bench), launch, tile)
