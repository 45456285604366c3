"""Prints the report of a build, and an engine's manifest for `spark-inspect`, as tables.

Knows the manifest and its layout on a terminal; computes nothing that is not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from shlex import quote

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from spark_engine.manifest import NATIVE, SEQUENCE, Bucket, Manifest, bytes_of

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class BuildReport:
    """The outcome of a build; `built` is False if the engine was up to date."""

    manifest: Manifest
    built: bool
    seconds: dict[str, float]  # by stage
    peak_rss: int  # bytes, mapped files included
    notes: tuple[str, ...] = ()
    peak_anonymous: int = 0  # bytes that no file backs, the maximum while weights were written


def show_report(
    console: Console, report: BuildReport, folder: str, here: bool, text: bool = True
) -> None:
    """Prints the report of one build.

    `here`: its target is this machine's; `text`: the engine has a tokenizer.
    """
    last = _next(folder, text) if here else _elsewhere(folder, report.manifest.target)
    if not report.built:
        _say(console, f"{folder} is up to date: checkpoint, options and tools are unchanged")
        _say(console, last)
        return
    console.print(render(report.manifest))
    for note in report.notes:
        _say(console, f"note: {note}")
    total = sum(report.seconds.values())
    stages = ", ".join(f"{name} {secs:.1f} s" for name, secs in report.seconds.items())
    _say(
        console,
        f"built {folder} in {total:.1f} s ({stages}); peak memory {size(report.peak_rss)}, "
        f"mapped files included, {size(report.peak_anonymous)} without",
    )
    _say(console, last)


def _next(folder: str, text: bool) -> str:
    name = quote(folder)
    if not text:
        return (
            f"the checkpoint has no tokenizer.json, so the engine takes token ids only: `spark-run "
            f"{name} --prompt-ids 1,2,3`, or `spark-run {name} --serve` and /v1/completions; for "
            "text, put tokenizer.json into the checkpoint and build again"
        )
    return f"run it: `spark-run {name}` for a chat, `spark-run {name} --serve` for a server"


def _elsewhere(folder: str, target: str) -> str:
    return (
        f"this machine is not its target: copy {quote(folder)} to a machine with {target}, then "
        "`spark-run doctor FOLDER` there"
    )


def _say(console: Console, line: str) -> None:
    """Prints one line without wrapping or markup: paths may hold brackets."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def report_json(report: BuildReport) -> dict[str, object]:
    """The report as JSON values: `built`, `seconds`, `peak_rss`, `peak_anonymous`, …"""
    return {
        "built": report.built,
        "seconds": {name: round(secs, 3) for name, secs in report.seconds.items()},
        "peak_rss": report.peak_rss,
        "peak_anonymous": report.peak_anonymous,
        "notes": list(report.notes),
        "manifest": report.manifest.to_json(),
    }


def render(manifest: Manifest) -> RenderableType:
    parts = [_summary(manifest), _quantisation(manifest), _fusions(manifest), _buckets(manifest)]
    if manifest.refusals:
        parts.append(_refusals(manifest))
    return Group(*parts, _memory(manifest))


def size(nbytes: int) -> str:
    """`1.5 GiB`; exact below 1 KiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.2f} {UNITS[unit]}"


def _summary(m: Manifest) -> Table:
    ignored = ", ".join(f"{n} {part} tensors" for part, n in m.ignored.items() if n)
    limits, dtypes = m.limits, m.dtypes
    rows = [
        ("model", f"{m.model.model_type}, {m.model.layers} layers, hidden {m.model.hidden}"),
        ("parameters", f"{m.model.parameters:,}"),
        ("target", f"{m.target} ({m.executor})" + (f", card {m.card}" if m.card else "")),
        ("dtypes", f"activation {dtypes.activation}, KV {dtypes.kv}, state {dtypes.state}"),
        ("sequences", f"{limits.max_seqs} of up to {limits.max_context} tokens"),
        *([("rope", m.rope)] if m.rope != "default" else []),
        ("KV pages", f"{limits.pages} of {limits.page_size} tokens"),
        ("snapshots", _snapshots(m)),
        ("drafts", f"up to {limits.drafts} a round" if limits.drafts else "none"),
        *([("images", _images(m))] if m.vision else []),
        *([("ranks", _ranks(m))] if m.ranks > 1 else []),
        ("left out", ignored or "nothing"),
    ]
    return _table(f"engine {m.name}", ("", ""), rows)


def _ranks(m: Manifest) -> str:
    """The number of ranks and each one's share of the model."""
    own = ", ".join(f"{mine} of {all_} {what}" for what, (mine, all_) in m.shares.items())
    how = "; NCCL connects them (extra nccl)" if m.across_hosts else ""
    return f"{m.ranks}, each with {own}{how}"


def _images(m: Manifest) -> str:
    assert m.vision is not None
    return f"of up to {m.vision.most_pixels} pixels; {m.limits.image_rows} rows of them"


def _snapshots(m: Manifest) -> str:
    """The prefix cache's snapshots: their number and the bytes of one."""
    one = bytes_of(m.states, SEQUENCE)
    if not one:
        return "none: the model has no recurrent states"
    if m.executor == NATIVE:
        return f"of {size(one)}, as many as memory allows"
    return f"{m.limits.snapshots} of {size(one)}"


def _quantisation(m: Manifest) -> Table:
    """Modules grouped by their name within a layer."""
    rows = [(*kind, *map(str, counts)) for kind, counts in m.quantised_kinds.items()]
    return _table("stored as", ("module", "format", "modules", "tensors"), rows)


def _fusions(m: Manifest) -> Table:
    families = sorted(m.fusions)
    rules = dict.fromkeys(rule for family in families for rule in m.fusions[family])
    rows = [(r, *(str(m.fusions[f].get(r, 0)) for f in families)) for r in rules]
    return _table("fusions", ("rule", *families), rows)


def _refusals(m: Manifest) -> Table:
    rows = [(r.rule, r.node, r.reason) for r in m.refusals]
    return _table("fusions refused", ("rule", "at", "because"), rows)


def timed(m: Manifest) -> bool:
    """True if any node's time was measured; if not, the buckets' times are predictions."""
    return any(row["timed"] for row in m.tactics)


def _buckets(m: Manifest) -> Table:
    def row(b: Bucket) -> tuple[str, ...]:
        sizes = (size(b.arena_bytes), size(m.files[b.file].bytes))
        return b.file, str(b.rows), str(b.tokens), f"{b.cost_us:.0f}", *sizes

    columns = ("bucket", "rows", "tokens", "us" if timed(m) else "us, predicted", "arena", "file")
    return _table("buckets", columns, [row(b) for b in m.buckets])


def _memory(m: Manifest) -> Table:
    plan = m.memory
    parts = tuple(f.name for f in fields(plan))
    rows = [(k, size(getattr(plan, k))) for k in parts]
    title = "memory at run time" + (" of each rank" if m.ranks > 1 else "")
    return _table(title, ("", "bytes"), [*rows, ("total", size(plan.total))])


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
