"""Time to the first token of a conversation's next turn: cold, warm, and after a restart.

`python -m benchmarks.restart [ENGINE] [--tokens N] [--folder FOLDER]` answers a prompt of N random
tokens (default: the embedded model, three quarters of its context), then its next turn of 40 tokens
from memory. It opens the engine again over the same `cache_dir` and answers that turn from what was
read at the start, then from the files, then without a cache. Prints seconds, the tokens that were
not computed, and the quotients of restart and warm, of which the first may be at most 1.5. The
files are in the page cache: drop it first to measure the disk.
"""

import argparse
import os
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine

NEW, ANSWER = 40, 16  # tokens of a turn
TIMES = 3  # the best counts


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
    """Seconds until it, cached tokens, and the answer; the engine has nothing left to do then."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    start, took, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
    engine.submit(Request(prompt, params, marks=(len(prompt) - 1,)))
    while not engine.idle:
        for event in engine.step():
            took = took or time.perf_counter() - start
            cached = event.cached
            tokens += [] if event.token is None else [event.token]
    return took, cached, tuple(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    path = given.engine or embedded_engine(cache_folder(os.environ), print)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = EngineOptions(cache_dir=folder)
        engine, rng = Engine.open(path, options), random.Random(1)
        limits = engine.loaded.limits
        count = given.tokens or capacity(limits) * 3 // 4
        prompt = tuple(rng.randrange(5, limits.vocab) for _ in range(count))
        _, _, answer = first_token(engine, prompt)
        turns = [(*prompt, *answer, *(rng.randrange(5, limits.vocab) for _ in range(NEW)))]
        turns += [(*turns[0][:-1], 5 + n) for n in range(1, TIMES)]
        warm = [first_token(engine, turn) for turn in turns]
        engine.close()
        rested, files = [], []
        for turn in turns:
            engine = Engine.open(path, options)
            first_token(engine, tuple(range(5, 70)))  # the first launches of a process take longer
            rested.append(first_token(engine, turn))
            engine.clear_cache()
            files.append(first_token(engine, turn))
            engine.close()
        engine = Engine.open(path, replace(options, cache_bytes=0, cache_dir=None))
        cold = [first_token(engine, turns[0])]
        engine.close()
    assert [one[2] for one in rested] == [one[2] for one in files] == [one[2] for one in warm]
    rows = {"cold": cold, "warm": warm, "restart": rested, "files": files}
    for name, found in rows.items():
        best = min(found)
        print(f"{name:8s} {best[0]:8.4f} s, {best[1]} of {len(turns[0])} tokens cached")
    for name in ("restart", "files"):
        print(f"{name} / warm: {min(rows[name])[0] / min(warm)[0]:.2f}")


if __name__ == "__main__":
    main()
