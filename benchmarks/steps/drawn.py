"""Single launches of an open engine over batches that no scheduler made.

A prefill of one sequence, and a decode step or a round of drawn tokens far into contexts that were
never computed: prefilling 128 contexts of a dense model takes minutes on few multiprocessors. For
times alone: states keep their contents, zeros in a fresh engine; last tokens and drafts are drawn,
so that experts are chosen as unevenly as they would be.
"""

import numpy as np

from benchmarks.steps.lockstep import IDS, Bench
from spark_engine.interface import PREFILL, PREFILL_TILE, drafts_of
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.prepare_inputs import write_row, write_step_inputs
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.program import MemoryOperand

DRAWN = ("last_tokens", "drafts")  # states of a token each
TURNS = 2  # the first launch brings kernels and clocks up


def decode(bench: Bench, family: str, bucket: int, rows: int, context: int) -> None:
    """Runs the bucket with so many sequences, each at position `context`."""
    k, engine, executor = drafts_of(family), bench.engine, bench.executors[family, bucket].inner
    seqs = sequences(engine, rows, context + 2 * k + 2)
    vocab = min(IDS, engine.loaded.limits.vocab)
    for info in bench.folder.manifest.states:
        if info.spec.name in DRAWN:
            ids = np.random.default_rng(0).integers(0, vocab, info.spec.dims, np.int32)
            executor.gpu.upload(executor.address(MemoryOperand("state", info.spec.name)), ids)
            executor.gpu.wait()
    _launch(bench, Batch(family, bucket, seqs, [context] * rows, [k + 1] * rows, [True] * rows))


def prefill(bench: Bench, bucket: int) -> None:
    """Runs the bucket with one sequence from its beginning."""
    [seq] = sequences(bench.engine, 1, bucket * PREFILL_TILE)
    starts = [i * PREFILL_TILE for i in range(bucket)]
    emits = [i == bucket - 1 for i in range(bucket)]
    counts, own, none = [PREFILL_TILE] * bucket, [seq.slot] * bucket, [-1] * bucket
    _launch(bench, Batch(PREFILL, bucket, [seq] * bucket, starts, counts, emits, own, none))


def sequences(engine: Engine, count: int, tokens: int) -> list[Sequence]:
    """So many of random tokens, in separate slots and pages."""
    limits, rng = engine.loaded.limits, np.random.default_rng(0)
    pages, found = -(-(tokens + 1) // limits.page_size), []
    for slot in range(count):
        prompt = rng.integers(0, min(IDS, limits.vocab), tokens).tolist()
        request = Request(tuple(prompt), SamplingParams(0.0))
        seq = Sequence(slot, request, tokens, frozenset(), 0)
        seq.slot, seq.pages = slot, list(range(slot * pages, (slot + 1) * pages))
        write_row(engine.memory.tables, seq)
        engine.memory.mark(slot)
        found.append(seq)
    engine.memory.flush()
    return found


def _launch(bench: Bench, batch: Batch) -> None:
    buffers = bench.engine.memory.buffers(batch.family, batch.bucket, 0)
    for _ in range(TURNS):
        write_step_inputs(buffers, batch)
        bench.executors[batch.family, batch.bucket].inner.launch(buffers)()
