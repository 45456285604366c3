"""Prints a bench's result: one table, and warnings.

Knows the result's form; measures nothing.
"""

from rich.console import Console
from rich.table import Table

from spark_engine.bench.load import Json

ROWS = (  # figure, label, digits
    ("requests_s", "requests/s", 2),
    ("output_tok_s", "output tokens/s", 1),
    ("total_tok_s", "tokens/s in and out", 1),
    ("steady_tok_s", "output tokens/s, middle of the run", 1),
    ("full_tok_s", "output tokens/s while all requests of a burst decode", 1),
    ("in_flight", "requests in flight, mean", 1),
    *((f"ttft.{p}", f"ms to the first token, {p}", 1) for p in ("p50", "p90", "p99")),
    *((f"itl.{p}", f"ms between events, {p}", 2) for p in ("p50", "p90", "p99", "max")),
    *((f"tpot.{p}", f"ms a token after the first, {p}", 2) for p in ("p50", "p99")),
    *((f"e2e.{p}", f"ms of a request, {p}", 0) for p in ("p50", "p99")),
)
GOODPUT = (("goodput_s", "requests/s within the targets", 2), ("good_share", "their share", 3))


def show(result: Json, console: Console) -> None:
    runs, spread = result["runs"], result["spread"]
    first = runs[0]
    words = f"{result['model']}: {first['requests']} requests, {result['load']}"
    table = Table(title=words, title_justify="left")
    table.add_column("")
    table.add_column("median" if len(runs) > 1 else "", justify="right")
    if len(runs) > 1:
        table.add_column("least", justify="right")
        table.add_column("most", justify="right")
    for name, label, digits in (*ROWS, *(GOODPUT if result["targets"] else ())):
        if name in spread:
            shown = [f"{value:,.{digits}f}" for value in spread[name]]
            table.add_row(label, *(shown if len(runs) > 1 else shown[:1]))
    console.print(table)
    if first["by_turn"][1:]:
        console.print(_turns(first["by_turn"]))
    for line in notes(result):
        console.print(line, style="yellow", markup=False, highlight=False)


def notes(result: Json) -> list[str]:
    """Warnings about the figures."""
    runs = result["runs"]
    failed = sum(run["failed"] for run in runs)
    found = []
    if len(runs) < result["repeats"]:
        found.append(f"cut off after {len(runs)} of {result['repeats']} runs")
    if failed:
        worst = next(error for run in runs for error in run["errors"])
        found.append(f"{failed} requests failed, e.g. {worst}")
    found += sorted({run["client"]["warning"] for run in runs if run["client"]["warning"]})
    if result["others"]:
        found.append(f"others compute on the card: {'; '.join(result['others'])}")
    for run in runs:
        for number, card in (run.get("cards") or {"": run["card"] or {}}).items():
            if "sm_mhz" not in card:
                continue
            low, mid, high = card["sm_mhz"]
            watts = card.get("watts", [0, 0, 0])
            name = f"card {number}" if len(run.get("cards", ())) > 1 else "card"
            found.append(f"{name}: {mid:.0f} MHz ({low:.0f} to {high:.0f}), {watts[1]:.0f} W")
    if runs[0]["cached_tokens"] is not None:
        share = runs[0]["cached_tokens"] / max(runs[0]["input_tokens"], 1)
        found.append(f"{share:.1%} of the prompts' tokens were cached")
    return found


def _turns(rows: list[Json]) -> Table:
    table = Table(title="by turn, first run", title_justify="left")
    for name in ("turn", "prompt tokens", "of them cached", "ms to the first token, p50"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (row["prompt_tokens"], row["cached_tokens"])
        table.add_row(
            str(row["turn"] + 1), *(f"{c:,.0f}" for c in cells), f"{row['ttft_p50_ms']:,.1f}"
        )
    return table
