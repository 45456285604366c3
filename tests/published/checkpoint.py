"""A layout: which modules have which scheme, what the files declare, where the tensors are.

`write` makes the folder; `Written` also has what an oracle needs: the numbers by transformers'
names, and the rounding of each module's input. Knows nothing of the package.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from tests.checkpoint_files import write_safetensors
from tests.published.networks import BF16, F32, Array, Json, Network, config_of, draw
from tests.published.schemes import SCHEMES, Round

Rows = Mapping[str, str]  # a pattern of module names to a scheme; the first that is found
Declare = Callable[[Mapping[str, str]], Json]  # from every module's scheme, "" for none
SINGLE = "model.safetensors"
# What stays f32 in the published files.
WIDE = ("A_log", "linear_attn.norm.weight")


@dataclass(frozen=True)
class Layout:
    """`declare` gives {"config": quantization_config, "hf": hf_quant_config.json}."""

    kind: str  # "dense", "moe" or "next"
    rows: Rows = field(default_factory=dict)
    declare: Declare = lambda schemes: {}
    text: bool = False  # a flat config; else the wrapper of the vision models
    fused: bool = False  # experts are 3-D tensors
    # Schemes of `mtp.*`; None: the files have no draft head.
    head: Rows | None = field(default_factory=dict)
    kv: str = ""  # an FP8 cache's scales, named as in "modelopt" or "ct"; "one": it has none
    head_file: str = SINGLE  # of `mtp.*`; by default with the others
    # To the text part of config.json, top: to its outer part.
    changes: Json = field(default_factory=dict)
    top: Json = field(default_factory=dict)


@dataclass
class Written:
    """A checkpoint before it is on a disk, so that a test may damage it."""

    network: Network
    config: Json
    others: dict[str, Json]  # further JSON files by name
    files: dict[str, dict[str, Array]]  # tensors by the file's name
    values: dict[str, F32]  # by transformers' names
    drafts: dict[str, F32]  # of the head, likewise
    rounds: dict[str, Round]  # by module; experts one by one
    kv: dict[int, tuple[float, float]]  # scales of K and V by layer; empty: the cache is exact

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        texts = self.others | {"config.json": self.config}
        if len(self.files) > 1:
            names = {name: file for file, tensors in self.files.items() for name in tensors}
            texts = {"model.safetensors.index.json": {"weight_map": names}} | texts
        for name, content in texts.items():
            if content is not None:
                (folder / name).write_text(json.dumps(content, indent=1))
        for name, tensors in self.files.items():
            write_safetensors(folder / name, tensors)
        return folder

    @property
    def tensors(self) -> dict[str, Array]:
        return self.files[SINGLE]


@lru_cache(maxsize=8)
def _drawn(config: str) -> Network:
    return draw(json.loads(config))


def make(layout: Layout) -> Written:
    config = config_of(layout.kind, layout.text, layout.changes) | layout.top
    config = {key: value for key, value in config.items() if value is not None}
    network = _drawn(json.dumps(config))
    schemes: dict[str, str] = {}
    rounds: dict[str, Round] = {}

    def store(numbers: dict[str, F32], rows: Rows) -> tuple[dict[str, Array], dict[str, F32]]:
        stored: dict[str, Array] = {}
        values = dict(numbers)
        for name, w in _split(numbers, layout.fused):
            module = name.removesuffix(".weight")
            scheme = schemes[module] = _scheme(rows, name, w)
            if not scheme:
                stored[name] = w.astype(np.float32 if name.endswith(WIDE) else BF16)
                continue
            packed = SCHEMES[scheme](w, module)
            stored |= {f"{module}.{suffix}": array for suffix, array in packed.stored.items()}
            _keep(values, name, packed.values)
            if packed.round is not None and not module.endswith("gate"):  # read unquantised
                rounds[module] = packed.round
        return stored, values

    stored, values = store(network.values, layout.rows)
    head, drafts = store({} if layout.head is None else network.head, layout.head or {})
    stem = "model." if layout.text or layout.kind == "next" else "model.language_model."
    kv = {1: (1.0, 1.0) if layout.kv == "one" else (0.02, 0.03)} if layout.kv else {}
    if layout.kv != "one":
        stored |= dict(_cache_scales(layout.kv, stem, kv))
    declared = layout.declare(schemes)
    if "config" in declared:
        config = config | {"quantization_config": declared["config"]}
    others = {"hf_quant_config.json": declared["hf"]} if "hf" in declared else {}
    files = {SINGLE: stored}
    files[layout.head_file] = files.get(layout.head_file, {}) | head
    files = {file: tensors for file, tensors in files.items() if tensors}
    return Written(network, config, others, files, values, drafts, rounds, kv)


def _split(values: Mapping[str, F32], fused: bool) -> Iterator[tuple[str, F32]]:
    """Fused experts as the published files name them one by one, unless they stay `fused`."""
    for name, w in values.items():
        parent, _, leaf = name.rpartition(".")
        if fused or leaf not in ("gate_up_proj", "down_proj"):
            yield name, w
            continue
        for e, rows in enumerate(w):
            halves = np.split(rows, 2) if leaf == "gate_up_proj" else [rows]
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(parts, halves, strict=True):
                yield f"{parent}.{e}.{part}.weight", matrix


def _keep(values: dict[str, F32], name: str, w: F32) -> None:
    """Writes a module's numbers under transformers' name."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        values[name] = w
        return
    parent, e, part = found[1], int(found[2]), found[3]
    fused = f"{parent}.down_proj" if part == "down" else f"{parent}.gate_up_proj"
    values[fused] = values[fused].copy() if not e and part != "up" else values[fused]
    half = values[fused].shape[1] // 2
    at = {"down": slice(None), "gate": slice(half), "up": slice(half, None)}[part]
    values[fused][e, at] = w


def _scheme(rows: Rows, name: str, w: F32) -> str:
    if w.ndim != 2 or not name.endswith(".weight") or "embed" in name:
        return ""
    module = name.removesuffix(".weight")
    return next((scheme for pattern, scheme in rows.items() if re.search(pattern, module)), "")


def _cache_scales(
    names: str, stem: str, scales: Mapping[int, tuple[float, float]]
) -> Iterator[tuple[str, Array]]:
    for layer, pair in scales.items():
        for side, scale in zip("kv", pair, strict=True):
            at = f"{side}_proj.{side}_scale" if names == "modelopt" else f"{side}_scale"
            shape = () if names == "modelopt" else (1,)
            yield f"{stem}layers.{layer}.self_attn.{at}", np.full(shape, scale, np.float32)
