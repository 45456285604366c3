"""The all-reduce between the GPUs of this host: microseconds by size, ours beside NCCL's.

    python -m benchmarks.all_reduce [--ranks 2] [--out benchmarks/results/all_reduce_h200_tp2.json]

Each size is 64 launches in one CUDA graph a rank, replayed; printed is the slowest rank's median of
a launch. Sums are held to the reference bit for bit first, in a mixed order of sizes, and
NCCL's own sum of two ranks as well; the third column is NCCL's gather with our sum behind. NCCL is
called through nccl4py (the extra `nccl`); without it its columns are empty. Multicast is left off
(NCCL_NVLS_ENABLE=0). What sockets between hosts cost is seen with NCCL_P2P_DISABLE=1
NCCL_SHM_DISABLE=1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.rank_cards import RankCards
from spark_engine.device.cuda_driver import driver, value
from spark_engine.device.gpu import present
from spark_engine.plugins.ranks import all_reduce
from spark_engine.plugins.ranks.collectives_cuda import symmetric_bytes
from spark_engine.tensors import DType, TensorSpec

KIB = 1024
SIZES = [4 * KIB, 10 * KIB, 32 * KIB, 128 * KIB, 256 * KIB, 1024 * KIB, 1280 * KIB, 40960 * KIB]
try:
    from nccl.bindings import nccl
except ImportError:
    nccl = None
LAUNCHES, REPLAYS, WARM = 64, 20, 5


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    target = present()
    if target is None:
        sys.exit("needs GPUs of a target")
    cache = Path(os.environ.get("TMPDIR", "/tmp")) / "spark-cubins"
    cards = RankCards(range(options.ranks), target, cache, symmetric_bytes(max(SIZES)))
    _hold(cards)
    print(f"{options.ranks} ranks: sums are right, bit for bit", flush=True)
    comms = _nccl(cards)
    if comms:
        _hold_nccl(cards, comms)
    rows: list[dict[str, float | None]] = []
    for nbytes in SIZES:
        ours = _microseconds(cards, nbytes, _ours(cards, nbytes))
        row = {"bytes": nbytes, "ours_us": round(ours, 2), "nccl_us": None, "nccl_parts_us": None}
        for name, form in (("nccl_us", _theirs), ("nccl_parts_us", _parts)) if comms else ():
            row[name] = round(_microseconds(cards, nbytes, form(cards, nbytes, comms)), 2)
        rows.append(row)
        print(f"{nbytes // KIB:6} KiB", *(f"{k} {v}" for k, v in row.items()), flush=True)
        if options.out:
            card = {"card": target.card.name, "ranks": options.ranks, "rows": rows}
            options.out.write_text(json.dumps(card, indent=1) + "\n")


def _hold(cards: RankCards) -> None:
    rng = np.random.default_rng(0)
    for rows in (1, 128, 3, 1, 512, 64, 2, 128, 1):
        parts = [
            rng.standard_normal((rows, 5120)).astype(ml_dtypes.bfloat16) for _ in cards.streams
        ]
        want = all_reduce.summed(tuple(parts)).tobytes()
        for rank, found in enumerate(cards.together(all_reduce.OP, {"ranks": cards.ranks}, parts)):
            assert found.tobytes() == want, f"rank {rank} is wrong at {rows} rows"


def _hold_nccl(cards: RankCards, comms: list[Any]) -> None:
    """The sum of two is the same in any order; of more only ours is in the order of ranks."""
    rng = np.random.default_rng(0)
    shape = (64, 5120)
    parts = [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in cards.streams]
    want, nbytes = all_reduce.summed(tuple(parts)), parts[0].nbytes
    spec = TensorSpec("x", DType.BF16, shape)
    places = [
        (cards.put(r, p), cards.put(r, np.full(nbytes, 0xFF, np.uint8)))
        for r, p in enumerate(parts)
    ]

    def work(rank: int) -> None:
        cards.use(rank)
        kind, add, stream = nccl.DataType.Bfloat16, nccl.RedOp.Sum, int(cards.streams[rank])
        nccl.all_reduce(*places[rank], nbytes // 2, kind, add, comms[rank], stream)
        cards.wait(rank)

    _on_threads(cards.ranks, work)
    same = [cards.get(r, y, spec).tobytes() == want.tobytes() for r, (_, y) in enumerate(places)]
    print(f"NCCL's own sum has the bits of the order of ranks: {all(same)}", flush=True)
    assert all(same) or cards.ranks > 2


Launch = Callable[[int], None]  # of a rank, on its stream


def _ours(cards: RankCards, nbytes: int) -> Launch:
    tactic, attrs = all_reduce.OP.cuda.tactics[0], {"ranks": cards.ranks}
    plan = tactic.plan(attrs, (TensorSpec("x", DType.BF16, (nbytes // 512, 256)),), cards.target)
    queues = []
    for rank in range(cards.ranks):
        x, y = (cards.put(rank, np.zeros(nbytes, np.uint8)) for _ in "xy")
        queues += cards.queue(rank, tactic, plan, x, y)
    return lambda rank: queues[rank]()


def _theirs(cards: RankCards, nbytes: int, comms: list[Any]) -> Launch:
    """NCCL's own sum."""
    places = [[cards.put(r, np.zeros(nbytes, np.uint8)) for _ in "xy"] for r in range(cards.ranks)]

    def launch(rank: int) -> None:
        kind, add, stream = nccl.DataType.Bfloat16, nccl.RedOp.Sum, int(cards.streams[rank])
        nccl.all_reduce(*places[rank], nbytes // 2, kind, add, comms[rank], stream)

    return launch


def _parts(cards: RankCards, nbytes: int, comms: list[Any]) -> Launch:
    """NCCL gathers, and a kernel of ours adds in the order of ranks."""
    (tactic,) = (t for t in all_reduce.OP.cuda.tactics if t.name == "nccl_parts")
    spec, attrs = TensorSpec("x", DType.BF16, (nbytes // 512, 256)), {"ranks": cards.ranks}
    plan = tactic.plan({**attrs, "across": 1}, (spec,), cards.target)
    behind, places = replace(plan, launches=plan.launches[1:]), []
    for rank in range(cards.ranks):
        x, y = (cards.put(rank, np.zeros(nbytes, np.uint8)) for _ in "xy")
        both = cards.put(rank, np.zeros(cards.ranks * nbytes, np.uint8))
        where = {"scratch": [both], "output": [y]}
        places.append((x, both, cards.queue_all(rank, tactic, behind, where)[0]))

    def launch(rank: int) -> None:
        x, both, add = places[rank]
        stream = int(cards.streams[rank])
        nccl.all_gather(x, both, nbytes, nccl.DataType.Uint8, comms[rank], stream)
        add()

    return launch


def _microseconds(cards: RankCards, nbytes: int, launch: Launch) -> float:
    """Of a launch: the slowest rank's median."""
    taken = [0.0] * cards.ranks

    def work(rank: int) -> None:
        cards.use(rank)
        stream = cards.streams[rank]
        for _ in range(2):
            launch(rank)
        cards.wait(rank)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        value(driver.cuStreamBeginCapture(stream, mode))
        for _ in range(LAUNCHES):
            launch(rank)
        graph = value(driver.cuGraphInstantiate(value(driver.cuStreamEndCapture(stream)), 0))
        flag = driver.CUevent_flags.CU_EVENT_DEFAULT.value
        first, last = (value(driver.cuEventCreate(flag)) for _ in range(2))
        times = []
        for _ in range(WARM + REPLAYS):
            value(driver.cuEventRecord(first, stream))
            value(driver.cuGraphLaunch(graph, stream))
            value(driver.cuEventRecord(last, stream))
            cards.wait(rank)
            times.append(value(driver.cuEventElapsedTime(first, last)) * 1e3 / LAUNCHES)
        taken[rank] = statistics.median(times[WARM:])

    _on_threads(cards.ranks, work)
    return max(taken)


def _on_threads(ranks: int, work: Callable[[int], None]) -> None:
    failed: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _nccl(cards: RankCards) -> list[Any]:
    """A communicator of NCCL for each rank; none where it is not installed."""
    if nccl is None:
        print("no nccl4py here: NCCL's columns stay empty", flush=True)
        return []
    place, comms = nccl.get_unique_id(), [None] * cards.ranks

    def join(rank: int) -> None:
        cards.use(rank)
        comms[rank] = nccl.comm_init_rank(cards.ranks, place, rank)

    _on_threads(cards.ranks, join)
    version = nccl.get_version()
    print(f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}", flush=True)
    return comms


if __name__ == "__main__":
    main()
