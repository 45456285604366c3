"""Measures how often an engine's texts differ between runs of the same requests.

The requests run together, as they are served and with the prefix cache as it is served, and then
again and again: in the first of the other runs as before, in the rest in another order and at other
arrival times, so that buckets, neighbours, chunks and cache hits differ. An invariant engine must
give equal texts; for another engine this is the noise level of a comparison of two engines. Knows
the runtime's entry point; compares token ids.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from spark_engine.progress import Progress
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity

TEXTS, GENERATED = 16, 64  # requests, and the tokens that each generates
LENGTHS = (1, 17, 63, 64, 65, 127, 130, 200, 257, 300, 384, 500)  # of prompts, as far as they fit
SHARED = 130  # common first tokens of every second prompt, as far as they fit
LATEST = 24  # steps after which the last request arrives, in staggered runs
Texts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Run:
    """One run compared with the first: the number of `same` texts; the mean part of a text before
    it differs; the prompt and token of the earliest difference (-1: none)."""

    arriving: str
    same: int
    agreement: float
    prompt: int = -1
    token: int = -1


@dataclass(frozen=True)
class Repeated:
    """All runs. `invariant`: the engine is an invariant build."""

    engine: str
    invariant: bool
    texts: int
    tokens: int
    runs: tuple[Run, ...]

    @property
    def passed(self) -> bool:
        """True if no text differs that must not."""
        return not self.invariant or all(run.same == self.texts for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "passed": self.passed}


def repeat(
    loaded: Loaded,
    name: str,
    count: int,
    recorded: Sequence[Sequence[int]],
    shown: Progress,
    seed: int = 0,
) -> Repeated:
    """Runs the requests once and `count` times more. `recorded`: prompts in addition to the random
    ones."""
    rng = random.Random(seed)
    requests = _requests(loaded, recorded, rng)
    engine = Engine(loaded, EngineOptions())
    runs = []
    with shown.track("runs", count + 1) as step:
        first = _together(engine, requests, [0] * len(requests))
        step()
        for number in range(count):
            late = [rng.randrange(LATEST) if number else 0 for _ in requests]
            generated = _together(engine, requests, late)
            runs.append(_compared("at other times" if number else "as before", first, generated))
            step()
    return Repeated(name, loaded.invariant, len(first), sum(map(len, first)), tuple(runs))


def show_repeated(found: Repeated, console: Console) -> None:
    """Prints a row for each run, and a summary line."""
    table = Table(
        title=f"{found.texts} greedy texts, {found.tokens} tokens, compared with the first run"
    )
    for column in ("run", "arriving", "same texts", "agreement", "first difference at"):
        table.add_column(column, justify="left" if column == "arriving" else "right")
    for number, run in enumerate(found.runs, 1):
        where = f"text {run.prompt}, token {run.token}" if run.prompt >= 0 else ""
        cells = str(number), run.arriving, str(run.same), f"{run.agreement:.3f}", where
        table.add_row(*cells)
    console.print(table)
    parted = sum(found.texts - run.same for run in found.runs)
    total = found.texts * len(found.runs)
    built = "built invariant" if found.invariant else "not built invariant"
    colour = "green" if found.passed else "red"
    console.print(f"[{colour}]{found.engine} ({built}): {parted} of {total} texts differed")


def _requests(
    loaded: Loaded, recorded: Sequence[Sequence[int]], rng: random.Random
) -> list[Request]:
    limits = loaded.limits
    generated = max(min(GENERATED, capacity(limits) // 2), 1)
    prompt_tokens = capacity(limits) - generated
    draw = [rng.randrange(limits.vocab) for _ in range(SHARED)]
    prompts = [list(ids) for ids in recorded][:TEXTS]
    while len(prompts) < TEXTS:
        length = LENGTHS[len(prompts) % len(LENGTHS)]
        own = [rng.randrange(limits.vocab) for _ in range(length)]
        prompts.append(draw + own if len(prompts) % 2 else own)
    params = SamplingParams(temperature=0.0, max_tokens=generated, ignore_eos=True, seed=0)
    return [Request(tuple(ids[:prompt_tokens]), params) for ids in prompts]


def _together(engine: Engine, requests: Sequence[Request], late: Sequence[int]) -> Texts:
    """The text of each request; each arrives `late` steps after the start."""
    generated: dict[int, list[int]] = {}
    number: dict[int, int] = {}
    waiting = sorted(range(len(requests)), key=lambda i: (late[i], i))
    steps = 0
    while waiting or not engine.idle:
        while waiting and late[waiting[0]] <= steps:
            index = waiting.pop(0)
            number[engine.submit(requests[index])] = index
            generated[index] = []
        for event in engine.step():
            if event.token is not None:
                generated[number[event.request_id]].append(event.token)
        steps += 1
    return [tuple(generated[i]) for i in range(len(requests))]


def _compared(arriving: str, first: Texts, other: Texts) -> Run:
    """A cancelled request has a shorter text, which differs at its end."""
    before = [_common(a, b) for a, b in zip(first, other, strict=True)]
    parted = [(n, i) for i, n in enumerate(before) if n < max(len(first[i]), len(other[i]))]
    shares = [n / max(len(a), len(b), 1) for n, a, b in zip(before, first, other, strict=True)]
    token, prompt = min(parted, default=(-1, -1))
    mean = sum(shares) / len(shares)
    return Run(arriving, len(first) - len(parted), mean, prompt, token)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
