"""The sampler against literals, and against a float64 computation written apart (sampler_truth).

`literal` tests name what they expect in numbers worked out by hand; nothing in them comes from
the package or from the other computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.op import Case
from spark_engine.plugins.ops.sampling import sample
from spark_engine.tensors import Array
from tests.oracles import sampler_truth
from tests.oracles.sampler_truth import Row
from tests.plugins import one_node
from tests.plugins.run_op import run
from tests.plugins.sampling import sample_rows
from tests.runtime.generated import tried

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

Sampler = Callable[[Sequence[Row]], list[Array]]
U = 6694888.5 / 2**24  # from 0x6627E8D5, the published first word of key 0 and counter 0
WIDTH, VOCAB, ROWS = 24, 21, 16


def by_reference(rows: Sequence[Row]) -> list[Array]:
    attrs = {"vocab": rows[0].vocab, "top": min(len(rows[0].logits), sample_rows.TOP)}
    return list(sample.OP.reference(attrs, tuple(sample_rows.operands(rows).values())))


def by_body(rows: Sequence[Row]) -> list[Array]:
    attrs = {"vocab": rows[0].vocab, "top": min(len(rows[0].logits), sample_rows.TOP)}
    return run(sample.OP, attrs, sample_rows.operands(rows))


def by_kernel(bench: Bench, rows: Sequence[Row]) -> list[Array]:
    """Rows are padded to the kernel's width by logits of no weight that are never chosen."""
    from tests.plugins import cuda_node

    used = len(rows[0].logits)
    more = max(0, 32 - used) or -used % 4
    wide = [
        replace(r, logits=(*r.logits, *[-1e4] * more), token_counts=(*r.token_counts, *[0] * more))
        for r in rows
    ]
    arrays = tuple(sample_rows.operands(wide).values())
    case = Case("literal", {"vocab": rows[0].vocab, "top": sample_rows.TOP}, lambda _: arrays)
    (work,) = cuda_node.planned(sample.OP, case, bench.target)
    outputs = list(cuda_node.run(bench, work, arrays))
    return [*outputs[:2], outputs[2][:, :used], outputs[3][:, :used], *outputs[4:]]


ON_GPU = pytest.param(None, marks=pytest.mark.gpu, id="by_kernel")


@pytest.fixture(params=[by_reference, by_body, ON_GPU])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """The op's reference, its body, or its kernel."""
    return request.param or partial(by_kernel, request.getfixturevalue("bench"))


def tokens(sampler: Sampler, rows: Sequence[Row]) -> list[int]:
    return [int(t) for t in sampler(rows)[0]]


def at_zero(logits: Sequence[float], **settings: object) -> Row:
    """A row that draws the uniform U: key 0, counter 0."""
    row = Row(tuple(logits), len(logits), (0,) * len(logits), temperature=1.0)
    return replace(row, **settings)  # type: ignore[arg-type]


def logs(*weights: float) -> list[float]:
    return [math.log(w) for w in weights]


# ---- literals --------------------------------------------------------------------------------


def test_the_truth_has_the_published_bits() -> None:
    assert sampler_truth.uniform(0, (0, 0)) == U
    assert 0.3990 < U < 0.3991


# logit, (times generated, in the prompt), bias -> with repetition 1.25, presence 0.5,
# frequency 0.125; each worked out by hand
PENALISED = {
    "unseen": (2.0, (0, 0), 0.0, 2.0),
    "unseen and negative": (-2.0, (0, 0), 0.0, -2.0),
    "in the prompt": (2.0, (0, 1), 0.0, 1.6),
    "in the prompt and negative": (-2.0, (0, 1), 0.0, -2.5),
    "generated once": (2.0, (1, 0), 0.0, 1.6 - 0.125 - 0.5),
    "generated twice": (2.0, (2, 0), 0.0, 1.6 - 0.25 - 0.5),
    "generated three times and in the prompt": (2.0, (3, 1), 0.0, 1.6 - 0.375 - 0.5),
    "negative and generated": (-2.0, (2, 0), 0.0, -2.5 - 0.25 - 0.5),
    "biased": (2.0, (0, 0), 1.25, 3.25),
    "biased below zero before it is penalised": (2.0, (1, 0), -4.0, -2.5 - 0.125 - 0.5),
    "biased above zero before it is penalised": (-2.0, (0, 1), 4.0, 1.6),
}


@pytest.mark.parametrize("case", PENALISED)
def test_literal_penalties(case: str, sampler: Sampler) -> None:
    """Token 1 wins against a rival just below the value, and loses against one just above."""
    logit, (times, prompted), bias, want = PENALISED[case]
    row = Row(
        (want, logit),
        2,
        (0, 2 * times + prompted),
        temperature=0.0,
        repetition=1.25,
        presence=0.5,
        frequency=0.125,
        bias=((1, bias),) if bias else (),
    )
    rivals = [replace(row, logits=(want + d, logit)) for d in (-1e-3, 1e-3)]
    assert tokens(sampler, rivals) == [1, 0]


def test_literal_columns_of_the_table(sampler: Sampler) -> None:
    """temperature 0.5, top_p 0.75, min_p 0.05, repetition 2, presence 0.25, frequency 0.125."""
    row = at_zero(
        [4.0, 0.0, 0.0, 0.0],
        token_counts=(2, 0, 0, 0),  # 4 / 2 − 0.125 − 0.25 = 1.625
        **{"temperature": 0.5, "top_p": 0.75, "min_p": 0.05},
        **{"repetition": 2.0, "presence": 0.25, "frequency": 0.125},
    )
    arrays = sample_rows.operands([row])
    assert arrays["sampling_f"][0, :6].tolist() == [0.5, 0.75, 0.05000000074505806, 2, 0.25, 0.125]
    # Weights at temperature 0.5, of the largest: e^(2(z − 1.625)). A token stays with min_p 0.05
    # iff z >= 1.625 − 0.5 · 2.99573 = 0.127134. The first token holds u · total with u = U iff
    # its share exceeds 0.39905; token 3 is far away from both.
    for z, kept in ((0.1272, True), (0.1270, False)):
        one = replace(row, logits=(4.0, z, -9.0, -9.0), top_p=1.0)
        draws = [replace(one, position=p) for p in range(400)]
        assert (1 in tokens(sampler, draws)) is kept
    # Three rivals of weight 0.14 in all: 1 / 1.42 = 0.7042 < 0.75 keeps a second, and a third
    # is beyond: (1 + 0.14) / 1.42 = 0.803.
    z = 1.625 + 0.5 * math.log(0.14)
    draws = [replace(row, logits=(4.0, z, z, z), position=p) for p in range(400)]
    found = tokens(sampler, draws)
    assert set(found) == {0, 1}
    assert 1 / 1.14 - 0.06 < found.count(0) / 400 < 1 / 1.14 + 0.06


def test_literal_draw_is_the_first_id_with_a_sum_that_exceeds(sampler: Sampler) -> None:
    cases = {
        (0.3, 0.2, 0.5): 1,  # in ascending ids: 0.3, 0.5; in descending weight it were 2
        (0.399, 0.101, 0.5): 1,
        (0.3992, 0.1008, 0.5): 0,
        (0.1, 0.1, 0.1, 0.1, 0.6): 3,  # 0.4 > 0.39905
        (0.1, 0.1, 0.1, 0.09, 0.61): 4,
    }
    for weights, want in cases.items():
        assert tokens(sampler, [at_zero(logs(*weights))]) == [want], weights


def test_literal_temperature_divides(sampler: Sampler) -> None:
    """Two ids, the first at logit 0.2: its share is 1 / (1 + e^(−0.2 / T)) of 1."""
    # T = 0.5: 0.5987. With the second id first, its share 0.4013 > U; at T = 0.48 it is 0.3973.
    second_first = [-0.2, 0.0]
    hot, cold = (at_zero(second_first, temperature=t) for t in (0.5, 0.48))
    assert tokens(sampler, [hot, cold]) == [0, 1]


def test_literal_top_p_keeps_exactly_half_of_four_equals(sampler: Sampler) -> None:
    rows = [at_zero([0.5] * 4, top_p=0.5, position=p) for p in range(200)]
    assert set(tokens(sampler, rows)) == {0, 1}
    beyond = [replace(r, top_p=0.5000001) for r in rows]  # 0.50000012 in f32
    assert set(tokens(sampler, beyond)) == {0, 1, 2}
    none = [replace(r, top_p=0.0) for r in rows]
    assert set(tokens(sampler, none)) == {0}


def test_literal_top_p_is_of_what_top_k_left(sampler: Sampler) -> None:
    """0.4, 0.3, 0.2, 0.1: of the first two 0.571 is the first's; of all 0.4."""
    logits = logs(0.1, 0.4, 0.3, 0.2)
    rows = [at_zero(logits, top_k=2, top_p=0.55, position=p) for p in range(100)]
    assert set(tokens(sampler, rows)) == {1}
    rows = [replace(r, top_k=0) for r in rows]
    assert set(tokens(sampler, rows)) == {1, 2}


def test_literal_top_k_keeps_k_and_the_lower_ids_of_equals(sampler: Sampler) -> None:
    rows = [at_zero([1.0, 2.0, 1.0, 1.0, 1.0], top_k=3, position=p) for p in range(200)]
    assert set(tokens(sampler, rows)) == {0, 1, 2}
    assert set(tokens(sampler, [replace(r, top_k=1) for r in rows])) == {1}
    assert set(tokens(sampler, [replace(r, top_k=0) for r in rows])) == {0, 1, 2, 3, 4}
    assert set(tokens(sampler, [replace(r, top_k=99) for r in rows])) == {0, 1, 2, 3, 4}


def test_literal_min_p_is_of_the_largest_and_keeps_its_edge(sampler: Sampler) -> None:
    rows = [at_zero([3.0, 3.0, 3.0 - math.log(4)], position=p) for p in range(200)]
    for min_p, ids in ((0.2499, {0, 1, 2}), (0.2501, {0, 1}), (1.0, {0, 1})):
        assert set(tokens(sampler, [replace(r, min_p=min_p) for r in rows])) == ids, min_p
    # Weight 1/4 of the largest and 1/9 of the sum of all: min_p 0.2 is not of the sum.
    assert set(tokens(sampler, [replace(r, min_p=0.2) for r in rows])) == {0, 1, 2}


def test_literal_temperature_0_is_the_lowest_of_the_largest_after_penalties(
    sampler: Sampler,
) -> None:
    row = at_zero([1.0, 3.0, 3.0, 2.5], temperature=0.0)
    assert tokens(sampler, [row]) == [1]
    assert tokens(sampler, [replace(row, token_counts=(0, 2, 2, 0), presence=1.0)]) == [3]
    assert tokens(sampler, [replace(row, bias=((1, -math.inf),))]) == [2]
    assert tokens(sampler, [replace(row, bias=((0, 2.0), (1, -0.5)))]) == [0]


def test_literal_padding_of_the_vocabulary_is_counted_and_never_chosen(sampler: Sampler) -> None:
    row = replace(at_zero([0.0, 0.0, math.log(2)]), vocab=2)
    outputs = sampler([replace(row, position=p) for p in range(100)])
    assert set(outputs[0].tolist()) == {0, 1}
    np.testing.assert_allclose(outputs[1], math.log(1 / 4), rtol=1e-6)
    assert outputs[2][0].tolist() == [2, 0, 1]
    np.testing.assert_allclose(outputs[3][0], logs(1 / 2, 1 / 4, 1 / 4), rtol=1e-6)


def test_literal_log_probabilities_are_raw(sampler: Sampler) -> None:
    """Bias, penalties, temperature and top_k move the draw and not the log-probability."""
    row = at_zero(logs(0.5, 0.25, 0.25), temperature=3.0, top_k=1, bias=((2, 9.0),))
    outputs = sampler([replace(row, token_counts=(2, 2, 2), presence=1.0)])
    assert outputs[0].tolist() == [2]
    np.testing.assert_allclose(outputs[1], math.log(0.25), rtol=1e-6)
    assert outputs[2][0].tolist() == [0, 1, 2]


def test_literal_only_ids_with_a_bit_are_chosen(sampler: Sampler) -> None:
    """Weights 4, 2, 1, 1 of ids 0, 31, 32 and 63 of 70, the others of none; U is 0.399."""
    logits = [-80.0] * 70
    for token, weight in ((0, 4.0), (31, 2.0), (32, 1.0), (63, 1.0)):
        logits[token] = math.log(weight)
    row = at_zero(logits)
    cases = (
        ({0, 31, 32, 63}, {}, 0),
        ({31, 32, 63}, {}, 31),  # of 2, 1, 1: 1.596 is below 2
        ({32, 63}, {}, 32),  # of 1, 1: 0.798 is below 1
        ({63, 69}, {}, 63),
        ({1, 69}, {"temperature": 0.0}, 1),  # equal ones: the lower
        ({31, 63}, {"top_k": 1}, 31),
        ({32, 63}, {"top_p": 0.4}, 32),
        ({63}, {"bias": ((63, -math.inf),)}, 63),  # one id is the token, whatever its bias
        ({31, 63}, {"bias": ((31, -math.inf),)}, 63),
    )
    rows = [replace(row, allowed=frozenset(ids), **more) for ids, more, _ in cases]  # type: ignore[arg-type]
    outputs = sampler([*rows, row])
    assert outputs[0].tolist() == [*(token for *_, token in cases), 0]
    np.testing.assert_allclose(outputs[1][3], math.log(1 / 8), rtol=1e-6)  # raw
    assert outputs[2][3][:4].tolist() == [0, 31, 32, 63]


def test_literal_seeds_are_two_words(sampler: Sampler) -> None:
    """Each word counts, and so does every position: 64 equal logits show u's first six bits."""
    flat = at_zero([0.0] * 64)
    seeds = [(5, 0), (5, 1), (0, 5), (-5, -1), (5, -1), (-5, 0)]
    runs = {
        s: tokens(sampler, [replace(flat, seed=s, position=p) for p in range(8)]) for s in seeds
    }
    assert len({tuple(run) for run in runs.values()}) == len(seeds)
    assert runs[5, 0] == [int(64 * sampler_truth.uniform(p, (5, 0))) for p in range(8)]
    assert runs[-5, -1] == [int(64 * sampler_truth.uniform(p, (-5, -1))) for p in range(8)]
    assert tokens(sampler, [flat]) == [25]  # ⌊64 U⌋


@pytest.mark.parametrize("how", ["reference", "body"])
def test_literal_only_rows_that_emit_store_their_token(how: str) -> None:
    """Slots 0, 1 hold 7 and 8; of two rows that choose 1 the first emits. Row 2 is unused."""
    row = at_zero([0.0, 3.0, 1.0], temperature=0.0)
    operands = sample_rows.operands([row, row, row])
    operands["slots"][:] = (0, 1, -1)
    operands["emit"][:] = (1, 0, 0)
    operands["last_tokens"][:2] = (7, 8)
    attrs = {"vocab": 3, "top": 3}
    if how == "reference":
        outputs = list(sample.OP.reference(attrs, tuple(operands.values())))
    else:
        outputs = run(sample.OP, attrs, operands)
    assert outputs[5][:2].tolist() == [1, 8] and outputs[5][2] == -5


def test_literal_a_row_that_is_not_finite_yields_0(sampler: Sampler) -> None:
    rows = [at_zero([0.0, 9.0, bad]) for bad in (math.nan, math.inf, -math.inf)]
    outputs = sampler([*rows, at_zero([0.0, 9.0, 1.0], temperature=0.0)])
    assert outputs[4].tolist() == [0, 0, 0, 1]
    assert outputs[0].tolist() == [0, 0, 0, 1]


# ---- against the computation written apart -----------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Sampler:
    """The body over ROWS rows, one session for all examples."""
    attrs = {"vocab": VOCAB, "top": sample_rows.TOP}
    values = sample_rows.operands([at_zero([0.0] * WIDTH)] * ROWS)
    names = [f"out_{r.name}" for r in sample.OP.made(attrs)]
    node = one_node.Node(sample.OP, list(values), names, attrs)
    opened, specs = one_node.build([node], values, names)

    def go(rows: Sequence[Row]) -> list[Array]:
        feeds = sample_rows.operands(rows)
        results = one_node.execute(opened, feeds, [specs[n] for n in names])
        return [results[n] for n in names]

    return go


PINNED = [(name, value) for name, values in sample_rows.CHOICES.items() for value in values]


@tried(2)
@given(seed=st.integers(0, 1 << 32), pinned=st.sampled_from(PINNED))
def test_any_row_is_drawn_as_the_truth_draws_it(
    session: Sampler, seed: int, pinned: tuple[str, float]
) -> None:
    """Rows of one seed; one parameter is the same in all, so that each is met often."""
    rng, (name, value) = np.random.default_rng(seed), pinned
    fixed = {name: int(value) if name == "top_k" else sample_rows.f32(value)}
    rows = [sample_rows.drawn_row(rng, WIDTH, VOCAB) for _ in range(ROWS)]
    rows = [replace(row, **fixed) for row in rows]  # type: ignore[arg-type]
    sample_rows.compare(rows, by_reference(rows), near=1e-9)
    sample_rows.compare(rows, session(rows), near=2e-6)


def test_most_rows_are_clear() -> None:
    """The comparison above leaves few rows out, and meets every kind of answer."""
    rng = np.random.default_rng(0)
    rows = [sample_rows.drawn_row(rng, WIDTH, VOCAB) for _ in range(500)]
    drawn = [sampler_truth.sample(r) for r in rows]
    assert np.mean([d.margin > 2e-6 for d in drawn]) > 0.85
    assert np.mean([len(d.chances) > 1 for d in drawn]) > 0.3


def test_draws_follow_the_truths_distribution() -> None:
    """Pearson's statistic of 8,192 positions with every parameter in play."""
    rng = np.random.default_rng(2)
    row = Row(
        tuple(map(float, rng.standard_normal(30).astype(np.float32))),
        27,
        tuple(map(int, rng.integers(0, 6, 30))),
        temperature=1.5,
        top_p=sample_rows.f32(0.95),
        min_p=sample_rows.f32(0.02),
        repetition=sample_rows.f32(1.2),
        presence=sample_rows.f32(0.4),
        frequency=sample_rows.f32(0.15),
        top_k=20,
        bias=((3, 1.5), (4, -math.inf)),
    )
    chances = sampler_truth.sample(row).chances
    counts = np.zeros(30)
    for seed in ((9, 1), (-1, -7)):
        arrays = sample_rows.operands([replace(row, seed=seed)])
        many = {n: np.repeat(a, 4096, 0) if n in PER_ROW else a for n, a in arrays.items()}
        many["starts"] = np.arange(4096, dtype=np.int32)
        found = run(sample.OP, {"vocab": 27, "top": 20}, many)[0]
        counts += np.bincount(found, minlength=30)
    assert {i for i in range(30) if counts[i]} <= set(chances)
    expected = np.asarray([chances[i] * counts.sum() for i in chances])
    got = np.asarray([counts[i] for i in chances])
    statistic, freedom = np.sum((got - expected) ** 2 / expected), len(chances) - 1
    assert freedom > 10 and statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


PER_ROW = ("logits", "slots", "starts", "counts", "emit")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("width", [300, 4096])
def test_the_kernel_draws_as_the_truth_draws(width: int, bench: Bench) -> None:
    from tests.plugins import cuda_node

    rng = np.random.default_rng(width)
    rows = [sample_rows.drawn_row(rng, width, width - 7) for _ in range(128)]
    arrays = tuple(sample_rows.operands(rows).values())
    case = Case("truth", {"vocab": width - 7, "top": sample_rows.TOP}, lambda _: arrays)
    (work,) = cuda_node.planned(sample.OP, case, bench.target)
    got = cuda_node.run(bench, work, arrays)
    unclear, _ = sample_rows.compare(rows, got, near=1e-5)
    assert unclear < 40
