"""`spark-bench` over the embedded model, served by `spark-run`: every kind of load, two agents.

    python -m tests.soak.served          a row each; exit code 1 where one is not as it should be

Some minutes on two cores. Nothing may fail, a profile must cover its steps, and from an agent's
second turn on only what is new is computed: what its turn before had is cached, but for the tile
that was not full and the tokens that the template writes differently once they are answered.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from spark_engine.runtime.offline.embedded import embedded_engine
from tests.repository import ROOT

TILE = 64
BEHIND = 2 * TILE  # tokens before a turn's end for which no state need be kept
# Else a new question takes the thoughts out of the answers before it, and all behind is new.
KEEP = '{"chat_template_kwargs": {"preserve_thinking": true}}'
SMALL = ("--input", "20-200", "--output", "4-24", "--repeats", "2", "--processes", "1")
Row = dict[str, Any]
LOADS: dict[str, tuple[str, ...]] = {
    "closed": ("--closed", "8", "--requests", "24", *SMALL),
    "random arrivals": ("--rate", "3", "--requests", "16", *SMALL),
    "staggered bursts": ("--bursts", "6", "--every", "2", "--stagger", "0.1", "--requests", "12",
                         *SMALL),
    "conversations": ("--closed", "4", "--requests", "6", "--turns", "3", "--shared", "130",
                      "--turn-input", "10-40", *SMALL),
    "text": ("--closed", "4", "--requests", "8", "--prompts", "text", *SMALL),
    "agents": ("--closed", "2", "--requests", "2", "--replay", str(ROOT / "bench" / "agent.json"),
               "--repeats", "1", "--warm", "0", "--processes", "1", "--body", KEEP),
}  # fmt: skip


def bench(engine: Path, words: tuple[str, ...], trace: Path) -> Row:
    """One bench's result."""
    command = [sys.executable, "-P", "-m", "spark_engine.bench.cli", "serve", "--json", "--wait"]
    done = subprocess.run(
        [*command, *words, str(engine), "--", "--profile", str(trace)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: Row = json.loads(done.stdout)
    return found


def faults(name: str, result: Row, trace: Row) -> list[str]:
    """What is not as it should be."""
    runs, engine = result["runs"], trace["otherData"]["engine"]
    wrong = [f"{run['errors']}" for run in runs if run["failed"]]
    if abs(sum(engine["parts_s"].values()) - engine["wall_s"]) > 0.01 * engine["wall_s"]:
        wrong.append(f"parts {engine['parts_s']} do not make {engine['wall_s']} s")
    if engine["shares"]["busy"] < 0.3:
        wrong.append(f"launches ran {engine['shares']['busy']:.0%} of the time")
    if name in ("agents", "conversations"):
        for before, after in zip(runs[0]["by_turn"], runs[0]["by_turn"][1:], strict=False):
            if after["cached_tokens"] < before["prompt_tokens"] - BEHIND:
                cached = f"{after['cached_tokens']:.0f} of {before['prompt_tokens']:.0f}"
                wrong.append(f"turn {after['turn'] + 1} had {cached} tokens before it cached")
    return wrong


def main() -> int:
    """How many rows were not as they should be."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        engine = embedded_engine(Path(folder), lambda text: print(text, flush=True))
        for name, words in LOADS.items():
            begin, trace = time.monotonic(), Path(folder) / "trace.json"
            result = bench(engine, words, trace)
            wrong = faults(name, result, json.loads(trace.read_text()))
            failed += bool(wrong)
            rate, first = (result["spread"][k][0] for k in ("output_tok_s", "ttft.p50"))
            took = time.monotonic() - begin
            mark = "BAD" if wrong else "ok "
            print(f"{mark} {name:18s} {rate:6.1f} tokens/s, {first:7.0f} ms first, {took:.0f} s")
            print("".join(f"      {words}\n" for words in wrong), end="", flush=True)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
