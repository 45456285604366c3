"""The all-reduce between the GPUs of this host: microseconds by size, ours beside NCCL's.

    python -m benchmarks.all_reduce [--ranks 2] [--out benchmarks/results/all_reduce_h200_tp2.json]

Each size is 64 launches in one CUDA graph a rank, replayed; printed is the slowest rank's median of
a launch. Sums are held to the reference bit for bit first, in a mixed order of sizes. NCCL's
library is taken from where Python's packages have it (PyTorch's wheels bring it); without one its
column is empty. Multicast is left off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.rank_cards import RankCards
from spark_engine import device
from spark_engine.cuda_driver import driver, value
from spark_engine.plugins.ranks import all_reduce
from spark_engine.plugins.ranks.collectives_cuda import symmetric_bytes
from spark_engine.tensors import DType, TensorSpec

KIB = 1024
SIZES = [4 * KIB, 10 * KIB, 32 * KIB, 128 * KIB, 256 * KIB, 1024 * KIB, 1280 * KIB, 40960 * KIB]
LAUNCHES, REPLAYS, WARM = 64, 20, 5
NCCL_BF16, NCCL_SUM = 9, 0


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    target = device.present()
    if target is None:
        sys.exit("needs GPUs of a target")
    cache = Path(os.environ.get("TMPDIR", "/tmp")) / "spark-cubins"
    cards = RankCards(range(options.ranks), target, cache, symmetric_bytes(max(SIZES)))
    _hold(cards)
    print(f"{options.ranks} ranks: sums are right, bit for bit", flush=True)
    comms = _nccl(cards)
    rows = []
    for nbytes in SIZES:
        ours = _microseconds(cards, nbytes, _ours(cards, nbytes))
        theirs = _microseconds(cards, nbytes, _theirs(cards, nbytes, *comms)) if comms else None
        rows.append(
            {"bytes": nbytes, "ours_us": round(ours, 2), "nccl_us": theirs and round(theirs, 2)}
        )
        print(
            f"{nbytes // KIB:6} KiB  ours {ours:8.2f} us  NCCL {theirs or float('nan'):8.2f} us",
            flush=True,
        )
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


Launch = Callable[[int], None]  # of a rank, on its stream


def _ours(cards: RankCards, nbytes: int) -> Launch:
    tactic, attrs = all_reduce.OP.cuda.tactics[0], {"ranks": cards.ranks}
    plan = tactic.plan(attrs, (TensorSpec("x", DType.BF16, (nbytes // 512, 256)),), cards.target)
    queues = []
    for rank in range(cards.ranks):
        x, y = (cards.put(rank, np.zeros(nbytes, np.uint8)) for _ in "xy")
        queues += cards.queue(rank, tactic, plan, x, y)
    return lambda rank: queues[rank]()


def _theirs(
    cards: RankCards, nbytes: int, lib: ctypes.CDLL, comms: list[ctypes.c_void_p]
) -> Launch:
    places = []
    for rank in range(cards.ranks):
        places.append([cards.put(rank, np.zeros(nbytes, np.uint8)) for _ in "xy"])

    def launch(rank: int) -> None:
        x, y = (ctypes.c_void_p(place) for place in places[rank])
        stream = ctypes.c_void_p(int(cards.streams[rank]))
        count = ctypes.c_size_t(nbytes // 2)
        done = lib.ncclAllReduce(x, y, count, NCCL_BF16, NCCL_SUM, comms[rank], stream)
        assert done == 0, f"ncclAllReduce says {done}"

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


def _nccl(cards: RankCards) -> tuple[ctypes.CDLL, list[ctypes.c_void_p]] | None:
    """NCCL's library and a communicator of each rank; None where there is none."""
    found = [p for at in sys.path for p in Path(at or ".").glob("nvidia/nccl/lib/libnccl.so.2")]
    try:
        lib = ctypes.CDLL(str(found[0]) if found else "libnccl.so.2")
    except OSError as error:
        print(f"no NCCL here ({error}): its column stays empty", flush=True)
        return None
    unique = (ctypes.c_byte * 128)()

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_byte * 128)]

    assert lib.ncclGetUniqueId(ctypes.byref(unique)) == 0
    identity = UniqueId(unique)
    comms = [ctypes.c_void_p() for _ in cards.streams]

    def join(rank: int) -> None:
        cards.use(rank)
        made = lib.ncclCommInitRank(ctypes.byref(comms[rank]), cards.ranks, identity, rank)
        assert made == 0, f"ncclCommInitRank says {made}"

    _on_threads(cards.ranks, join)
    return lib, comms


if __name__ == "__main__":
    main()
