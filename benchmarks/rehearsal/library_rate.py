"""What cuBLAS reaches in bf16 on 48 multiprocessors: the measure of the rehearsed products.

Needs torch. `python -m benchmarks.rehearsal.library_rate [MULTIPROCESSORS]` times the shapes of a
35B's layer at 1,024 and 4,096 tokens in a green context: the linear layers, and its experts as one
product of batches of equal tokens (what grouped kernels have at best), up and down. Prints TFLOP/s.
Knows none of our kernels.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.graphs import target_here

MULTIPROCESSORS = 48
TOKENS = (1024, 4096)
LINEARS = {"qkvz": (12288, 2048), "qkv": (9216, 2048), "out": (2048, 4096)}
EXPERTS = {"experts up": (256, 1024, 2048), "experts down": (256, 2048, 512)}
CHOSEN = 8  # experts a token
ROUNDS, TIMES = 7, 10


def seconds(work: Callable[[], Any]) -> float:
    """Of one run, the median of rounds of several in a row."""
    found = []
    work()
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(TIMES):
            work()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) * 1e-3 / TIMES)
    return sorted(found)[len(found) // 2]


def drawn(*dims: int) -> Any:
    """A bf16 array on the GPU."""
    return torch.randn(dims, device="cuda", dtype=torch.bfloat16)


def main(count: int) -> None:
    """A line for each shape."""
    target_here()
    torch.zeros(1, device="cuda")
    from torch.cuda.green_contexts import GreenContext

    part = GreenContext.create(num_sms=count, device_id=0)
    part.set_context()
    try:
        for m in TOKENS:
            for name, (n, k) in LINEARS.items():
                x, w = drawn(m, k), drawn(n, k)
                s = seconds(lambda x=x, w=w: x @ w.T)  # type: ignore[misc]
                print(f"{m:5} {name:12} {s * 1e6:8.1f} us {2 * m * n * k / s / 1e12:6.1f} TFLOP/s")
            for name, (e, n, k) in EXPERTS.items():
                rows = m * CHOSEN // e
                x, w = drawn(e, rows, k), drawn(e, n, k)
                s = seconds(lambda x=x, w=w: torch.bmm(x, w.mT))  # type: ignore[misc]
                rate = 2 * e * rows * n * k / s / 1e12
                print(f"{m:5} {name:12} {s * 1e6:8.1f} us {rate:6.1f} TFLOP/s", flush=True)
    finally:
        part.pop_context()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MULTIPROCESSORS)
