"""How long the vision tower of a published size takes, and an image's first token next to text's.

`python -m benchmarks.time_images LAYOUT ENGINE` (`27b:nvfp4`; the layout gets the published tower
of 27 blocks) builds ENGINE, and prints: milliseconds of the tower alone at `--grids` (rows x
columns of the residual stream; each row has four patches), its products a second next to the card's
bf16 rate; then milliseconds from a request to its first token, for a prompt with one image that the
engine has not seen, for a text of as many tokens, and for that image a second time. Medians of
`--times`. The client's part is timed apart: decoding and resizing a PNG of that size.
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

from benchmarks.published import folder_of
from spark_engine.device.gpu import present
from spark_engine.models.families.qwen3_5.config import VisionConfig
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.images.decode import decode
from spark_engine.runtime.images.tower_inputs import fill_inputs
from spark_engine.vision import PATCH_VALUES, ROW_PATCHES, VISION, Image

WORDS = 200  # tokens of text around the image
BUILD = "--decode 1 --prefill 1024,2048 --max-context 4096 --max-seqs 2 "
BUILD += "--max-image-pixels 2097152 --drafts 0 --no-record"


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


def tower_ms(engine: Engine, grid: tuple[int, int], times: int) -> float:
    """Median milliseconds of one launch of the smallest bucket for the grid."""
    loaded, rows = engine.loaded, grid[0] * grid[1]
    assert loaded.vision is not None
    bucket = next(n for n in loaded.buckets(VISION) if n >= rows)
    buffers = engine.memory.buffers(VISION, bucket, 0)
    fill_inputs(buffers, picture(grid, 0), loaded.vision, 0)
    return median_ms(lambda: loaded.executors[VISION, bucket].launch(buffers)(), times)


def median_ms(call: Callable[[], object], times: int) -> float:
    """After one call that is not counted."""
    call()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e3


def first_token_ms(engine: Engine, requests: list[Request]) -> list[float]:
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


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--build", default=BUILD, help="options of the build")
    parser.add_argument("--grids", default="34x60,16x16,8x8", help="rows x columns, a list")
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args(words)
    grids = [(int(a), int(b)) for a, _, b in (g.partition("x") for g in args.grids.split(","))]
    folder = with_tower(args.layout, args.engine.parent / f"{args.engine.name}_configs")
    command = [sys.executable, "-P", "-m", "spark_engine.builder.cli", str(folder)]
    subprocess.run([*command, "-o", str(args.engine), *args.build.split()], check=True)
    loaded = load(args.engine, 0, 1)
    assert loaded.folder is not None
    info = loaded.folder.manifest.vision
    assert info is not None
    tower, here = open_model(folder).config.vision, present()
    engine = Engine(loaded, EngineOptions(swap_bytes=0))
    rng = np.random.default_rng(7)
    for grid in grids:
        rows = grid[0] * grid[1]
        ms = tower_ms(engine, grid, args.times)
        rate = products(rows, tower) / ms * 1e3
        share = f" ({rate / here.bf16_flops:.0%} of the bf16 rate)" if here else ""
        print(
            f"tower {4 * rows} patches: {ms:.2f} ms, {rate / 1e12:.0f} TFLOP/s{share}", flush=True
        )
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        texts, images = list[Request](), list[Request]()
        for seed in range(args.times + 1):
            ids = rng.integers(0, 100_000, WORDS + rows + 2).tolist()
            texts.append(Request(tuple(ids), params))
            ids[10], ids[11 + rows] = info.start_id, info.end_id
            ids[11 : 11 + rows] = [info.image_id] * rows
            images.append(Request(tuple(ids), params, images=(picture(grid, seed, 11),)))
        text = statistics.median(first_token_ms(engine, texts)[1:])
        image = statistics.median(first_token_ms(engine, images)[1:])
        print(f"first token of {WORDS + rows + 2} tokens: text {text:.1f} ms, image {image:.1f}")
        file = io.BytesIO()
        screen(32 * grid[1], 32 * grid[0]).save(file, "PNG")
        took = median_ms(partial(decode, file.getvalue(), info), 3)
        print(f"decoding a PNG of {32 * grid[1]} x {32 * grid[0]}: {took:.1f} ms", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
