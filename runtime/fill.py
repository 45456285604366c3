"""Writes a plan into the arrays: table rows of what changed, and the step's inputs.

Knows the buffers' names and layouts of docs/graph.md; decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from spark_engine.runtime.memory import Memory
from spark_engine.runtime.plan import Launch, Plan
from spark_engine.runtime.sequence import Sequence
from spark_engine.tensors import Array

Buffers = Mapping[str, Array]
FROM_STATE = -1  # a token id: take `last_tokens[slot]`
INERT = -1  # the slot of a row that does nothing


def fill_tables(memory: Memory, plan: Plan) -> None:
    """Brings the tables up to date for the plan's launches."""
    for seq in plan.admitted:
        if seq.slot >= 0:
            write_row(memory.tables, seq)
    for seq, index in plan.grown:
        memory.tables["page_table"][seq.slot, index] = seq.pages[index]
    for launch in plan.launches:
        for row in launch.rows:
            seq = row.seq
            if seq.suppressing and row.emit and not seq.forbids_end(row.start + row.count):
                write_bias(memory.tables, seq, suppress=False)


def write_row(tables: Buffers, seq: Sequence) -> None:
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
    write_bias(tables, seq, suppress=seq.forbids_end(len(seq.tokens)))


def write_bias(tables: Buffers, seq: Sequence, suppress: bool) -> None:
    """Writes the logit bias; `suppress` makes the ids that end the sequence impossible."""
    bias = dict(seq.request.params.logit_bias)
    if suppress:
        bias.update(dict.fromkeys(seq.ends, -math.inf))
    seq.suppressing = suppress
    ids, values = tables["bias_ids"][seq.slot], tables["bias_values"][seq.slot]
    ids.fill(-1)
    values.fill(0)
    ids[: len(bias)] = list(bias)
    values[: len(bias)] = list(bias.values())


def fill_launch(buffers: Buffers, launch: Launch) -> None:
    """Writes the step inputs of one launch; rows beyond the live ones become inert."""
    rows, live = launch.rows, len(launch.rows)
    _fill(buffers["slots"], [row.seq.slot for row in rows], INERT)
    _fill(buffers["starts"], [row.start for row in rows], 0)
    _fill(buffers["counts"], [row.count for row in rows], 0)
    _fill(buffers["emit"], [row.emit for row in rows], 0)
    tokens = buffers["token_ids"]
    if launch.family == "decode":
        _fill(tokens, [FROM_STATE] * live, 0)
        return
    tokens.fill(0)
    by_row = tokens.reshape(launch.bucket, -1)
    for i, row in enumerate(rows):
        by_row[i, : row.count] = row.seq.tokens[row.start : row.start + row.count]


def _fill(array: Array, values: list[int], rest: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = rest
