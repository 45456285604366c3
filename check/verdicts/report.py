"""The result of a check: plain values, printed as tables or as JSON. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from spark_engine.check.verdicts.compare import Verdict

_WORST_IS_LEAST = ("cosine", "same")
# The meaning of each figure of the worst row (a token, a slot), in the order of columns.
LEGEND = {
    "rel_l2": "length of the difference, as a part of the reference's length",
    "scale": "part by which neighbouring columns are too large or too small beyond rounding",
    "cosine": "cosine of the angle to the reference; 1 is equal",
    "max_abs": "greatest difference of one value; it has no limit",
    "kl": "divergence of the next token's distribution from the reference's, in nats",
    "texts": "texts that were decoded greedily",
    "same": "texts that are equal to the reference's, every token of them",
    "tokens": "tokens of those texts",
    "flips": "rows that choose another token than the reference; each must be a near tie",
    "near_ties": "flips where the reference holds both tokens equally likely, within `tie`",
    "differ": "values that differ",
}
FIGURES = tuple(LEGEND)
# The relation of each figure to its limit.
_AT_LEAST = ("cosine",)
LIMITS = {
    "tie": "part of a row's range of logits within which two tokens are a near tie",
    "outliers": "share of rows that may be beyond the limits",
    "exact": "rel_l2 of results in f32",
    "coded": "rel_l2 of results in 8 or 4 bits",
    "noise": "relative rounding error of a value in 16 bits",
    "coded_noise": "the same in 8 or 4 bits",
}
MOST_FAILURES = 40  # shown for one level; the JSON holds all


@dataclass
class Finding:
    """One tensor or node over all launches: the worst figures, the first failure."""

    name: str
    kind: str = ""  # the kind that it is summarised under
    launches: int = 0
    passed: bool = True
    reason: str = ""
    where: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    module: str = ""  # of the checkpoint, if the finding is of a node

    rows: int = 0
    outliers: int = 0

    def add(self, verdict: Verdict, where: str) -> None:
        """Adds one launch's verdict; `settle` judges after the last."""
        self.launches += 1
        self.rows += verdict.rows
        self.outliers += verdict.outliers
        self._keep_worst(verdict.figures)
        if verdict.hard:
            self.passed = False
        if not verdict and not self.where:
            self.reason, self.where = verdict.reason, where

    def settle(self, share: float) -> None:
        """Fails if more than this share of the rows are outliers."""
        if self.outliers > share * self.rows:
            self.passed = False
            self.reason += f"; {self.outliers} of {self.rows} rows"
        if self.passed:
            self.reason = self.where = ""

    def merge(self, other: Finding) -> None:
        """Merges the worst figures of another finding that passed."""
        self._keep_worst(other.figures)
        self.rows += other.rows
        self.outliers += other.outliers

    def _keep_worst(self, figures: Mapping[str, float]) -> None:
        for key in FIGURES:
            if key in figures:
                worst = min if key in _WORST_IS_LEAST else max
                value = float(figures[key])
                self.figures[key] = worst(self.figures.get(key, value), value)


@dataclass
class Level:
    """One level of a check. `first`: the name of the first failure, or ""."""

    name: str
    reference: str
    thresholds: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)
    launches: int = 0
    first: str = ""

    def settle(self, name: Callable[[Finding], str], share: float) -> None:
        """Decides every finding; `first` becomes the name of the first that failed."""
        for finding in self.findings:
            finding.settle(share)
        self.first = next((name(f) for f in self.findings if not f.passed), "")

    @property
    def passed(self) -> bool:
        """Nothing in the level failed."""
        return all(f.passed for f in self.findings)


@dataclass
class CheckReport:
    engine: str
    against: str
    levels: list[Level] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every level passed."""
        return all(level.passed for level in self.levels)

    @property
    def first(self) -> str:
        """The name of the first divergence, from the most precise level that has one, or "".

        A node that fails alone is itself wrong; in a run, a failure may be inherited from an
        earlier node.
        """
        found = {level.name: level.first for level in self.levels if level.first}
        names = ("op", "layer", "model", "text", "record")
        return next((found[name] for name in names if name in found), "")

    @property
    def headlines(self) -> list[str]:
        """A sentence for each module with a node that differs when run alone, in the network's
        order."""
        reasons: dict[str, str] = {}
        for finding in (f for level in self.levels for f in level.findings):
            if finding.module and not finding.passed:
                kind = finding.kind.split()[-1]
                reasons.setdefault(finding.module, f"{finding.module}: {kind} {finding.reason}")
        return list(reasons.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        levels = [{**asdict(level), "passed": level.passed} for level in self.levels]
        top = {"engine": self.engine, "against": self.against, "passed": self.passed}
        return {**top, "first_divergence": self.first, "modules": self.headlines, "levels": levels}


def show(report: CheckReport, console: Console) -> None:
    """The modules that differ by themselves, tables of all levels, and a one-line verdict."""
    for line in report.headlines[:MOST_FAILURES]:
        console.print(f"[red]{line}")
    seen: set[str] = set()
    figures: dict[str, None] = {}
    limits: dict[str, None] = {}
    for level in report.levels:
        title = f"{level.name}: {level.launches} launches against {level.reference}"
        table = Table(title=title, title_justify="left", caption=_limits(level))
        table.caption_justify = "left"
        table.add_column("tensor or node", no_wrap=True)
        # the layer level shows everything that the model level shows
        rows = _summary(f for f in level.findings if not (f.passed and f.name in seen))
        seen |= {f.name for f in level.findings} if level.name in ("model", "layer") else set()
        columns = [key for key in FIGURES if any(key in finding.figures for _, finding in rows)]
        for key in columns:
            table.add_column(key, justify="right", no_wrap=True)
        table.add_column("verdict", min_width=12, overflow="fold")
        for name, finding in rows:
            cells = [_cell(finding.figures.get(key)) for key in columns]
            table.add_row(name, *cells, _verdict(finding))
        figures |= dict.fromkeys(columns)
        limits |= dict.fromkeys(level.thresholds)
        console.print(table)
    _show_legend(console, figures, limits)
    if report.passed:
        texts = [one for level in report.levels if level.name == "text" for one in level.findings]
        near = sum(finding.figures.get("near_ties", 0) for finding in texts)
        ties = f"; {near:.0f} tokens of texts differ at near ties, by rounding" if near else ""
        console.print(f"[green]{report.engine}: no divergence, all figures within limits{ties}")
    else:
        console.print(f"[red]{report.engine}: first divergence at {report.first}")


def _limits(level: Level) -> str:
    """The limits of a level's figures, as one line."""
    rows = [(key, value) for key, value in level.thresholds.items() if isinstance(value, float)]
    words = [f"{key} {'>=' if key in _AT_LEAST else '<='} {value:g}" for key, value in rows]
    return f"limits: {', '.join(words)}" if words else "limits: none, all must be equal"


def _show_legend(console: Console, figures: Iterable[str], limits: Iterable[str]) -> None:
    """Prints the meaning of the columns and limits that were shown."""
    console.print("Figures are those of the worst row:")
    for key in figures:
        console.print(f"  {key:<10} {LEGEND[key]}", highlight=False, soft_wrap=True)
    for key in limits:
        if key in LIMITS:
            console.print(f"  {key:<10} limit: {LIMITS[key]}", highlight=False, soft_wrap=True)


def _summary(findings: Iterable[Finding]) -> list[tuple[str, Finding]]:
    """Failures by name; the rest by kind, with the worst figures of the kind."""
    rows: list[tuple[str, Finding]] = []
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.passed:
            kinds.setdefault(finding.kind, []).append(finding)
        elif len(rows) < MOST_FAILURES:
            rows.append((finding.name, finding))
    for kind, members in kinds.items():
        total = Finding(kind)
        for member in members:
            total.merge(member)
        rows.append((f"{kind} ({len(members)})" if len(members) > 1 else kind, total))
    return rows


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.2g}"


def _verdict(finding: Finding) -> str:
    if finding.passed:
        few = f", {finding.outliers} of {finding.rows} rows are outliers"
        return f"[green]ok{few if finding.outliers else ''}"
    return f"[red]{finding.reason} ({finding.where})"
