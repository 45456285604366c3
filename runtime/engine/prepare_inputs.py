"""Writes the arrays that an executor reads, as a plan says: changed table rows, step inputs.

Knows the buffers' names and layouts of docs/graph.md; decides nothing.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import DECODE, PREFILL, ROPE_ROWS
from spark_engine.runtime.engine.plan import FROM_STATE, Batch, Row, StepPlan
from spark_engine.runtime.engine.policy.image_rows import ImageRows
from spark_engine.runtime.engine.rope_offsets import write_offsets
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.memory import EngineMemory
from spark_engine.tensors import Array

Arrays = Mapping[str, Array]
INERT = -1  # the slot of a row without a sequence
SAMPLED = -1  # a next id: the one that this launch samples
ALWAYS = (1 << 31) - 1  # the position up to which a logit bias applies
PAGE_TABLE, BIAS = ("page_table",), ("bias_ids", "bias_values", "bias_until")


def write_tables(memory: EngineMemory, plan: StepPlan) -> None:
    for seq in plan.admitted:
        if seq.slot >= 0:
            write_row(memory.tables, seq)
            memory.mark(seq.slot)
    for seq, index in plan.grown:
        memory.tables["page_table"][seq.slot, index] = seq.pages[index]
        memory.mark(seq.slot, PAGE_TABLE)


def write_row(tables: Arrays, seq: Sequence) -> None:
    slot, params = seq.slot, seq.request.params
    pages = tables["page_table"][slot]
    pages[: len(seq.pages)] = seq.pages
    pages[len(seq.pages) :] = -1
    tables["prompt_lens"][slot] = seq.answer_start
    penalties = (params.repetition, params.presence, params.frequency)
    floats = (params.temperature, params.top_p, params.min_p, *penalties, 0, 0)
    tables["sampling_f"][slot] = floats
    low, high = seq.seed & 0xFFFFFFFF, seq.seed >> 32 & 0xFFFFFFFF
    ints = np.array([max(params.top_k, 0), low, high, 0], np.uint32)
    tables["sampling_i"][slot] = ints.view(np.int32)
    _write_bias(tables, seq)


def _write_bias(tables: Arrays, seq: Sequence) -> None:
    """Writes the logit bias; ids that end the sequence are impossible up to `min_tokens`."""
    params, banned = seq.request.params, seq.answer_start + seq.request.params.min_tokens
    bias = [(i, value, ALWAYS) for i, value in params.logit_bias.items()]
    if params.min_tokens:
        bias += [(i, -math.inf, banned) for i in sorted(seq.stop_ids)]
    ids, values, until = (tables[name][seq.slot] for name in BIAS)
    ids[:], values[:], until[:] = INERT, 0, 0
    for at, entry in enumerate(bias):
        ids[at], values[at], until[at] = entry


def write_step_inputs(
    buffers: Arrays, batch: Batch, images: ImageRows | None = None, vocab: int = 0
) -> None:
    """Writes the step inputs of one batch; rows beyond the live ones become inert. With `images`
    an id from `vocab` on means a row of an image; without, `rope_offsets` keep their zeros."""
    live = batch.live
    _write(buffers["slots"], live, [seq.slot for seq in batch.seqs], INERT)
    _write(buffers["starts"], live, batch.starts, 0)
    _write(buffers["counts"], live, 1 if batch.family == DECODE else batch.counts, 0)
    if "emit" in buffers:
        _write(buffers["emit"], live, batch.emits, 0)
    by_row = buffers["token_ids"].reshape(batch.bucket, -1)
    if images is not None and batch.family != PREFILL:
        deltas = [seq.rope_delta for seq in batch.seqs]
        _write(buffers["rope_offsets"][:, 0], live, deltas, 0)
    if batch.family != PREFILL:
        by_row[:live] = FROM_STATE
        by_row[live:] = 0
        for i in batch.known:
            by_row[i, 0] = batch.seqs[i].tokens[batch.starts[i]]
        return
    by_row.fill(0)
    for i, row in enumerate(batch.rows):
        by_row[i, : row.count] = row.seq.tokens[row.start : row.start + row.count]
        if images is not None:
            turns = buffers["rope_offsets"][i].reshape(-1, ROPE_ROWS)
            write_offsets(turns, row.seq.request.images, row.start)
            _write_image_ids(by_row[i, : row.count], row.seq, row.start, images, vocab)
    _write(buffers["sources"], live, batch.sources or [s.slot for s in batch.seqs], INERT)
    _write(buffers["saves"], live, batch.saves or INERT, INERT)
    if "next_ids" in buffers:
        _write(buffers["next_ids"], live, [_token_after(row) for row in batch.rows], 0)
        for i, row in enumerate(batch.rows if images is not None else ()):
            if images is not None and not row.emit:
                at = buffers["next_ids"][i : i + 1]
                _write_image_ids(at, row.seq, row.start + row.count, images, vocab)


def _write_image_ids(
    ids: NDArray[Any], seq: Sequence, start: int, images: ImageRows, vocab: int
) -> None:
    """Replaces the ids of images' tokens, from position `start` on, by those of their rows."""
    end = start + len(ids)
    for image in seq.request.images:
        first, behind = max(image.start, start), min(image.end, end)
        if first < behind:
            row = vocab + images.first(image) + first - image.start
            ids[first - start : behind - start] = np.arange(row, row + behind - first)


def _token_after(row: Row) -> int:
    end = row.start + row.count
    return SAMPLED if row.emit else row.seq.tokens[end]


def _write(array: Array, live: int, values: list[int] | list[bool] | int, rest: int) -> None:
    array[:live] = values
    array[live:] = rest
