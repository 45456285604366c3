"""A decode step, or a round of drafts, of drawn tokens far into contexts that were never computed.

For times alone: prefilling 128 contexts of a dense model takes minutes on few multiprocessors. The
states hold what they held, zeros in a fresh engine; last tokens and drafts are drawn, so that
experts are chosen as unevenly as they would be.
"""

from __future__ import annotations

import numpy as np

from benchmarks.launch_costs import Launches
from benchmarks.lockstep import IDS, Bench
from spark_engine.interface import drafts_of
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.prepare_inputs import write_step_inputs
from spark_engine.runtime.executors.program import MemoryOperand

DRAWN = ("last_tokens", "drafts")  # states of a token each
TURNS = 2  # the first step brings kernels and clocks up


def drawn(bench: Bench, family: str, bucket: int, rows: int, context: int) -> None:
    """Runs the bucket with so many sequences, each at position `context`."""
    k = drafts_of(family)
    engine, executor = bench.engine, bench.executors[family, bucket].inner
    seqs = Launches(engine).sequences(rows, context + 2 * k + 2)
    vocab = min(IDS, engine.loaded.limits.vocab)
    for info in bench.folder.manifest.states if bench.folder else ():
        if info.spec.name in DRAWN:
            ids = np.random.default_rng(0).integers(0, vocab, info.spec.dims, np.int32)
            place = MemoryOperand("state", info.spec.name)
            executor.gpu.upload(executor.address(place), ids)
            executor.gpu.wait()
    batch = Batch(family, bucket, seqs, [context] * rows, [k + 1] * rows, [True] * rows)
    buffers = engine.memory.buffers(family, bucket, 0)
    for _ in range(TURNS):
        write_step_inputs(buffers, batch)
        executor.launch(buffers)()
