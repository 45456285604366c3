"""Every op at served sizes: microseconds beside the floor, family by family.

Usage, where a GPU is: python -m benchmarks.bench_ops [FAMILY …], of linears, experts, recurrence,
attention, sampling and rows; all of them by default. Each family is a module that can be run by
itself and says there what its lines hold. What fails is named at the end, after the others ran.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

FAMILIES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "linears": (("linears",),),
    "experts": (("moe",),),
    "recurrence": (("gdn", "decode"), ("gdn", "rings"), ("gdn", "prefill"), ("gdn", "conv")),
    "attention": (("attention", "decode"), ("attention", "fused"), ("attention", "prefill")),
    "sampling": (("sampling",),),  # and the router
    "rows": (("bench_rows",),),  # norms, quantisers, activations, embedding
}
Run = Callable[[Sequence[str]], int]


def run_module(words: Sequence[str]) -> int:
    """The exit code of `python -m benchmarks.WORDS…`, in a process with the GPU to itself."""
    return subprocess.run([sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]).returncode


def main(families: Sequence[str], run: Run = run_module) -> int:
    """Runs the families' modules in order; the exit code is 1 if one failed, 2 for a wrong name."""
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown:
        print(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    failed = []
    for family in families or FAMILIES:
        for words in FAMILIES[family]:
            print(f"== {' '.join(words)}", flush=True)
            if run(words):
                failed.append(" ".join(words))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
