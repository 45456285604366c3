"""An engine's state for a dump, as plain values: pools, last plan, launches, sequences.

Reads only. Names sequences by their ids; contains no token.
"""

from collections.abc import Sequence as Items

from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence

Row = dict[str, object]
# Fields of a sequence that a dump has as they are.
PLAIN = "id status finish slot limit launched unverified last_step cached drafts".split()


def describe(
    scheduler: Scheduler,
    plan: StepPlan | None,
    launched: Items[tuple[int, Items[Batch]]],
    live: Items[Sequence],
) -> Row:
    """`plan`: the last one; `launched`: the steps in flight; `live`: unfinished sequences."""
    return {
        "pools": [
            _pool(pool) for pool in (scheduler.slots, scheduler.pages, scheduler.prefix.rows)
        ],
        "swap_bytes": scheduler.swap_used,
        "running": [seq.id for seq in scheduler.running],
        "waiting": [seq.id for seq in scheduler.waiting],
        "plan": None if plan is None else _plan(plan),
        "launched": [
            {"step": n, "batches": [_batch(b) for b in batches]} for n, batches in launched
        ],
        "sequences": [_sequence(seq) for seq in live],
    }


def _pool(pool: Pool) -> Row:
    kept = {"kept": pool.kept, "kept_by_the_cache_alone": pool.spare}
    return {"name": pool.name, "size": pool.size, "free": pool.free, **kept}


def _plan(plan: StepPlan) -> Row:
    return {
        "step": plan.step,
        "batches": [_batch(batch) for batch in plan.batches],
        "admitted": [seq.id for seq in plan.admitted],
        "preempted": [seq.id for seq in plan.preempted],
        "saves": [move.seq.id for move in plan.saves],
        "restores": [move.seq.id for move in plan.restores],
        "page_copies": plan.page_copies,
        "drain": plan.drain,
    }


def _batch(batch: Batch) -> Row:
    rows = zip(batch.seqs, batch.starts, batch.counts, strict=True)
    columns = [{"id": seq.id, "start": start, "count": count} for seq, start, count in rows]
    return {"family": batch.family, "bucket": batch.bucket, "rows": columns}


def _sequence(seq: Sequence) -> Row:
    params = seq.request.params
    return {
        **{name: getattr(seq, name) for name in PLAIN},
        "pages": len(seq.pages),
        "prompt_tokens": seq.prompt_len,
        "tokens": len(seq.tokens),
        "swapped": seq.swap_copy is not None,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
    }
