"""Very many steps as on the rehearsed GPU while another process computes on all of it: no hang.

A part of `benchmarks.rehearsal`. Three engines take turns, one open at a time (`--models`: some of
them): the embedded model with its drafts, and both published models cut to a layer of each kind:
their linears have blocks that wait for one another. Requests come and go; one that is asked alone
at the beginning must be answered with the same tokens at the end.
"""

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.cut_models import cut
from benchmarks.rehearsal.other_process import Pulse
from benchmarks.rehearsal.reporter import Reporter
from benchmarks.result_files import MODELS
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams
from spark_engine.runtime.offline.embedded import find_checkpoint
from tests.runtime.engine.invariants import check_idle

SIZES: dict[str, Any] = {"decode": (1, 8, 16), "prefill": (128, 512), "max_seqs": 16}
CONTEXT, PROMPT, TOKENS = 1024, 200, 300  # positions; most of a request's prompt and answer
SHARE = 5_000  # steps of a row: what was run is kept where the part is cut off
EMBEDDED = "embedded"


def main() -> None:
    """Builds the engines, then runs a third of the steps on each, in shares."""
    reporter = Reporter()
    base, steps = Path(reporter.options["work"]) / "steps", int(reporter.options["steps"])
    other = subprocess.Popen([sys.executable, "-m", "benchmarks.rehearsal.other_process"])
    pulse = Pulse()
    try:
        names = (EMBEDDED, *MODELS)
        for name in reporter.options.get("models", names):
            labels = [f"{name}/{i}" for i in range(-(-steps // len(names) // SHARE))]
            asked = [label for label in labels if label not in reporter.done]
            tell_shares(reporter, asked, partial(built, base, name), pulse.beats)
    finally:
        other.kill()
        other.wait()


def tell_shares(
    reporter: Reporter, asked: Sequence[str], built: Callable[[], Path], runs: Callable[[], bool]
) -> None:
    """A row for each share that is asked, of one engine; `runs` says whether the other process
    computed meanwhile. A share that fails is the one that is wrong, and takes the engine with it:
    those behind it are not run."""
    with ExitStack() as last:
        rows: Iterator[dict[str, Any]] = iter(())
        for label in asked:
            with reporter.trial(label):
                if label == asked[0]:
                    reporter.note(f"building {label.partition('/')[0]}")
                    rows = last.enter_context(closing(run(built(), len(asked))))
                row, still = next(rows), runs()
                reporter.row(label, right=row.pop("same") and still, other_runs=still, **row)
                continue
            break


def built(base: Path, name: str) -> Path:
    """The engine of that name; the one that is there is kept."""
    checkpoint = find_checkpoint() if name == EMBEDDED else cut(name, base / f"{name}_config")
    build(checkpoint, base / name, Options(max_context=CONTEXT, **SIZES), lambda text: None)
    return base / name


def request(rng: random.Random, vocab: int) -> Request:
    """One of any length, greedy or not."""
    prompt = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, PROMPT)))
    warm = rng.choice((0.0, 0.8))
    most = rng.randint(1, TOKENS)
    params = SamplingParams(
        temperature=warm, max_tokens=most, ignore_eos=True, seed=rng.randrange(99)
    )
    return Request(prompt, params)


def run(folder: Path, shares: int, size: int = SHARE) -> Generator[dict[str, Any], None, None]:
    """So many shares of `size` steps of one open engine, of which at most all sequences but a few
    are taken. At the end of each it is empty, and the first request is asked again."""
    rng = random.Random(1)
    with closing(Engine.open(folder, EngineOptions(depth=1))) as engine:
        vocab = engine.loaded.limits.vocab
        asked = request(random.Random(2), vocab)
        first = alone(engine, asked)
        for _ in range(shares):
            walls, going = list[float](), set[int]()
            while len(walls) < size:
                while len(going) < rng.choice((2, 9, 16)) and len(going) < SIZES["max_seqs"]:
                    going.add(engine.submit(request(rng, vocab)))
                start = time.perf_counter()
                for event in engine.step():
                    if event.finish is FinishReason.ERROR:
                        raise RuntimeError(f"request {event.request_id}: {event.message}")
                    if event.finish is not None:
                        going.discard(event.request_id)
                walls.append(time.perf_counter() - start)
            for id_ in going:
                engine.cancel(id_)
            while not engine.idle:
                engine.step()
            same = alone(engine, asked) == first
            check_idle(engine)
            times = {"median_ms": statistics.median(walls) * 1e3, "most_ms": max(walls) * 1e3}
            yield {
                "same": same,
                "steps": size,
                **{name: round(ms, 3) for name, ms in times.items()},
                "seconds": round(sum(walls), 1),
            }


def alone(engine: Engine, asked: Request) -> list[int]:
    """The tokens of one request while nothing else runs."""
    engine.submit(asked)
    tokens = []
    while not engine.idle:
        tokens += [event.token for event in engine.step() if event.token is not None]
    return tokens


if __name__ == "__main__":
    main()
