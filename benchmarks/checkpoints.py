"""Which published checkpoint fits which machine, how fast it is there, and what was tested.

`python -m benchmarks.checkpoints` plans those of `benchmarks.published` that are served, without
their weights, and writes builder/checkpoint_list.json; `python -m benchmarks.performance` then
writes docs/models.md. Memory is what the builder's planner asks for, tokens a second are measured
rows of benchmarks/results/decode or predictions of `gb10.predict`. Measures nothing.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks import performance
from benchmarks.published import CHECKPOINTS, Published
from benchmarks.rehearsal.gb10 import calibration, predict
from benchmarks.rehearsal.gb10.calibration import Laws
from benchmarks.rehearsal.gb10.tables import rate
from benchmarks.weightless_plan import opened, options, plan_of
from spark_engine.builder.checkpoint_list import FILE
from spark_engine.builder.graph.lower import facts_of
from spark_engine.builder.plan import budget
from spark_engine.builder.plan.budget import Needs
from spark_engine.builder.plan.options import Options, resolve
from spark_engine.errors import CheckpointError, OptionError
from spark_engine.interface import DECODE
from spark_engine.kernel import CARDS, GB10, TARGETS, Target

CONTEXT = budget.MAX_CONTEXT
USERS = (1, 8)


def _of_memory(gib: int) -> Target:
    """A card that is no target: its memory alone counts."""
    return replace(GB10, card=replace(GB10.card, memory=gib << 30))


MACHINES = {  # the memory that a process may count on
    "Spark": GB10,
    "24 GB": _of_memory(23),
    "32 GB": _of_memory(31),
    "80 GB": CARDS["h100"],
    "141 GB": CARDS["h200"],
}
MEASURED = {
    "nvidia/Qwen3.6-27B-NVFP4": "qwen36-27b",
    "nvidia/Qwen3.6-35B-A3B-NVFP4": "qwen36-35b-a3b",
}
COMPILED = ("80b", "122b", "397b")  # where not timed, no GPU has run all kernels of these sizes
Json = dict[str, Any]


def sequences(target: Target, needs: Needs, pages_each: int) -> int:
    """How many of CONTEXT tokens fit at once, without a prefix cache."""
    fitting = (
        n
        for n in range(budget.MAX_SEQS, 0, -1)
        if budget.pages(target, needs, n, cache=0) >= n * pages_each
    )
    return next(fitting, 0)


@functools.cache
def timed() -> Mapping[tuple[str, int], performance.Row]:
    """The rows of layouts that were timed, by sequences; of both cards the H200's."""
    return {
        key: row for path in performance.LAYOUTS for key, row in performance.rows_of(path).items()
    }


def described(row: Published) -> Json | None:
    """What needs no graph of a checkpoint; None where it is not served."""
    try:
        model = opened(row.layout)
    except CheckpointError:
        return None
    facts = facts_of(model)
    given = Options(
        GB10.name, max_seqs=1, max_context=CONTEXT,
        draft_vocab="full", state_dtype="f32",  # a Spark's own defaults differ from the others'
    )  # fmt: skip
    plan = resolve(given, facts)
    limits = plan.limits
    needs = facts.needs(
        plan.precision, limits.page_size, limits.gdn_ring, limits.drafts, plan.draft
    )
    held = {n: sequences(t, needs, limits.pages_per_seq) for n, t in MACHINES.items()}
    speed = row.name in MEASURED or (row.layout, USERS[0]) in timed()
    tested = ["layout"]
    tested += ["ops"] if speed or not row.layout.startswith(COMPILED) else []
    tested += ["speed"] if speed else []
    return {
        "name": row.name,
        "weights": row.weights,
        "gb": round(needs.weights / 1e9, 1),
        "sequences": held,
        "drafts": limits.drafts,
        "tested": ", ".join(tested),
    }


def speeds(row: Published, known: Json, laws: Laws) -> Json:
    """The targets with a kernel for every node, and tokens a second."""
    found: list[Json] = []
    targets = []
    drafts = known["drafts"]
    rounds = ((1, drafts),) if drafts else None
    for target in TARGETS:
        sizes = {"decode": USERS, "prefill": (1024,), "verify": rounds, "drafts": drafts}
        wanted = options(target, **sizes, state_dtype="f32")
        try:
            plan = plan_of(row.layout, replace(wanted, max_seqs=max(USERS)))
        except OptionError:
            continue  # no kernel for its size
        targets.append(target)
        if target == GB10.name and known["sequences"]["Spark"]:
            users = {str(n): rate(n, predict.predicted(plan[DECODE, n], laws)["ms"]) for n in USERS}
            found.append({"card": "Spark", "how": "predicted", "users": users})
    return {"targets": targets, "speeds": found + measured(row)}


def measured(row: Published) -> list[Json]:
    """Tokens a second of a recorded row: of a default build where there is one, as in README."""
    known = [(performance.rows_of(performance.DEFAULT), MEASURED.get(row.name, ""))]
    for rows, name in (*known, (timed(), row.layout)):
        if (name, USERS[0]) in rows:
            each = {str(n): f"{rows[name, n]['decode_tok_s']:,.0f}" for n in USERS}
            card = "H200" if "H200" in rows[name, USERS[0]]["card"] else "H100"
            return [{"card": card, "how": "measured", "users": each}]
    return []


def main() -> None:
    machine, launches = predict.nearest(predict.LAUNCHES)
    laws, rows = calibration.laws_of(launches, machine), []
    for row in CHECKPOINTS:
        known = described(row)
        if known is None:
            print(f"{row.name}: not served")
            continue
        rows.append(known | speeds(row, known, laws))
        print(rows[-1], flush=True)
    whole = {"context": CONTEXT, "machines": list(MACHINES), "checkpoints": rows}
    FILE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
