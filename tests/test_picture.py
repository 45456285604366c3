"""docs/way.svg is what today's sources, checkpoint and engine make; its parts, by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native.launches import Launched  # noqa: E402
from tests.builder.empty_cubins import built  # noqa: E402
from tests.repository import ROOT  # noqa: E402

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import picture, svg  # noqa: E402


def test_the_picture_is_current(tmp_path: Path) -> None:
    drawn = picture.draw(built(tmp_path))
    assert picture.PICTURE.read_text() == drawn, f"make it anew: {picture.__doc__}"
    root = ElementTree.fromstring(drawn)
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"decode_b1.engine", "round_rows", "sample", "accept_drafts"} <= set(words)


def launch(node: str, op: str, *operands: tuple[str, str]) -> Launched:
    return Launched(node, op, "t", op, f"{op}.cu", (1, 1, 1), (1, 1, 1), operands)


def test_like_layers_are_shown_once() -> None:
    found = [
        launch("embed", "embed", ("weight", "table")),
        launch("layers.0.y", "a", ("weight", "layers.0.w")),
        launch("layers.1.y", "b", ("weight", "layers.0.v"), ("state", "s")),
        launch("layers.1.y", "b"),
        *(launch("layers.1.z", "a"), launch("layers.2.y", "b", ("weight", "layers.1.v"))),
        launch("layers.2.y", "b"),
        launch("last", "a"),
    ]
    nodes = picture.nodes_of(found)
    assert [(n.number, n.layer) for n in nodes] == [
        *((0, None), (1, 0), (2, 0), (4, 1), (5, 1), (7, None))
    ]
    assert nodes[2].kinds == {"weight", "state"}
    parts = picture.parts_of(nodes)
    assert [p.title for p in parts] == ["", "layer 0; alike: 1", ""]


def test_a_weight_is_traced_to_what_it_is_joined_from() -> None:
    stored = {f"m.layers.0.{n}.weight": {"shape": [2, n == "b"]} for n in ("a", "b", "cc", "c")}
    assert picture.sources_of("layers.0.c+a.weight:op", stored) == [
        *("m.layers.0.c.weight", "m.layers.0.a.weight")
    ]
    assert picture.sources_of("layers.0.a+d.weight:op", stored) == []
    assert picture.sources_of("layers.0.a+c.weight", stored) == [], "it is not packed"
    reads = [("weight", "layers.0.a+c.weight:op"), ("weight", "layers.0.a+b.weight:op")]
    found = [launch("n", "op", reads[0]), launch("n", "op", reads[1]), launch("m", "op", reads[1])]
    assert picture.joined_weight(found, stored) == (1, "layers.0.a+b.weight:op")


class Loop:
    def step(self) -> None:
        self._last(self.first(self))  # type: ignore[attr-defined]
        print(self)


def build(clock: object) -> None:
    clock.start("one", "words")  # type: ignore[attr-defined]
    clock.start("two")  # type: ignore[attr-defined]
    clock.seconds()  # type: ignore[attr-defined]


def test_stages_are_read_from_the_code() -> None:
    assert picture.calls(Loop.step, "self") == ["first", "last"]
    assert picture.stages(build) == ["one", "two"]


def test_every_colour_is_told_for_light_and_dark() -> None:
    light, dark = svg.STYLE.split("@media", 1)
    for name in (*svg.KINDS, "muted", "ground", "ink", "line", "card", "layer"):
        assert f"--{name}: #" in light and f"--{name}: #" in dark.split("text {")[0]
