"""A canvas of boxes, lines and words that becomes SVG, readable on light and on dark pages.

Knows colours, fonts and distances; knows nothing of what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
svg { --ground: #ffffff; --ink: #1f2933; --muted: #66727f; --line: #c9d1d9; --card: #f6f8fa;
  --layer: #eef3fa; --weight: #2563c9; --state: #c2570c; --input: #15803d; --output: #8b3fc0; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0f1620; --ink: #e3e9f0; --muted: #97a3b0; --line: #364152; --card: #182230;
    --layer: #1b2a3f; --weight: #6ea8fe; --state: #f0975a; --input: #56c27d; --output: #c792ea; }
}
text { font-size: 13px; fill: var(--ink);
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.mono { font-size: 12px;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.small { font-size: 11px; fill: var(--muted); }
.muted { fill: var(--muted); }
.bold { font-weight: 600; }
.head { font-size: 19px; font-weight: 600; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.ground { fill: var(--ground); }
.card { fill: var(--card); stroke: var(--line); }
.plain { fill: none; stroke: var(--line); }
.layer { fill: var(--layer); stroke: var(--line); }
.chip { fill: var(--ground); stroke: var(--line); }
.arrow { fill: none; stroke-width: 1.6; }
"""
KINDS = ("weight", "state", "input", "output")  # each has a colour of its name
PAD = 12


class Canvas:
    """Shapes in the order they are drawn; those `behind` come first."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._behind: list[str] = []
        self._front: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """One line, its baseline at `y`."""
        self._front.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>')

    def title(self, x: int, words: str, below: str) -> None:
        """The head of a column."""
        self.text(x, 58, words, "head")
        self.text(x, 80, below, "muted")

    def box(self, x: int, y: int, width: int, height: int, style: str, behind: bool = True) -> None:
        """A rounded rectangle."""
        shapes = self._behind if behind else self._front
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" class="{style}"/>'
        )

    def dot(self, x: int, y: int, kind: str) -> None:
        """A small disc of a kind's colour."""
        self._front.append(f'<circle cx="{x}" cy="{y}" r="3.6" class="fill {kind}"/>')

    def arrow(self, points: Sequence[tuple[int, int]], kind: str = "muted") -> None:
        """A line with a tip, through right angles."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self._front.append(
            f'<path d="{path}" class="arrow {kind}" stroke-linejoin="round" '
            f'marker-end="url(#tip-{kind})"/>'
        )

    def upwards(self, x: int, y: int, words: str) -> None:
        """Words beside an upward line, on a ground of their own."""
        wide = round(6.6 * len(words)) + 12
        self.box(x - 12, y - wide // 2, 16, wide, "ground", behind=False)
        self._front.append(
            f'<text x="{x}" y="{y}" class="small middle" transform="rotate(-90 {x} {y})">'
            f"{escape(words)}</text>"
        )

    def down(self, x: int, y: int) -> int:
        """A short arrow downwards; where it ends."""
        self.arrow([(x, y + 3), (x, y + 21)])
        return y + 27

    def card(
        self, x: int, y: int, width: int, head: str, aside: str, lines: Iterable[tuple[str, str]]
    ) -> int:
        """A box with a head and pairs of words, each pair on two lines; its lower edge."""
        top = y
        y += 22
        self.text(x + PAD, y, head, "bold")
        self.text(x + width - PAD, y, aside, "small end")
        for words, below in lines:
            if words:
                y += 19
                self.text(x + PAD, y, words, "mono")
            if below:
                y += 15
                self.text(x + PAD, y, below, "small")
        y += PAD
        self.box(x, top, width, y - top, "card")
        return y

    def chips(self, x: int, y: int, width: int, head: str, names: Sequence[str]) -> int:
        """A box of short words in their order; its lower edge."""
        top, at = y, x + PAD
        self.text(x + PAD, y + 22, head, "bold")
        y += 34
        for name in names:
            wide = round(7.3 * len(name)) + 16
            if at + wide > x + width - PAD:
                at, y = x + PAD, y + 30
            self.box(at, y, wide, 22, "chip", behind=False)
            self.text(at + wide / 2, y + 15, name, "mono middle")
            at += wide + 8
        y += 22 + PAD
        self.box(x, top, width, y - top, "card")
        return y

    def bar(self, x: int, y: int, width: int, start: float, end: float, words: str) -> int:
        """A bar of which a part is filled; its middle."""
        first, long = x + round(start * width), max(round((end - start) * width), 5)
        self.box(x, y, width, 12, "chip", behind=False)
        self._front.append(
            f'<rect x="{first}" y="{y}" width="{long}" height="12" class="fill weight"/>'
        )
        self.text(x, y + 27, words, "small")
        return y + 6

    def ring(
        self,
        x: int,
        y: int,
        width: int,
        head: tuple[str, str],
        steps: Sequence[tuple[str, Sequence[str]]],
    ) -> list[int]:
        """Steps that follow one another and begin again; the middle of each."""
        top, middles = y, []
        self.text(x + PAD, y + 22, head[0], "mono bold")
        self.text(x + PAD, y + 38, head[1], "small")
        y += 52
        for i, (name, held) in enumerate(steps):
            lines = _wrapped(held, 24)
            height = 26 + 15 * len(lines)
            self.box(x + 24, y, width - 48, height, "chip", behind=False)
            self.text(x + 36, y + 17, name, "mono bold")
            for j, line in enumerate(lines):
                self.text(x + 36, y + 32 + 15 * j, line, "small")
            middles.append(y + 13)
            y += height
            if i < len(steps) - 1:
                self.arrow([(x + width // 2, y), (x + width // 2, y + 11)])
                y += 16
        right = x + width - 10
        self.arrow(
            [(x + width - 24, middles[-1]), (right, middles[-1]), (right, middles[0]),
             (x + width - 20, middles[0])]
        )  # fmt: skip
        self.box(x, top, width, y + PAD - top, "card")
        return [*middles, y + PAD - 30]

    def legend(self, x: int, y: int, kinds: Mapping[str, str]) -> None:
        """What the dots mean."""
        for kind, words in kinds.items():
            self.dot(x + 6, y, kind)
            self.text(x + 16, y + 4, words, "small")
            x += 38 + round(6.4 * len(words))

    def svg(self, height: int, caption: str) -> str:
        """The whole file."""
        self.text(40, height - 14, caption, "small")
        tips = "".join(
            f'<marker id="tip-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" class="fill {kind}"/></marker>\n'
            for kind in (*KINDS, "muted")
        )
        style = STYLE + "".join(
            f".arrow.{kind} {{ stroke: var(--{kind}); }} .fill.{kind} {{ fill: var(--{kind}); }}\n"
            for kind in (*KINDS, "muted")
        )
        lines = "\n".join((*self._behind, *self._front))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'role="img">\n<style>{style}</style>\n<defs>\n{tips}</defs>\n'
            f'<rect width="{self.width}" height="{height}" rx="10" class="ground"/>\n'
            f"{lines}\n</svg>\n"
        )


def _wrapped(words: Iterable[str], width: int) -> list[str]:
    """Words joined by commas, in lines of about so many characters."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 2 <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines
