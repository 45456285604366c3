"""Engines of random checkpoints for the tests of the real executor."""

from __future__ import annotations

import random
from pathlib import Path

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.engine.request import Request, SamplingParams
from tests.checkpoints import write_checkpoint

VOCAB = 512
OPTIONS = Options(
    decode=(1, 2, 8, 32), prefill=(64, 256), max_context=384, max_seqs=32, kv_tokens=64 * 120
)


def load_random(
    folder: Path, format: str, moe: bool, options: Options = OPTIONS, head: bool = False
) -> Loaded:
    """Writes, builds and opens one random checkpoint; with a draft `head` if it is to have one."""
    wanted = {"mtp_num_hidden_layers": 1} if head else {}
    written = write_checkpoint(folder / "checkpoint", wanted, format=format, moe=moe)
    build(written.path, folder / "engine", options, lambda text: None)
    return load(folder / "engine", threads=1)


def random_request(rng: random.Random, longest: int, most: int) -> Request:
    """A prompt of 1..longest tokens and 1..most to generate, greedy or sampled."""
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, longest)))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.8, 1.2)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 40)),
        repetition=rng.choice((1.0, 1.2)),
        frequency=rng.choice((0.0, 0.5)),
        max_tokens=rng.randint(1, most),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(62),
        logprobs=3,
    )
    return Request(prompt, params)
