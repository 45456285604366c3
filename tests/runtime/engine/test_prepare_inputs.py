"""The arrays that an executor reads, number by number, and where a copy comes back.

Columns are docs/graph.md's. Every value is another, so that no two can change places unseen.
"""

import math
from array import array
from types import MappingProxyType

import numpy as np
import pytest

from spark_engine.interface import SAMPLING_F, SAMPLING_I, Limits, tables
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.prepare_inputs import write_row, write_step_inputs, write_tables
from spark_engine.runtime.engine.request import Request, SamplingParams, Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.memory import EngineMemory, allocate
from spark_engine.tensors import Array
from tests.runtime.fake_executor import VOCAB, build_fake

LIMITS = Limits(max_seqs=3, max_context=64, pages=9, vocab=11, page_size=16, bias_slots=5)
PARAMS = {
    **{"temperature": 0.5, "top_p": 0.25, "min_p": 0.125},
    **{"repetition": 1.5, "presence": -0.75, "frequency": 0.0625, "top_k": 7},
}


def sequence(
    prompt: int = 5, seed: int = 0, ends: tuple[int, ...] = (), **params: object
) -> Sequence:
    request = Request(tuple(range(prompt)), SamplingParams(**{**PARAMS, **params}))  # type: ignore[arg-type]
    seq = Sequence(0, request, 60, frozenset(ends), seed)
    seq.slot, seq.pages = 1, [6, 2]
    return seq


def written(seq: Sequence) -> dict[str, Array]:
    """The tables after `write_row`, everything else 99."""
    made = {spec.name: allocate(spec) for spec in tables(LIMITS)}
    for table in made.values():
        table.fill(99)
    write_row(made, seq)
    assert all((np.delete(t, 1, axis=0) == 99).all() for t in made.values()), "another row"
    return {name: table[1] for name, table in made.items()}


def test_every_parameter_is_in_its_column() -> None:
    row = written(sequence(seed=3 + (8 << 32)))
    assert row["sampling_f"].tolist() == [0.5, 0.25, 0.125, 1.5, -0.75, 0.0625, 0, 0]
    assert row["sampling_i"].tolist() == [7, 3, 8, 0]
    assert row["prompt_lens"] == 5
    assert row["page_table"].tolist() == [6, 2, -1, -1]


def test_the_columns_have_the_contracts_names() -> None:
    names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "", "")
    assert names == SAMPLING_F and SAMPLING_I == ("top_k", "seed_low", "seed_high", "masked")


@pytest.mark.parametrize(
    ("seed", "low", "high"),
    [
        (5, 5, 0),
        (5 + 2**32, 5, 1),
        (2**31, -(2**31), 0),
        (2**63 - 1, -1, 2**31 - 1),
        (-1, -1, -1),
        (-5, -5, -1),
        (-(2**63), 0, -(2**31)),
        (-5 - 2**32, -5, -2),
    ],
)
def test_both_words_of_the_seed_are_written(seed: int, low: int, high: int) -> None:
    assert written(sequence(seed=seed))["sampling_i"][1:3].tolist() == [low, high]


@pytest.mark.parametrize(("top_k", "column"), [(-1, 0), (0, 0), (1, 1), (2**31 - 1, 2**31 - 1)])
def test_top_k_is_off_at_0_and_below(top_k: int, column: int) -> None:
    assert written(sequence(top_k=top_k))["sampling_i"][0] == column


def test_biases_are_written_and_the_rest_is_unused() -> None:
    row = written(sequence(logit_bias=MappingProxyType({4: 1.5, 9: -2.0})))
    assert row["bias_ids"].tolist() == [4, 9, -1, -1, -1]
    assert row["bias_values"].tolist() == [1.5, -2, 0, 0, 0]
    assert row["bias_until"].tolist() == [2**31 - 1, 2**31 - 1, 0, 0, 0]


def test_ends_are_impossible_before_min_tokens_and_as_asked_from_there_on() -> None:
    """The first two tokens after a prompt of 5 are at positions 5 and 6; id 9 keeps its bias."""
    bias = MappingProxyType({4: 1.5, 9: -2.0})
    row = written(sequence(prompt=5, min_tokens=2, ends=(9, 3), logit_bias=bias))
    assert row["bias_ids"].tolist() == [4, 9, 3, 9, -1]
    assert row["bias_values"].tolist() == [1.5, -2, -math.inf, -math.inf, 0]
    assert row["bias_until"].tolist() == [2**31 - 1, 2**31 - 1, 7, 7, 0]


def test_without_min_tokens_no_end_is_written() -> None:
    row = written(sequence(prompt=5, ends=(9, 3)))
    assert row["bias_ids"].tolist() == [-1] * 5


def test_forbidden_positions_are_counted_from_the_prompts_end() -> None:
    seq = sequence(prompt=5, min_tokens=2)
    assert [seq.forbids_stop(p) for p in (5, 6, 7)] == [True, True, False]


def test_a_new_page_is_written_at_its_index() -> None:
    seq, memory = sequence(), EngineMemory((), tables(LIMITS), {})
    seq.pages = [6, 2, 8]
    write_tables(memory, StepPlan(0, grown=[(seq, 2)]))
    assert memory.tables["page_table"][1].tolist() == [-1, -1, 8, -1]


PREFILL = ("emit", "sources", "saves")


def buffers(rows: int, tokens: int, *more: str) -> dict[str, Array]:
    made = {name: np.full(rows, 99, np.int32) for name in ("slots", "starts", "counts", *more)}
    return made | {"token_ids": np.full(tokens, 99, np.int32)}


def test_a_prefill_batch_holds_each_tiles_tokens() -> None:
    a, b = sequence(prompt=9), sequence(prompt=3)
    a.slot, b.slot, b.tokens = 2, 0, array("i", [7, 8, 9])
    b.tokens.append(5)
    columns = [a, b], [4, 0], [4, 3], [False, True], [5, 0], [-1, 6]
    batch = Batch("prefill", 3, *columns)
    made = buffers(3, 3 * 8, *PREFILL)
    write_step_inputs(made, batch)
    assert made["slots"].tolist() == [2, 0, -1]
    assert made["starts"].tolist() == [4, 0, 0]
    assert made["counts"].tolist() == [4, 3, 0]
    assert made["sources"].tolist() == [5, 0, -1]
    assert made["saves"].tolist() == [-1, 6, -1]
    assert made["emit"].tolist() == [0, 1, 0]
    rows = made["token_ids"].reshape(3, 8).tolist()
    assert rows == [[4, 5, 6, 7, 0, 0, 0, 0], [7, 8, 9, 0, 0, 0, 0, 0], [0] * 8]


def test_a_decode_batch_takes_the_tokens_sampled_last() -> None:
    a, b = sequence(), sequence()
    a.slot, b.slot = 2, 0
    made = buffers(4, 4, *PREFILL)
    write_step_inputs(made, Batch("decode", 4, [a, b], [7, 30], [1, 1], [True, True]))
    assert made["slots"].tolist() == [2, 0, -1, -1]
    assert made["starts"].tolist() == [7, 30, 0, 0]
    assert made["counts"].tolist() == made["emit"].tolist() == [1, 1, 0, 0]
    assert made["token_ids"].tolist() == [-1, -1, 0, 0]


def test_a_round_takes_its_tokens_and_unsure_starts_from_the_state() -> None:
    a, b = sequence(), sequence()
    a.slot, b.slot = 2, 0
    made = buffers(3, 3 * 4)
    write_step_inputs(made, Batch("verify_k3", 3, [a, b], [-1, 30], [4, 2], [True, True]))
    assert made["slots"].tolist() == [2, 0, -1]
    assert made["starts"].tolist() == [-1, 30, 0]
    assert made["counts"].tolist() == [4, 2, 0]
    assert made["token_ids"].tolist() == [-1] * 8 + [0] * 4
    assert "emit" not in made


def test_decode_in_an_engine_with_rounds_has_no_emit() -> None:
    seq, made = sequence(), buffers(2, 2)
    write_step_inputs(made, Batch("decode", 2, [seq], [-1], [1], [True]))
    assert made["starts"].tolist() == [-1, 0] and made["counts"].tolist() == [1, 0]
    assert made["token_ids"].tolist() == [-1, 0] and "emit" not in made


def test_a_tile_tells_the_head_the_token_behind_it() -> None:
    """The known one, or -1 where this launch samples it."""
    a, b = sequence(prompt=9), sequence(prompt=3)
    a.slot, b.slot = 2, 0
    made = buffers(4, 4 * 4, "next_ids", *PREFILL)
    rows = [a, a, b], [0, 4, 0], [4, 4, 3], [False, False, True], [2, 2, 0], [-1, -1, -1]
    write_step_inputs(made, Batch("prefill", 4, *rows))
    assert made["next_ids"].tolist() == [4, 8, -1, 0]


# ---- swapped out and in ------------------------------------------------------------------------


def holds_its_own(engine: Engine, seq: Sequence) -> bool:
    """Whether the sequence's pages hold its tokens at their positions, and its slot their sum."""
    size, memory = LIMITS.page_size, engine.memory
    pages = memory.states["layers.1.k_pages"]
    at = range(seq.launched)
    found = [pages[seq.pages[p // size], p % size].tolist() for p in at]
    recent = memory.states["layers.0.conv_state"][seq.slot].tolist() if at else []
    return found == [[seq.tokens[p], p] for p in at] and recent == [
        *seq.tokens[: seq.launched][-3:]
    ]


def test_a_sequence_that_was_swapped_finds_its_own_tokens_again() -> None:
    """Four grow beyond twelve pages of 16 tokens; those preempted come back on other pages."""
    limits = Limits(4, 128, 12, VOCAB, page_size=16, bias_slots=8, top_logprobs=5)
    engine = Engine(
        build_fake(limits, (1, 2, 4), (1, 2)), EngineOptions(depth=0, swap_bytes=1 << 30)
    )
    for i in range(4):
        prompt = tuple((7 * i + j) % VOCAB for j in range(20 + 3 * i))
        params = SamplingParams(seed=i, max_tokens=60, ignore_eos=True)
        engine.submit(Request(prompt, params))
    before: dict[int, list[int]] = {}  # where each sequence's tokens lay when it last ran
    swapped: set[int] = set()
    back = elsewhere = 0
    while not engine.idle:
        engine.step()
        for seq in engine.scheduler.running:
            assert holds_its_own(engine, seq), f"sequence {seq.id} after {seq.launched} tokens"
            if seq.id in swapped:
                swapped.remove(seq.id)
                back += 1
                elsewhere += seq.pages[: len(before[seq.id])] != before[seq.id]
            before[seq.id] = list(seq.pages)
        swapped |= {s.id for s in engine.scheduler.waiting if s.status is Status.SWAPPED}
    assert back >= 2 and elsewhere >= 1
