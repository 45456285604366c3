"""`--profile`: merges the traces of both processes into one file, and sums them up.

Knows the processes; a trace's format is in `runtime/engine/trace.py`.
"""

from typing import Any

from spark_engine.runtime.engine.trace import ENGINE, HTTP, merge

VIEWER = "ui.perfetto.dev"  # opens such files, as chrome://tracing does


def finish(file: str) -> str:
    """Merges the processes' traces into `file`; returns a summary."""
    found = merge(file, (ENGINE, HTTP))
    engine = found.get(ENGINE)
    if engine is None or not engine["steps"]:
        return f"profile: there was no step; {file} holds what else was done"
    shares = engine["shares"]
    lives = f" of {engine['lives']} lives of the engine" if engine["lives"] > 1 else ""
    words = f"profile: {engine['steps']} steps{lives} in {engine['wall_s']:.2f} s: launches ran "
    words += "{busy:.1%} of it, the host alone {host:.1%}, idle {idle:.1%}".format(**shares)
    lines = [words, f"  ms of a step: {_parts(engine['parts_s'], engine['steps'])}"]
    if HTTP in found:
        lines.append(f"  ms of HTTP for a step: {_parts(found[HTTP]['parts_s'], engine['steps'])}")
    if left := sum(row["spans_left_out"] for row in found.values()):
        lines.append(f"  the last {left} spans are counted here and not shown there")
    return "\n".join([*lines, f"  {file} shows each of them ({VIEWER})"])


def _parts(seconds: dict[str, Any], steps: int) -> str:
    rows = (f"{name} {1e3 * s / steps:.3f}" for name, s in seconds.items() if name != "idle")
    return ", ".join(rows) or "none"
