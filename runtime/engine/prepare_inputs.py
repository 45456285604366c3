"""What an executor reads, written as a plan says: table rows of what changed, and step inputs.

Knows the buffers' names and layouts of docs/graph.md; decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from spark_engine.interface import DECODE, PREFILL
from spark_engine.runtime.engine.plan import FROM_STATE, Batch, Row, StepPlan
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.memory import EngineMemory
from spark_engine.tensors import Array

Arrays = Mapping[str, Array]
INERT = -1  # the slot of a row that does nothing
SAMPLED = -1  # a next id: what this launch samples
PAGE_TABLE, BIAS = ("page_table",), ("bias_ids", "bias_values")


def write_tables(memory: EngineMemory, plan: StepPlan) -> None:
    """Brings the tables up to date for the plan's batches."""
    for seq in plan.admitted:
        if seq.slot >= 0:
            write_row(memory.tables, seq)
            memory.mark(seq.slot)
    for seq, index in plan.grown:
        memory.tables["page_table"][seq.slot, index] = seq.pages[index]
        memory.mark(seq.slot, PAGE_TABLE)
    for batch in plan.batches:
        for i in [i for i, seq in enumerate(batch.seqs) if seq.stops_suppressed]:
            seq, after = batch.seqs[i], batch.starts[i] + batch.counts[i]
            if batch.emits[i] and not seq.forbids_stop(after):
                write_bias(memory.tables, seq, suppress=False)
                memory.mark(seq.slot, BIAS)


def write_row(tables: Arrays, seq: Sequence) -> None:
    """Writes the whole table row of a sequence that has just got its slot."""
    slot, params = seq.slot, seq.request.params
    pages = tables["page_table"][slot]
    pages[: len(seq.pages)] = seq.pages
    pages[len(seq.pages) :] = -1
    tables["prompt_lens"][slot] = seq.prompt_len
    penalties = (params.repetition, params.presence, params.frequency)
    floats = (params.temperature, params.top_p, params.min_p, *penalties, 0, 0)
    tables["sampling_f"][slot] = floats
    low, high = seq.seed & 0xFFFFFFFF, seq.seed >> 32 & 0xFFFFFFFF
    ints = np.array([max(params.top_k, 0), low, high, 0], np.uint32)
    tables["sampling_i"][slot] = ints.view(np.int32)
    # Nothing of it is in flight: the next token to be sampled is the one after those known.
    write_bias(tables, seq, suppress=seq.forbids_stop(len(seq.tokens)))


def write_bias(tables: Arrays, seq: Sequence, suppress: bool) -> None:
    """Writes the logit bias; `suppress` makes the ids that end the sequence impossible."""
    bias = dict(seq.request.params.logit_bias)
    if suppress:
        bias.update(dict.fromkeys(seq.stop_ids, -math.inf))
    seq.stops_suppressed = suppress
    ids, values = tables["bias_ids"][seq.slot], tables["bias_values"][seq.slot]
    ids.fill(-1)
    values.fill(0)
    ids[: len(bias)] = list(bias)
    values[: len(bias)] = list(bias.values())


def write_step_inputs(buffers: Arrays, batch: Batch) -> None:
    """Writes the step inputs of one batch; rows beyond the live ones become inert."""
    live = batch.live
    _write(buffers["slots"], live, [seq.slot for seq in batch.seqs], INERT)
    _write(buffers["starts"], live, batch.starts, 0)
    _write(buffers["counts"], live, 1 if batch.family == DECODE else batch.counts, 0)
    if "emit" in buffers:
        _write(buffers["emit"], live, batch.emits, 0)
    by_row = buffers["token_ids"].reshape(batch.bucket, -1)
    if batch.family != PREFILL:
        by_row[:live] = FROM_STATE
        by_row[live:] = 0
        return
    by_row.fill(0)
    for i, row in enumerate(batch.rows):
        by_row[i, : row.count] = row.seq.tokens[row.start : row.start + row.count]
    if "next_ids" in buffers:
        _write(buffers["next_ids"], live, [_token_after(row) for row in batch.rows], 0)


def _token_after(row: Row) -> int:
    end = row.start + row.count
    return SAMPLED if row.emit else row.seq.tokens[end]


def _write(array: Array, live: int, values: list[int] | list[bool] | int, rest: int) -> None:
    array[:live] = values
    array[live:] = rest
