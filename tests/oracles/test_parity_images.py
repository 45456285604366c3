"""Prompts with images through a built engine against transformers' whole model in f32, on the CPU.

The tower, rows in prefill, positions in time, height and width, and decode behind them: tokens and
log-probabilities of greedy requests, with a draft head.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.models.checkpoint.files import read_configs
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Event, Request, SamplingParams
from spark_engine.vision import Image
from tests.oracles.test_parity_vision import processed, write
from tests.published.networks import module_of

IMAGE_ID, GENERATED = 500, 6
# images (start, rows, columns) of a prompt of so many tokens: one that a tile's end cuts, two next
# to each other, one at both ends
PROMPTS = {120: ((55, 3, 5), (90, 4, 2)), 70: ((3, 2, 3), (10, 5, 1)), 21: ((0, 1, 4), (11, 2, 5))}


def image(start: int, rows: int, columns: int) -> Image:
    rng = np.random.default_rng(100 * rows + columns)
    pixels = rng.integers(0, 256, 3 * 1024 * rows * columns, np.uint8).tobytes()
    digest = hashlib.blake2b(pixels, digest_size=16).digest()
    return Image(start, rows, columns, pixels, digest)


def request(length: int) -> Request:
    images = tuple(image(*place) for place in PROMPTS[length])
    prompt = np.random.default_rng(length).integers(3, 490, length)
    for one in images:
        prompt[one.start : one.end] = IMAGE_ID
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, logprobs=0)
    return Request(tuple(prompt.tolist()), params, images=images)


def run(engine: Engine, given: list[Request]) -> list[list[Event]]:
    found: dict[int, list[Event]] = {engine.submit(one): [] for one in given}
    while not engine.idle:
        for event in engine.step():
            found[event.request_id].append(event)
    return [*found.values()]


def truth(model: Any, given: Request, info: Any) -> list[tuple[int, float]]:
    """(token, its log-probability) of each step, every step from the beginning."""
    import torch

    values, grids = processed(given.images, info)
    pictures = {"pixel_values": torch.tensor(values), "image_grid_thw": torch.tensor(grids)}
    ids, found = list(given.prompt), []
    for _ in range(GENERATED):
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE_ID).int()
        kinds[:, len(given.prompt) :] = 0
        with torch.no_grad():
            made = model(
                input_ids=tokens, mm_token_type_ids=kinds, use_cache=False, **pictures
            ).logits[0, -1]
        logs = torch.log_softmax(made.double(), -1)
        ids.append(int(made.argmax()))
        found.append((ids[-1], float(logs.max())))
    return found


def test_greedy_tokens_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    write(tmp_path, "dense")
    monkeypatch.setattr("spark_engine.builder.plan.images.CPU_SIZES", (64,))
    options = Options(
        target="cpu", decode=(1, 4), prefill=(64, 128), max_context=192, max_seqs=4,
        max_image_pixels=36 * 1024, drafts=2, kv_dtype="f32",
    )  # fmt: skip
    build(tmp_path, tmp_path / "engine", options, lambda text: None)
    checkpoint = open_model(tmp_path).checkpoint
    assert checkpoint is not None
    model = module_of(read_configs(tmp_path)[0], "cpu")
    names = [name for name in checkpoint.tensors if not name.startswith("mtp.")]
    read = lambda name: torch.tensor(checkpoint.read(name).astype(np.float32))  # noqa: E731
    model.load_state_dict({name: read(name) for name in names})
    loaded = load(tmp_path / "engine", threads=1)
    engine, given = Engine(loaded, EngineOptions()), [request(n) for n in PROMPTS]
    wanted = [truth(model, one, loaded.vision) for one in given]
    for _ in range(2):  # again from the prefix cache
        for events, want in zip(run(engine, given), wanted, strict=True):
            assert [e.token for e in events] == [token for token, _ in want]
            got = [e.logprob for e in events]
            np.testing.assert_allclose(got, [log for _, log in want], atol=2e-4)
    engine.close()
