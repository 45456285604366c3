"""Plots a bench's result: the distribution of latencies, and the course of the runs.

Knows the result's form, SVG within HTML, and, for a PNG alone, matplotlib.
"""

from html import escape
from pathlib import Path

from spark_engine.bench.load import Json
from spark_engine.errors import OptionError
from spark_engine.hints import extra

Curve = tuple[str, list[float], list[float]]  # name, x, y
Panel = tuple[str, str, str, list[Curve], bool]  # title, x, y, curves, dots instead of lines
COLOURS = ("#2563c9", "#c2570c", "#15803d", "#8b3fc0", "#b91c1c", "#0e7490")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 300, 56, 44, 36
TICKS = 5
STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #1f2933; background: #ffffff; }
svg { margin: 0 16px 16px 0; } text { font: 11px system-ui, sans-serif; fill: #1f2933; }
table { border-collapse: collapse; } td { padding: 2px 14px 2px 0; }
@media (prefers-color-scheme: dark) { body { color: #e3e9f0; background: #0f1620; }
  text { fill: #e3e9f0; } }
"""


def save(result: Json, path: Path) -> None:
    """Writes `path`, which must end in .html or .png. Raises OptionError if not."""
    kind = check(path)
    if kind == ".html":
        path.write_text(html(result), encoding="utf-8")
    else:
        _png(result, path)


def check(path: Path) -> str:
    """The kind of picture. Raises OptionError if it is unknown or matplotlib is missing."""
    kind = path.suffix.lower()
    if kind not in (".html", ".png"):
        raise OptionError(f"--plot {path}: the name must end in .html or .png")
    if kind == ".png":
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            words = f"matplotlib is not installed: {extra('bench')}, or"
            raise OptionError(f"--plot {path}: {words} name it .html") from None
    return kind


def panels(result: Json) -> list[Panel]:
    """The plots, with a curve for each run."""
    share = [float(i) for i in range(101)]
    found: list[Panel] = []
    for name, words in (("ttft", "to the first token"), ("itl", "between events")):
        curves = [
            (f"run {i}", list(run[name]["curve"]), share)
            for i, run in enumerate(result["runs"], 1)
            if run[name]
        ]
        found.append((f"Time {words}", "ms", "% of them within", curves, False))
    dots = [
        (f"run {i}", [row[2] for row in run["each"]], [row[3] for row in run["each"]])
        for i, run in enumerate(result["runs"], 1)
    ]
    found.append(("First tokens over the run", "s, when it was sent", "ms", dots, True))
    steps = [(f"run {i}", *_running(run)) for i, run in enumerate(result["runs"], 1)]
    found.append(("Requests in flight", "s", "requests", steps, False))
    return found


def html(result: Json) -> str:
    """One self-contained page."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{_short(v[0])}</td><td>{_short(v[1])} to {_short(v[2])}"
        "</td></tr>"
        for name, v in result["spread"].items()
    )
    head = f"{result['model']}: {result['load']}, {len(result['runs'])} runs"
    pictures = "".join(map(_svg, panels(result)))
    return (
        f"<!doctype html><meta charset='utf-8'><title>{escape(head)}</title><style>{STYLE}</style>"
        f"<h2>{escape(head)}</h2><p>{escape(result['command'])}</p>{pictures}"
        f"<table><tr><td></td><td>median</td><td>least to most</td></tr>{rows}</table>\n"
    )


def _running(run: Json) -> tuple[list[float], list[float]]:
    changes = sorted([(r[2], 1) for r in run["each"]] + [(r[4], -1) for r in run["each"]])
    xs, ys, now = [0.0], [0.0], 0
    for when, change in changes:
        xs += [when, when]
        ys += [float(now), float(now + change)]
        now += change
    return xs, ys


def _svg(panel: Panel) -> str:
    title, x_name, y_name, curves, dots = panel
    most_x = max((max(c[1]) for c in curves if c[1]), default=1.0) or 1.0
    most_y = max((max(c[2]) for c in curves if c[2]), default=1.0) or 1.0
    wide, high = WIDTH - LEFT - 12, HEIGHT - BOTTOM - TOP

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * x / most_x, TOP + high * (1 - y / most_y)

    parts = [f'<text x="{LEFT}" y="14" font-weight="600">{escape(title)}</text>']
    for i in range(TICKS + 1):
        x, y = place(most_x * i / TICKS, most_y * i / TICKS)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#8884" fill="none"/>')
        parts.append(_text(LEFT - 6, y + 4, _short(most_y * i / TICKS), "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, _short(most_x * i / TICKS), "middle"))
    parts.append(_text(LEFT + wide / 2, HEIGHT - 8, x_name, "middle"))
    parts.append(_text(4, TOP - 3, y_name, "start"))
    for number, (name, xs, ys) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = [place(x, y) for x, y in zip(xs, ys, strict=True)]
        if dots:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in points
            ]
        else:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts.append(
            f'<text x="{LEFT + 60 * number + 220}" y="14" style="fill:{colour}">{name}</text>'
        )
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _png(result: Json, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"{result['model']}: {result['load']}")
    axes = figure.subplots(2, 2).ravel()
    for axis, (title, x_name, y_name, curves, dots) in zip(axes, panels(result), strict=True):
        for name, xs, ys in curves:
            axis.plot(xs, ys, "." if dots else "-", label=name)
        axis.set(title=title, xlabel=x_name, ylabel=y_name, xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
