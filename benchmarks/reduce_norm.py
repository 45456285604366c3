"""Sums over the GPUs of this host, and sums with the norm behind them: microseconds by tactic.

    python -m benchmarks.reduce_norm [--ranks 2] [--out benchmarks/results/reduce_norm_tp2.json]

Each row is 32 launches of a node in one CUDA graph a rank, replayed; printed is the median of a
node, as a build times it (builder/native/rank_gpus.py). First all tactics are held to one another
bit for bit. Rows are those of decode steps and of prefill; widths those of the two served models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.rank_cards import RankCards, specs_of
from spark_engine.device.gpu import present
from spark_engine.kernel import Tactic
from spark_engine.op import Attrs, Op
from spark_engine.plugins.ranks import all_reduce, reduce_norm_quant
from spark_engine.plugins.ranks.collectives_cuda import symmetric_bytes
from spark_engine.tensors import Array

SUMS = tuple(t for t in all_reduce.OP.cuda.tactics if not t.name.startswith("nccl"))

WIDTHS = {"35B": 2048, "27B": 5120}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
NORM: Attrs = {"eps": 1e-6, "keep": 1, "quant": "fp8", "n": 1}
Operands = list[tuple[Array, ...]]


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    target = present()
    if target is None:
        sys.exit("needs GPUs of a target")
    cache = Path(os.environ.get("TMPDIR", "/tmp")) / "spark-cubins"
    most = symmetric_bytes(max(ROWS) * max(WIDTHS.values()) * 2)
    cards = RankCards(range(options.ranks), target, cache, most)
    rows = []
    for model, width in WIDTHS.items():
        for tokens in ROWS:
            operands = _operands(cards.ranks, tokens, width)
            sums = _times(cards, all_reduce.OP, {}, SUMS, [one[:1] for one in operands])
            op = reduce_norm_quant.OP
            norms = _times(cards, op, NORM, op.cuda.tactics, operands)
            rows.append({"model": model, "rows": tokens, "all_reduce_us": sums, "norm_us": norms})
            print(f"{model} {tokens:5} rows of {width}:  sum {_told(sums)}", flush=True)
            print(f"{'':16} sum and norm {_told(norms)}", flush=True)
            if options.out:
                card = {"card": target.card.name, "ranks": options.ranks, "rows": rows}
                options.out.write_text(json.dumps(card, indent=1) + "\n")


def _told(times: dict[str, float]) -> str:
    best = min(times, key=lambda name: times[name])
    return ", ".join(f"{'*' if name == best else ''}{name} {us}" for name, us in times.items())


def _operands(ranks: int, rows: int, width: int) -> Operands:
    rng = np.random.default_rng(rows)
    drawn = [rng.standard_normal((rows, width), np.float32) for _ in range(ranks + 1)]
    residual, *parts = (array.astype(ml_dtypes.bfloat16) for array in drawn)
    weight, scales = np.ones(width, np.float32), np.full(1, 0.01, np.float32)
    return [(part, weight, residual, scales) for part in parts]


def _times(
    cards: RankCards, op: Op, more: Attrs, tactics: tuple[Tactic, ...], operands: Operands
) -> dict[str, float]:
    """Microseconds by the names of those that do not refuse."""
    attrs: Attrs = {"ranks": cards.ranks, **more}
    specs = specs_of(op, attrs, operands[0])
    outs = op.infer(attrs, specs)
    found: dict[str, float] = {}
    same = None
    for tactic in tactics:
        if tactic.refuse(attrs, specs, cards.target):
            continue
        results = [a.tobytes() for r in cards.run(op, attrs, tactic, operands) for a in r]
        same = same or results[: len(outs)]
        assert results == same * cards.ranks, f"{tactic.name} has other bits"
        plan = tactic.plan(attrs, specs, cards.target)
        sizes = [s.nbytes for s in outs]
        with cards.placed(tactic, plan, operands, sizes) as (_, queues):
            found[tactic.name] = round(cards.seconds(queues) * 1e6, 2)
    return found


if __name__ == "__main__":
    main()
