"""docs/way.svg: the way of a weight from checkpoint to launch, and of a token through the loop.

`spark-build models/tiny/checkpoint -o engines/tiny --target sm_90a --no-timing --decode 1,32
--prefill 128 --max-seqs 32 --max-context 256`, then `python -m benchmarks.picture engines/tiny`.
Everything that is named is read: stages from the sources, tensors, buckets and launches from the
checkpoint and the engine. Knows what is shown where, and no stage, op or tensor by name.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.svg import Canvas
from spark_engine import interface
from spark_engine.builder import build
from spark_engine.builder.native.launches import Launched, launches
from spark_engine.engine_file import read_engine, read_manifest
from spark_engine.manifest import WEIGHTS, Manifest
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.step import Loop
from spark_engine.runtime.text.tokenizer import Detokenizer, Tokenizer

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "way.svg"
CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint" / "model.safetensors"
LAYER = re.compile(r"layers\.(\d+)\.")
NAMED = 3  # launches of one node whose kernels are named side by side


def calls(function: Callable[..., Any], receiver: str) -> list[str]:
    """The methods of `receiver` that a function calls, in the order they run, without `_`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return [node.func.attr.lstrip("_") for node in _postorder(tree) if _calls(node, receiver)]


def _postorder(node: ast.AST) -> Iterator[ast.AST]:
    """Arguments before the call that takes them."""
    for child in ast.iter_child_nodes(node):
        yield from _postorder(child)
    yield node


def _calls(node: ast.AST, receiver: str) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return ast.unparse(node.func.value).split(".")[0] == receiver


def stages(function: Callable[..., Any]) -> list[str]:
    """The stages that a build's clock is told of, in their order."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    told = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _calls(n, "clock") and n.args]
    told.sort(key=lambda node: node.lineno)
    return [str(ast.literal_eval(node.args[0])) for node in told]


@dataclass(frozen=True)
class Node:
    """One node's launches, the first one's number, and the layer whose weights it reads."""

    number: int
    launches: tuple[Launched, ...]
    layer: int | None

    @property
    def kinds(self) -> set[str]:
        """Kinds of its named operands."""
        return {kind for launch in self.launches for kind, _ in launch.operands}

    @property
    def key(self) -> tuple[object, ...]:
        """Alike in two layers that run the same."""
        return tuple((a.op, a.tactic, a.symbol) for a in self.launches)


def nodes_of(found: Sequence[Launched]) -> list[Node]:
    """Launches by node. A node without weights belongs where its name says."""
    nodes, number = [], 0
    for _, group in groupby(found, key=lambda launch: launch.node):
        held = tuple(group)
        names = [name for launch in held for kind, name in launch.operands if kind == "weight"]
        match = LAYER.match(next((n for n in names if LAYER.match(n)), held[0].node))
        nodes.append(Node(number, held, int(match[1]) if match else None))
        number += len(held)
    return nodes


@dataclass(frozen=True)
class Part:
    """Nodes of one layer, or outside of layers; `layers` are all that run the same."""

    nodes: tuple[Node, ...]
    layers: tuple[int, ...]

    @property
    def title(self) -> str:
        """Which layers these are."""
        if len(self.layers) < 2:
            return f"layer {self.layers[0]}" if self.layers else ""
        return f"layer {self.layers[0]}; alike: {', '.join(map(str, self.layers[1:]))}"


def parts_of(nodes: Iterable[Node]) -> list[Part]:
    """The bucket in its order, each kind of layer once."""
    found: dict[tuple[object, ...], Part] = {}
    for layer, group in groupby(nodes, key=lambda node: node.layer):
        held = tuple(group)
        key = (layer is None, *(node.key for node in held))
        known = found.get(key, Part(held, ()))
        found[key] = Part(known.nodes, (*known.layers, *(() if layer is None else (layer,))))
    return list(found.values())


def joined_weight(found: Sequence[Launched], stored: Mapping[str, Any]) -> tuple[int, str]:
    """The number of a launch that reads a weight joined from several, and the weight: the one
    with most bytes in the checkpoint, of equal ones the first."""
    weights = {
        name: (number, sum(math.prod(stored[s]["shape"]) for s in sources_of(name, stored)))
        for number, launch in reversed(list(enumerate(found)))
        for kind, name in launch.operands
        if kind == "weight" and len(sources_of(name, stored)) > 1
    }
    most = max(size for _, size in weights.values())
    return min((number, name) for name, (number, size) in weights.items() if size == most)


def sources_of(weight: str, stored: Iterable[str]) -> list[str]:
    """The checkpoint's tensors that a packed weight is joined from, by its name; else none."""
    plain, packed, _ = weight.partition(":")
    path, _, leaf = plain.rpartition(".")
    module, _, parts = path.rpartition(".")
    names = [f"{module}.{part}.{leaf}" for part in parts.split("+")]
    found = [s for name in names for s in stored if s.endswith(f".{name}")]
    return found if packed and len(found) == len(names) else []


def header_of(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name."""
    with path.open("rb") as file:
        return dict(json.loads(file.read(int.from_bytes(file.read(8), "little"))))


def draw(engine: Path) -> str:
    """The picture as SVG."""
    manifest = read_manifest(engine)
    bucket = manifest.buckets[0]
    found = launches(read_engine(engine / bucket.file).payload)
    stored = header_of(CHECKPOINT)
    number, weight = joined_weight(found, stored)
    canvas = Canvas(1180)
    canvas.title(40, "The way of a weight", "spark-build: once")
    canvas.title(400, bucket.file, f"one CUDA graph of {len(found)} launches, {manifest.target}")
    canvas.title(890, "The way of a token", "spark-run: every step")
    rows = _launches(canvas, 400, TOP, found)
    ends = rows[0], rows[len(found) - 1]
    leaves, left = _weight(canvas, 40, TOP, engine, manifest, stored, weight)
    right = _token(canvas, 890, TOP, found, [b.file for b in manifest.buckets], ends)
    y = next(y for at, y in sorted(rows.items(), reverse=True) if at <= number)
    canvas.arrow([(320, leaves), (360, leaves), (360, y), (394, y)], "weight")
    kept = set(found[0].operands) & set(found[-1].operands)
    states = ", ".join(name for kind, name in kept if kind == "state")
    canvas.arrow(
        [(844, ends[1] - 5), (857, ends[1] - 5), (857, ends[0] + 6), (846, ends[0] + 6)], "state"
    )
    canvas.upwards(861, sum(ends) // 2, states)
    bottom = max(left, right, ends[1] + 20) + 26
    canvas.legend(400, bottom, _KINDS)
    model = manifest.model
    caption = (
        f"The embedded model: {model.layers} layers of hidden size {model.hidden}, "
        f"{model.parameters:,} parameters. Made by {_path(Path(__file__))} from the sources, the "
        "checkpoint and the engine."
    )
    return canvas.svg(bottom + 44, caption)


TOP = 108
_KINDS = {"weight": "weights", "state": "states", "input": "steps and tables", "output": "outputs"}


def _launches(canvas: Canvas, x: int, y: int, found: Sequence[Launched]) -> dict[int, int]:
    """The bucket's launches; the height of each row by its first launch's number."""
    rows: dict[int, int] = {}
    for part in parts_of(nodes_of(found)):
        if part.title:
            y += 6
            canvas.text(x + 6, y + 12, part.title, "muted")
            y += 20
        top = y - 3
        for node in part.nodes:
            rows[node.number] = y + 8
            symbols = list(dict.fromkeys(a.symbol for a in node.launches))
            for i, kind in enumerate(_KINDS):
                if kind in node.kinds:
                    canvas.dot(x + 54 + 11 * i, y + 8, kind)
            last = node.number + len(node.launches) - 1
            numbers = f"{node.number}" if last == node.number else f"{node.number}–{last}"
            canvas.text(x + 42, y + 12, numbers, "small end")
            canvas.text(x + 102, y + 12, node.launches[0].op, "mono bold")
            canvas.text(x + 434, y + 12, ", ".join(symbols[:NAMED]), "mono muted end")
            y += 19
        canvas.box(x, top, 444, y - top, "layer" if part.layers else "plain", behind=True)
        y += 5
    rows[len(found) - 1] = max(rows.values())
    return rows


def _weight(
    canvas: Canvas,
    x: int,
    y: int,
    engine: Path,
    manifest: Manifest,
    stored: Mapping[str, Any],
    weight: str,
) -> tuple[int, int]:
    """Checkpoint, build, engine folder; where the weight leaves for its launch, and the end."""
    packed = header_of(engine / WEIGHTS)
    lines = [line for name in sources_of(weight, stored) for line in _named(name, stored[name])]
    y = canvas.card(x, y, 280, "checkpoint", f"{_count(stored)} tensors", lines)
    y = canvas.down(x + 140, y)
    y = canvas.chips(x, y, 280, _place(build.build)[1], stages(build.build))
    y = canvas.down(x + 140, y)
    lines = _named(weight, packed[weight])
    y = canvas.card(x, y, 280, WEIGHTS, f"{_count(packed)} tensors", lines)
    start, end = packed[weight]["data_offsets"]
    total = max(entry["data_offsets"][1] for entry in packed.values())
    words = f"bytes {start:,} to {end:,} of {total:,}"
    leaves = canvas.bar(x, y + 8, 280, start / total, end / total, words)
    others = [(name, "") for name in _files(manifest) if name != WEIGHTS]
    return leaves, canvas.card(x, leaves + 40, 280, "engine folder", "", others)


def _named(name: str, entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A tensor's name from its layer on, its last two parts on a line of their own; its form."""
    match = LAYER.search(name)
    words = (name[match.start() :] if match else name).split(".")
    form = f"{entry['dtype']} {' x '.join(map(str, entry['shape']))}"
    plain, packed, op = ".".join(words[-2:]).partition(":")
    lines = [".".join(words[:-2]) + ".", plain, packed + op]
    *first, last = filter(None, lines)
    return [*((line, "") for line in first), (last, form)]


def _files(manifest: Manifest) -> list[str]:
    """The folder's files, a folder in it once."""
    return list(dict.fromkeys(("manifest.json", *(f.split("/")[0] for f in manifest.files))))


def _token(
    canvas: Canvas,
    x: int,
    y: int,
    found: Sequence[Launched],
    files: list[str],
    ends: tuple[int, int],
) -> int:
    """Text to tokens, the loop, tokens to text."""
    width = 250
    y = canvas.card(x, y, width, "text in", "", [_place(Tokenizer.encode), _place(Engine.submit)])
    y = canvas.down(x + width // 2, y)
    names = calls(Loop.step, "self")
    steps = {s.name: s for family in interface.families(1) for s in interface.steps(family, 1)}
    held = {names[1]: [*steps], names[2]: files}
    held[names[-1]] = [name for kind, name in found[-1].operands if kind == "output"]
    heights = canvas.ring(x, y, width, _place(Loop.step), [(n, held.get(n, [])) for n in names])
    y = heights[-1] + 30
    way = [(x + 20, heights[2]), (x - 14, heights[2]), (x - 14, ends[0] - 4), (846, ends[0] - 4)]
    canvas.arrow(way, "input")
    way = [(844, ends[1]), (x - 14, ends[1]), (x - 14, heights[3]), (x + 20, heights[3])]
    canvas.arrow(way, "output")
    y = canvas.down(x + width // 2, y)
    return canvas.card(x, y, width, "text out", "", [_place(Detokenizer.push)])


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    """(`Loop.step`, `runtime/engine/step.py`)."""
    return function.__qualname__, _path(Path(inspect.getfile(function)))


def _path(path: Path) -> str:
    return path.resolve().relative_to(ROOT.resolve()).as_posix()


def _count(header: dict[str, Any]) -> int:
    return sum(not name.startswith((".pad", "__")) for name in header)


def main() -> None:
    """Writes the picture of the engine folder that is named."""
    PICTURE.write_text(draw(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
