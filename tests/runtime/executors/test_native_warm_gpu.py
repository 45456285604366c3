"""The prefix cache on a real GPU: a run that continues from cached pages and states equals a cold
run, bit for bit.

The engine of the embedded model is built with `--invariant`: a tile's bits depend on its tokens
alone.
"""

import random
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams
from tests.device.on_gpu import HERE, on_gpu
from tests.repository import ROOT
from tests.runtime.engine.drive import drain

pytestmark = on_gpu()
TINY = ROOT / "models" / "tiny" / "checkpoint"
TALKS, TURNS, TOKENS = 24, 4, 20
Said = list[tuple[int, float | None]]


def options(target: str) -> Options:
    sizes = {"decode": (1, 8, 24), "prefill": (64, 256), "max_seqs": 24, "max_context": 1024}
    return Options(target=target, timing=False, invariant=True, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("warm") / "engine"
    build(TINY, made, options(HERE), lambda text: None)
    return made


def play(engine: Engine, requests: list[Request]) -> tuple[list[Said], list[int]]:
    """The tokens and log-probabilities of each request, and the cached length of its prompt."""
    events = drain(engine, *requests).values()
    assert not any(e.finish is FinishReason.ERROR for of in events for e in of)
    said = [[(e.token, e.logprob) for e in of if e.token is not None] for of in events]
    return said, [max(e.cached for e in of) for of in events]


def ask(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Every third request is greedy; consecutive requests have different answer lengths."""
    return [
        Request(
            prompt,
            SamplingParams(
                temperature=0.8 * (i % 3 > 0),
                max_tokens=TOKENS + i % 7,
                ignore_eos=True,
                seed=i,
                logprobs=0,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def compare(folder: Path, files: Path | None = None) -> None:
    """Conversations with a common beginning that grow by turns: first all at once with the cache,
    each turn from the cached states of the previous one; then each prompt alone without a cache.
    With a folder for `files` the engine is started again before each turn."""
    rng = random.Random(3)
    drawn = lambda size: tuple(rng.randrange(4000) for _ in range(size))  # noqa: E731
    shared = drawn(150)
    prompts = [shared[: rng.choice((0, 64, 100, 150))] + drawn(90 + i) for i in range(TALKS)]
    options = EngineOptions(swap_bytes=0, drafts=0, cache_dir=files and str(files))
    warm = Engine.open(folder, options)
    turns: list[tuple[list[tuple[int, ...]], list[Said]]] = []
    for turn in range(TURNS):
        if turn and files is not None:
            warm.close()
            warm = Engine.open(folder, options)
        said, found = play(warm, ask(prompts))
        assert not turn or min(found) >= 64, "each continues from the previous turn"
        turns.append((prompts, said))
        more = zip(prompts, said, strict=True)
        prompts = [prompt + tuple(t for t, _ in words) + drawn(30) for prompt, words in more]
    warm.close()
    cold = Engine.open(folder, EngineOptions(swap_bytes=0, drafts=0, cache_bytes=0))
    for asked, said in turns:
        for request, words in zip(ask(asked), said, strict=True):
            alone, found = play(cold, [request])
            assert alone == [words], len(request.prompt)
            assert found == [0], "it computed all of its prompt"
    cold.close()


def test_warm_is_cold_bit_for_bit(folder: Path) -> None:
    compare(folder)


def test_started_again_is_cold_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    compare(folder, tmp_path)
