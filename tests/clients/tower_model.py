"""The embedded model with a vision tower: a copy of its checkpoint, and random small weights.

What it says of an image is worth nothing; its prompts, tokens and time are those of images. Three
tokens of rare words become those around and of an image, since the vocabulary has no free one.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.offline.embedded import find_checkpoint

WORDS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
HIDDEN, WIDE, DEPTH, SIDE = 64, 128, 2, 4
MOST_PIXELS = 1024 * 256


def write(folder: Path, **changes: Any) -> Path:
    """The checkpoint, in a new folder; `changes` to its config.json."""
    shutil.copytree(find_checkpoint(), folder)
    tokens = _reserve(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    out = config["hidden_size"]
    vision = {
        "depth": DEPTH, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_heads": 2,
        "out_hidden_size": out, "num_position_embeddings": SIDE**2, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
    }  # fmt: skip
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    config |= {"vision_config": vision, **dict(zip(names, tokens, strict=True)), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 1024, "longest_edge": 1 << 24}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    _append(folder / "model.safetensors", _tower(out))
    return folder


def engine(folder: Path, **options: Any) -> Path:
    """An engine of it for the CPU, in `folder`, which is built where it is not there."""
    if not (folder / "engine" / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = Options(target="cpu", max_image_pixels=MOST_PIXELS, **options)
        build(write(folder / "checkpoint"), folder / "engine", made, lambda text: None)
    return folder / "engine"


def _reserve(path: Path) -> list[int]:
    """Renames the last three words of the vocabulary to WORDS; their ids."""
    found = json.loads(path.read_text())
    vocab, merges = found["model"]["vocab"], found["model"]["merges"]
    last = sorted(vocab, key=vocab.__getitem__)[-len(WORDS) :]
    ids = [vocab.pop(word) for word in last]
    whole = ["".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in merges]
    found["model"]["merges"] = [
        m for m, word in zip(merges, whole, strict=True) if word not in last
    ]
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    rows = found["added_tokens"]
    for i, word in zip(ids, WORDS, strict=True):
        rows.append({"id": i, "content": word, **how, "special": True})
    found["added_tokens"] = sorted(rows, key=lambda row: row["id"])
    path.write_text(json.dumps(found))
    return ids


def _tower(out: int) -> dict[str, np.ndarray]:
    rng, wide = np.random.default_rng(1), 4 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (HIDDEN, 3, 2, 16, 16),
        "merger.linear_fc1": (wide, wide),
        "merger.linear_fc2": (out, wide),
    }
    norms = ["merger.norm"]
    for i in range(DEPTH):
        norms += [f"blocks.{i}.norm1", f"blocks.{i}.norm2"]
        shapes |= {
            f"blocks.{i}.attn.qkv": (3 * HIDDEN, HIDDEN),
            f"blocks.{i}.attn.proj": (HIDDEN, HIDDEN),
            f"blocks.{i}.mlp.linear_fc1": (WIDE, HIDDEN),
            f"blocks.{i}.mlp.linear_fc2": (HIDDEN, WIDE),
        }
    made = {"pos_embed.weight": rng.normal(0, 0.02, (SIDE**2, HIDDEN))}
    for name, shape in shapes.items():
        made[f"{name}.weight"] = rng.normal(0, np.prod(shape[1:]) ** -0.5, shape)
        made[f"{name}.bias"] = np.zeros(shape[0])
    for name in norms:
        made |= {f"{name}.weight": np.ones(HIDDEN), f"{name}.bias": np.zeros(HIDDEN)}
    return {f"model.visual.{name}": array.astype(np.float32) for name, array in made.items()}


def _append(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Adds f32 tensors to a file of safetensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head, end = json.loads(data[8:start]), len(data) - start
    for name, array in tensors.items():
        place = [end, end := end + array.nbytes]
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    parts = (len(text).to_bytes(8, "little"), text, data[start:])
    path.write_bytes(b"".join([*parts, *(array.tobytes() for array in tensors.values())]))


if __name__ == "__main__":
    print(engine(Path(sys.argv[1])))
