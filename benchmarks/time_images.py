"""The vision tower of a published size, the first token of an image, and what others wait for it.

`python -m benchmarks.time_images LAYOUT…` (`27b:nvfp4 35b-a3b:nvfp4`; a layout gets the published
tower of 27 blocks) builds an engine of each in `engines/`, and prints of it:

- the tower alone at GRIDS (each row of the residual stream has four patches): milliseconds, and its
  products a second next to the card's bf16 rate;
- milliseconds from a request to its first token, for a text and for a prompt with one image that
  the engine has not seen and as many tokens; and of a core before that, to decode a PNG of that
  size: with the client's part, what the image takes above the text;
- the gaps between tokens of TEXTS sequences that decode, with prefill bounded by `--itl-ms`:
  without images, and while SCREENS requests with an image of the first grid each come at once, with
  the times to the first tokens of these.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from benchmarks.graphs import target_here
from benchmarks.published import folder_of
from spark_engine.device.gpu import present
from spark_engine.models.families.qwen3_5.config import VisionConfig
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.policy.pacing import PrefillPolicy
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.images.decode import decode
from spark_engine.runtime.images.tower_inputs import fill_inputs
from spark_engine.vision import PATCH_VALUES, ROW_PATCHES, VISION, Image, VisionInfo

WORDS = 200  # tokens of text around the image
PLACE = 11  # of its first row in the prompt
WARM = 10  # steps of the texts before the images come
BUILD = "--decode 1,8,32 --prefill 64,256,1024,2048 --max-context 4096 --max-seqs 32 "
BUILD += "--kv-tokens 98304 --max-image-pixels 2097152 --drafts 0 --no-record"
IDS = 100_000  # ids of drawn prompts are below
GRIDS = ((34, 60), (16, 16), (8, 8))  # rows x columns of the residual stream
TIMES = 7
TEXTS, SCREENS = 8, 16  # sequences that decode; images that come at once
TOKENS = 600  # most that a text decodes


def with_tower(layout: str, folder: Path) -> Path:
    """Writes the layout's configs, with the published vision tower, into `folder`."""
    own = folder_of(layout)
    config = json.loads((own / "config.json").read_text())
    hidden = config["text_config"]["hidden_size"]
    config["vision_config"] = {"out_hidden_size": hidden}  # of other sizes the usual ones
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "synthetic.json").write_text((own / "synthetic.json").read_text())
    return folder


def products(rows: int, tower: VisionConfig) -> float:
    """Multiplications with additions, times two, of the tower for an image of so many rows."""
    patches, h, inner = rows * ROW_PATCHES, tower.hidden, tower.intermediate
    block = patches * (4 * h * h + 2 * h * inner) + 2 * patches * patches * h
    wide = ROW_PATCHES * h
    merger = rows * wide * (wide + tower.out_hidden)
    return 2.0 * (tower.depth * block + patches * PATCH_VALUES * h + merger)


def picture(grid: tuple[int, int], seed: int, start: int = 0) -> Image:
    """Noise, as `decode` gives an image of this grid."""
    rows, columns = grid
    rng = np.random.default_rng(seed)
    return Image(start, rows, columns, rng.bytes(rows * columns * 3072), rng.bytes(16))


def screen(width: int, height: int) -> Pillow.Image:
    """Lines of small text on white, as a terminal or an editor shows them."""
    found, rng = Pillow.new("RGB", (width, height), "white"), np.random.default_rng(0)
    draw = ImageDraw.Draw(found)
    for y in range(0, height, 14):
        draw.text((10, y), bytes(rng.integers(33, 126, width // 6).tolist()).decode(), "black")
    return found


def tower_ms(engine: Engine, grid: tuple[int, int]) -> float:
    """Median milliseconds of one launch of the smallest bucket for the grid."""
    loaded, rows = engine.loaded, grid[0] * grid[1]
    assert loaded.vision is not None
    bucket = next(n for n in loaded.buckets(VISION) if n >= rows)
    buffers = engine.memory.buffers(VISION, bucket, 0)
    fill_inputs(buffers, picture(grid, 0), loaded.vision, 0)
    return median_ms(lambda: loaded.executors[VISION, bucket].launch(buffers)())


def median_ms(call: Callable[[], object]) -> float:
    """Of TIMES, after one call that is not counted."""
    call()
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e3


def prompt_of(rng: np.random.Generator, rows: int, info: VisionInfo | None) -> list[int]:
    """WORDS drawn ids, with as many more as an image of so many rows has; its own with `info`."""
    ids: list[int] = rng.integers(0, IDS, WORDS + rows + 2).tolist()
    if info is not None:
        ids[PLACE - 1 : PLACE + rows + 1] = [info.start_id, *[info.image_id] * rows, info.end_id]
    return ids


def first_token_ms(engine: Engine, requests: Sequence[Request]) -> list[float]:
    """Milliseconds to each request's first token, one after the other."""
    found = []
    for request in requests:
        start = time.perf_counter()
        number = engine.submit(request)
        while not any(e.request_id == number and e.token is not None for e in engine.step()):
            pass
        found.append((time.perf_counter() - start) * 1e3)
        while not engine.idle:
            engine.step()
    return found


def under_load(
    engine: Engine, texts: Sequence[Request], others: Sequence[Request], steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds between tokens of `texts` while `others`, which come at once, get their first
    tokens, or for so many steps without any; and milliseconds to these first tokens. The texts
    decode when the others come, and must have enough tokens to come."""
    numbers = {engine.submit(request) for request in texts}
    seen = dict[int, float]()
    while len(seen) < len(numbers):
        seen |= {e.request_id: time.perf_counter() for e in engine.step() if e.token is not None}
    for _ in range(WARM):
        seen |= {e.request_id: time.perf_counter() for e in engine.step()}
    start = time.perf_counter()
    waiting, gaps, firsts = {engine.submit(request) for request in others}, [], []
    while waiting or not others and steps:
        steps -= 1
        events, now = engine.step(), time.perf_counter()
        for event in events:
            if event.request_id in numbers:
                if event.token is not None:
                    gaps.append((now - seen[event.request_id]) * 1e3)
                    seen[event.request_id] = now
                if event.finish is not None:
                    raise SystemExit("a text ended before the last image's first token")
            elif event.request_id in waiting:
                waiting.remove(event.request_id)
                firsts.append((now - start) * 1e3)
    for number in numbers:
        engine.cancel(number)
    while not engine.idle:
        engine.step()
    return gaps, firsts


def shares(found: Sequence[float]) -> str:
    """Median, 99th percentile and most."""
    p50, p99 = np.percentile(found, (50, 99))
    return f"p50 {p50:.1f}, p99 {p99:.1f}, most {max(found):.1f} ms"


def built(layout: str, engine: Path) -> Path:
    """Builds the engine of a layout; returns the folder of its configs."""
    folder = with_tower(layout, engine.parent / f"{engine.name}_configs")
    command = [sys.executable, "-P", "-m", "spark_engine.builder.cli", str(folder)]
    subprocess.run([*command, "-o", str(engine), *BUILD.split()], check=True)
    return folder


def time_grid(engine: Engine, grid: tuple[int, int], tower: VisionConfig) -> None:
    """Prints the tower's time and those of first tokens for images of a grid."""
    info, here, rows = engine.loaded.vision, present(), grid[0] * grid[1]
    assert info is not None
    alone = tower_ms(engine, grid)
    rate = products(rows, tower) / alone * 1e3
    share = f" ({rate / here.bf16_flops:.0%} of the bf16 rate)" if here else ""
    print(f"tower {4 * rows} patches: {alone:.2f} ms, {rate / 1e12:.0f} TFLOP/s{share}", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng, texts, images = np.random.default_rng(7), list[Request](), list[Request]()
    for seed in range(TIMES + 1):
        texts.append(Request(tuple(prompt_of(rng, rows, None)), params))
        ids = tuple(prompt_of(rng, rows, info))
        images.append(Request(ids, params, images=(picture(grid, seed, PLACE),)))
    text, image = (
        statistics.median(first_token_ms(engine, requests)[1:]) for requests in (texts, images)
    )
    file, size = io.BytesIO(), (32 * grid[1], 32 * grid[0])
    screen(*size).save(file, "PNG")
    data = file.getvalue()
    read = median_ms(lambda: Pillow.open(io.BytesIO(data)).load())
    whole = median_ms(partial(decode, data, info))
    print(
        f"first token of {WORDS + rows + 2} tokens: text {text:.1f} ms, image {image:.1f}: tower "
        f"{alone:.1f}, other {image - text - alone:.1f}; before it {whole:.1f} to decode a PNG of "
        f"{size[0]} x {size[1]}, {read:.1f} of them in Pillow: {image + whole - text:.1f} ms above "
        "the text in all",
        flush=True,
    )


def time_load(engine: Engine, grid: tuple[int, int], itl_ms: float) -> None:
    """Prints the gaps of texts without and with images that come at once."""
    info, rows = engine.loaded.vision, grid[0] * grid[1]
    assert info is not None
    rng, first = np.random.default_rng(8), SamplingParams(max_tokens=1, ignore_eos=True)
    for count in (0, SCREENS):
        on = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        texts = [Request(tuple(prompt_of(rng, 0, None)), on) for _ in range(TEXTS)]
        others = [
            Request(tuple(prompt_of(rng, rows, info)), first, images=(picture(grid, seed, PLACE),))
            for seed in range(100, 100 + count)
        ]
        gaps, firsts = under_load(engine, texts, others, TOKENS // 2)
        over = sum(gap > itl_ms for gap in gaps)
        said = f"{TEXTS} texts, {count} images of {4 * rows} patches at once: gaps "
        said += f"{shares(gaps)}; {over} of {len(gaps)} over {itl_ms:g} ms"
        print(said + (f"; first tokens {shares(firsts)}" if firsts else ""), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--itl-ms", type=float, default=60.0)
    args = parser.parse_args(words)
    target_here()
    for layout in args.layouts:
        path = Path("engines") / f"images_{Path(layout).name.replace(':', '_')}"
        tower = open_model(built(layout, path)).config.vision
        assert tower is not None
        print(layout, flush=True)
        engine = Engine(load(path, 0, 1, cache_bytes=0), EngineOptions(swap_bytes=0))
        for grid in GRIDS:
            time_grid(engine, grid, tower)
        engine.close()
        options = EngineOptions(swap_bytes=0, policy=PrefillPolicy(itl_ms=args.itl_ms))
        engine = Engine(load(path, 0, 1, cache_bytes=0), options)
        time_load(engine, GRIDS[0], args.itl_ms)
        engine.close()


if __name__ == "__main__":
    main()
