"""Plots a bench's result by matplotlib: the distribution of latencies, and the course of the runs.

Knows the result's form. A picture is a PNG file, or an SVG within an HTML page.
"""

import io
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from spark_engine.bench.load import Json
from spark_engine.errors import OptionError
from spark_engine.hints import extra

STYLE = "body { font: 14px sans-serif; margin: 24px; } td { padding: 2px 14px 2px 0; }"


def save(result: Json, path: Path) -> None:
    """Writes `path`, which must end in .html or .png. Raises OptionError if not."""
    if check(path) == ".png":
        _figure(result).savefig(path, dpi=120)
    else:
        path.write_text(html(result), encoding="utf-8")


def check(path: Path) -> str:
    """The kind of picture. Raises OptionError if it is unknown or matplotlib is missing."""
    kind = path.suffix.lower()
    if kind not in (".html", ".png"):
        raise OptionError(f"--plot {path}: the name must end in .html or .png")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        words = f"matplotlib is not installed: {extra('bench')}"
        raise OptionError(f"--plot {path}: {words}") from None
    return kind


def html(result: Json) -> str:
    """One self-contained page."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{_short(v[0])}</td><td>{_short(v[1])} to {_short(v[2])}"
        "</td></tr>"
        for name, v in result["spread"].items()
    )
    drawn = io.StringIO()
    _figure(result).savefig(drawn, format="svg")
    picture = drawn.getvalue()
    head = escape(f"{result['model']}: {result['load']}, {len(result['runs'])} runs")
    return (
        f"<!doctype html><meta charset='utf-8'><title>{head}</title><style>{STYLE}</style>"
        f"<h2>{head}</h2><p>{escape(result['command'])}</p>{picture[picture.index('<svg') :]}"
        f"<table><tr><td></td><td>median</td><td>least to most</td></tr>{rows}</table>\n"
    )


def _figure(result: Json) -> Any:
    """The plots, with a curve for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"{result['model']}: {result['load']}")
    ttft, itl, course, flight = figure.subplots(2, 2).ravel()
    for i, run in enumerate(result["runs"], 1):
        for axis, name in ((ttft, "ttft"), (itl, "itl")):
            if run[name]:
                axis.plot(run[name]["curve"], range(101), label=f"run {i}")
        sent, waited = ([row[column] for row in run["each"]] for column in (2, 3))
        course.plot(sent, waited, ".", label=f"run {i}")
        flight.step(*running(run), where="post", label=f"run {i}")
    for axis, title, x, y in (
        (ttft, "Time to the first token", "ms", "% of them within"),
        (itl, "Time between events", "ms", "% of them within"),
        (course, "First tokens over the run", "s, when it was sent", "ms"),
        (flight, "Requests in flight", "s", "requests"),
    ):
        axis.set(title=title, xlabel=x, ylabel=y, xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def running(run: Json) -> tuple[list[float], list[int]]:
    """(seconds, requests in flight from then on)."""
    changes = sorted([(r[2], 1) for r in run["each"]] + [(r[4], -1) for r in run["each"]])
    return [0.0, *(at for at, _ in changes)], [0, *accumulate(change for _, change in changes)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
