"""`LLM.generate` against a server of the same engine: output tokens a second of both.

`python -m benchmarks.served.offline [ENGINE] [--prompts N] [--rounds N] [--input N] [--output N]
[--cache-gib G]`: 512 prompts of 64 random tokens for 64 more, in 4 rounds, of the embedded model by
default. `LLM` and a server (`spark-run --serve`) are open at the same time, so a GPU must have
memory for two; in each round one gets its prompts after the other, which begins in turn, since the
load of a machine drifts. The server gets them from as many connections as `LLM` has requests in
flight, two for each slot. Prints a row for each round with the number of equal answers, and the
quotient of the seconds, which is to be at least 0.97.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from spark_engine.bench.target import started
from spark_engine.engine_file import read_manifest
from spark_engine.runtime.offline.answering import AHEAD
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from spark_engine.runtime.offline.llm import LLM
from spark_engine.runtime.offline.params import SamplingParams

LEAST = 0.97
HEADERS = {"Content-Type": "application/json"}
Prompts = list[list[int]]
Answers = list[tuple[int, ...]]
Asking = Callable[[Prompts], Answers]


def offline(llm: LLM, output: int) -> Asking:
    """By `LLM`."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)

    def ask(prompts: Prompts) -> Answers:
        answers = llm.generate(prompts, params)
        assert not any(answer.error for answer in answers)
        return [answer.token_ids for answer in answers]

    return ask


def served(url: str, output: int, pool: ThreadPoolExecutor) -> Asking:
    """By a server, as many requests at once as `pool` has threads."""

    def one(prompt: list[int]) -> tuple[int, ...]:
        body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        text = json.dumps(body | {"return_token_ids": True})
        with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
            connection.request("POST", "/v1/completions", text, HEADERS)
            answer = connection.getresponse()
            said = json.loads(answer.read())
        assert answer.status == 200, said
        return tuple(said["choices"][0]["token_ids"])

    return lambda prompts: list(pool.map(one, prompts))


def measure(asking: dict[str, Asking], rounds: list[Prompts], output: int) -> float:
    """Seconds of the server over those of `LLM`."""
    took = dict.fromkeys(asking, 0.0)
    for number, prompts in enumerate(rounds):
        found, rates = dict[str, Answers](), dict[str, float]()
        for name in sorted(asking, reverse=bool(number % 2)):
            start = time.perf_counter()
            found[name] = asking[name](prompts)
            seconds = time.perf_counter() - start
            took[name] += seconds
            rates[name] = len(prompts) * output / seconds
        equal = sum(a == b for a, b in zip(*found.values(), strict=True))
        words = ", ".join(f"{name} {rate:,.1f} tokens/s" for name, rate in sorted(rates.items()))
        print(f"{words}; {equal} of {len(prompts)} answers equal", flush=True)
    return took["served"] / took["offline"]


def main() -> int:
    """The command; 1 where `LLM` is slower than LEAST of the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--cache-gib", type=float)
    for name, value in (("prompts", 512), ("rounds", 4), ("input", 64), ("output", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    engine = given.engine or embedded_engine(cache_folder(os.environ), print)
    limits, rng = read_manifest(engine).limits, random.Random(1)
    width, size = AHEAD * limits.max_seqs, given.prompts // given.rounds
    draws = [
        [[rng.randrange(5, limits.vocab) for _ in range(given.input)] for _ in range(size)]
        for _ in range(given.rounds + 1)
    ]
    more = () if given.cache_gib is None else ("--cache-gib", str(given.cache_gib))
    with (
        started(engine, more, lambda _: None) as url,
        LLM(engine, cache_gib=given.cache_gib) as llm,
        ThreadPoolExecutor(width) as pool,
    ):
        both = {"offline": offline(llm, given.output), "served": served(url, given.output, pool)}
        for ask in both.values():
            ask(draws[0][:width])  # untimed: the first launches of a process take longer
        quotient = measure(both, draws[1:], given.output)
    print(f"offline / served: {quotient:.3f}, wanted {LEAST}")
    return int(quotient < LEAST)


if __name__ == "__main__":
    sys.exit(main())
