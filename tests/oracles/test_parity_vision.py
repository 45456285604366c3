"""The vision tower of built engines against transformers' in f32, on the CPU.

Random towers of dense and MoE networks, drawn by `models/synthetic.py`. An image is one launch; the
bucket's padding, and rows of the state that belong to other images, hold NaN or wild numbers.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.check import run_check
from spark_engine.check.engines.open_engines import open_engine
from spark_engine.check.engines.ranks import RanksExecutor
from spark_engine.interface import image_state
from spark_engine.models.checkpoint.files import read_configs
from spark_engine.models.open_model import open_model
from spark_engine.progress import Progress
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.images.tower_inputs import fill_inputs
from spark_engine.tensors import DType
from spark_engine.vision import IMAGE_ROWS, VISION, Image, VisionInfo
from tests.published.networks import config_of

TOLERANCE = 2e-5  # of the range of what is compared
GRIDS = ((2, 3), (7, 5), (1, 1), (1, 13), (6, 4))  # rows and columns; the buckets hold 16 and 36
FIRST = 4  # of the state's rows
SIZES: dict[str, Any] = {
    "depth": 3, "hidden_size": 144, "num_heads": 2, "intermediate_size": 200, "hidden_act":
    "gelu_pytorch_tanh", "num_position_embeddings": 49, "deepstack_visual_indexes": [],
}  # fmt: skip
KINDS = {"dense": SIZES, "moe": SIZES | {"depth": 1, "num_heads": 3, "num_position_embeddings": 4}}
DTYPES = {"dense": "bfloat16", "moe": "float32"}
Floats = NDArray[np.float32]


def write(folder: Path, kind: str, tower: Mapping[str, int] | None = None, **changes: int) -> None:
    """A checkpoint of drawn tensors in `folder`; `changes`: to the text network."""
    config = config_of(kind, False, {"dtype": DTYPES[kind], **changes})
    vision = KINDS[kind] | {"out_hidden_size": config["text_config"]["hidden_size"]} | (tower or {})
    processor = {
        "size": {"shortest_edge": 1024, "longest_edge": 1 << 20},
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7],
    }  # fmt: skip
    files = {"config": config | {"vision_config": vision}, "synthetic": {"seed": 7}}
    for name, row in (files | {"preprocessor_config": processor}).items():
        (folder / f"{name}.json").write_text(json.dumps(row))


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kind, checkpoint, open engine) with buckets of 64 and 144 patches."""
    folder = tmp_path_factory.mktemp("vision")
    write(folder, request.param)
    sizes = {"decode": (1,), "prefill": (64,), "max_context": 64, "max_seqs": 1}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("spark_engine.builder.plan.images.CPU_SIZES", (64,))
    options = Options(target="cpu", max_image_pixels=36 * 1024, **sizes)  # type: ignore[arg-type]
    build(folder, folder / "engine", options, lambda text: None)
    monkeypatch.undo()
    loaded = load(folder / "engine", threads=1)
    yield request.param, folder, loaded
    loaded.close()


def image(rows: int, columns: int, seed: int = 0) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, 1024 * 3 * rows * columns, np.uint8)
    return Image(5, rows, columns, pixels.tobytes(), bytes(16))


def rows_of(loaded: Loaded, info: VisionInfo, given: Image) -> Floats:
    """`image_rows` after a launch; what it must not read or write was poisoned before."""
    bucket = next(n for n in loaded.buckets(VISION) if n >= given.tokens)
    executor = loaded.executors[VISION, bucket]
    buffers: dict[str, Any] = {}
    for spec in executor.specs.inputs:
        wild = {"f": np.nan, "i": -(1 << 31), "u": 255}[spec.dtype.numpy.kind]
        buffers[spec.name] = np.full(spec.dims, wild, spec.dtype.numpy)
    (state,) = executor.specs.states
    buffers[state.name] = np.full(state.dims, np.nan, state.dtype.numpy)
    fill_inputs(buffers, given, info, FIRST)
    if not isinstance(executor, RanksExecutor):
        executor.run(buffers)
        return np.asarray(buffers[state.name], np.float32)
    ranks = [own[state.name] for own in executor.of(buffers)]
    for rows in ranks:
        rows.fill(np.nan)
    executor.run(buffers)
    np.testing.assert_array_equal(*ranks)
    return np.asarray(ranks[0], np.float32)


def processed(images: Iterable[Image], info: VisionInfo) -> tuple[Floats, list[list[int]]]:
    """Values of patches and grids of images, as transformers' image processor makes them."""
    values, grids = [], []
    for one in images:
        x = np.frombuffer(one.pixels, np.uint8).reshape(4 * one.tokens, 3, -1).astype(np.float32)
        x = (x / 255 - np.float32(info.mean)[:, None]) / np.float32(info.std)[:, None]
        values.append(np.stack([x, x], 2).reshape(len(x), -1))  # the frame twice
        grids.append([1, 2 * one.rows, 2 * one.columns])
    return np.concatenate(values), grids


def truth(folder: Path, info: VisionInfo, images: list[Image]) -> list[Floats]:
    """What transformers' tower makes of images, all in one call."""
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    checkpoint = open_model(folder).checkpoint
    assert checkpoint is not None
    config = Qwen3_5VisionConfig(**read_configs(folder)[0]["vision_config"])
    config._attn_implementation = "eager"
    tower, prefix = Qwen3_5VisionModel(config).eval(), "model.visual."
    read = lambda name: checkpoint.read(name).astype(np.float32)  # noqa: E731
    names = [n.removeprefix(prefix) for n in checkpoint.tensors if n.startswith(prefix)]
    tower.load_state_dict({n: torch.tensor(read(prefix + n)) for n in names})
    values, grids = processed(images, info)
    with torch.no_grad():
        out = tower(torch.tensor(values), torch.tensor(grids)).pooler_output
    ends = np.cumsum([one.tokens for one in images])[:-1]
    return np.split(out.numpy(), ends)


def test_rows_equal_transformers(made: tuple[str, Path, Loaded]) -> None:
    _, folder, loaded = made
    assert loaded.folder is not None
    info = loaded.folder.manifest.vision
    assert info is not None and info.mean == (0.5, 0.4, 0.3)
    images = [image(*grid, seed=i) for i, grid in enumerate(GRIDS)]
    for given, want in zip(images, truth(folder, info, images), strict=True):
        state = rows_of(loaded, info, given)
        got = state[FIRST : FIRST + given.tokens]
        grid = (given.rows, given.columns)
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), grid
        others = np.delete(state[:-1], np.arange(FIRST, FIRST + given.tokens), 0)
        assert np.isnan(others).all(), f"{grid} wrote rows of other images"


def test_manifest_counts_the_tower(made: tuple[str, Path, Loaded]) -> None:
    kind, _, loaded = made
    assert loaded.folder is not None
    manifest = loaded.folder.manifest
    info, limits = manifest.vision, manifest.limits
    assert info is not None
    assert (info.most_pixels, info.side**2) == (36 * 1024, KINDS[kind]["num_position_embeddings"])
    assert loaded.buckets(VISION) == (16, 36) and limits.image_rows == 4 * 36
    (state,) = (s.spec for s in manifest.states if s.unit == "image")
    assert state == image_state(limits, manifest.model.hidden, DType.F32)
    assert manifest.memory.states >= state.nbytes and state.name == IMAGE_ROWS
    assert "vision" not in manifest.ignored
    assert [b.file for b in manifest.buckets if b.family == VISION] == [
        "vision_p64.engine",
        "vision_p144.engine",
    ]


def test_an_image_of_equal_pixels_has_equal_rows_in_every_bucket(
    made: tuple[str, Path, Loaded],
) -> None:
    """Up to the order of sums: buckets have other tiles."""
    _, _, loaded = made
    assert loaded.folder is not None and loaded.folder.manifest.vision is not None
    info, given = loaded.folder.manifest.vision, image(3, 4)
    small = rows_of(loaded, info, given)[FIRST : FIRST + 12]
    only = replace(loaded, executors={k: e for k, e in loaded.executors.items() if k[1] == 36})
    large = rows_of(only, info, given)[FIRST : FIRST + 12]
    assert np.abs(small - large).max() <= TOLERANCE * np.abs(small).max()


@pytest.mark.parametrize("made", ["dense"], indirect=True)
def test_spark_check_compares_the_texts_of_such_an_engine(made: tuple[str, Path, Loaded]) -> None:
    _, folder, _ = made
    report = run_check(folder / "engine", folder, ("op", "layer"), Progress(None))
    assert [(level.name, level.passed) for level in report.levels] == [
        ("op", True),
        ("layer", True),
    ]


def test_every_rank_has_all_rows(tmp_path: Path) -> None:
    write(
        tmp_path, "dense", num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4
    )
    sizes = {"decode": (1,), "prefill": (64,), "max_context": 64, "max_seqs": 1}
    options = Options(target="cpu", tp=2, max_image_pixels=8192, **sizes)  # type: ignore[arg-type]
    build(tmp_path, tmp_path / "engine", options, lambda text: None)
    with closing(open_engine(tmp_path / "engine")) as loaded:
        assert loaded.folder is not None and (info := loaded.folder.manifest.vision) is not None
        given = image(2, 3)
        (want,) = truth(tmp_path, info, [given])
        got = rows_of(loaded, info, given)[FIRST : FIRST + 6]
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
