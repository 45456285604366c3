"""What a GB10 should do, kernel by kernel. Predicted, not run there.

`python -m benchmarks.rehearsal.gb10.predict` plans the models of PLANNED for sm_121a without their
weights (`weightless_plan`) and predicts every launch: its latency, and the longest of its bytes at
243 GB/s, its operations at the rates that libraries reach on a GB10, and its multiprocessors' own
work in cycles (`card_model`). These, and the latency, are fitted to times of an H200
(`calibration`): from `benchmarks/results/rehearsal/launches.json.xz`, the rehearsal's (the sources
of sm_121a on 48 multiprocessors), else from `decode/decode_h200.json` there, with wgmma kernels
that a GB10 does not have, or `--from FILE` of `benchmarks.time_step`. `--out FILE` keeps the rows
that docs/results/predicted_gb10.md shows.

`--held-to FILE` predicts that H200, or its partition, instead, and prints by how much it errs for
each bucket of FILE: "seen" with laws fitted to all its buckets, "unseen" to all but that one.

Each time has two figures: that with DRAM, tensor cores and issue overlapped, as in good kernels,
and that with none of them overlapped; the truth is between them unless something delays a GB10
that does not delay an H200.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.rehearsal.gb10 import calibration
from benchmarks.rehearsal.gb10.calibration import Laws, Measured, node_times
from benchmarks.rehearsal.gb10.card_model import GB10, Machine, h200
from benchmarks.result_files import CONFIGS, MODELS, REHEARSED, RESULTS, read, write
from benchmarks.steps.launch_parts import DRAFT
from benchmarks.time_images import WORDS, with_tower
from benchmarks.weightless_plan import DRAFTS, ROWS, Bucket, Node, grouped, options, plan_of
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE, drafts_of, verify_family
from spark_engine.kernel import CARDS
from spark_engine.kernel import GB10 as GB10_TARGET
from spark_engine.kernel import H200 as H200_TARGET
from spark_engine.vision import VISION

KNOWN = RESULTS / "decode" / "decode_h200.json"
LAUNCHES = REHEARSED / "launches.json.xz"  # as `benchmarks.rehearsal --part layers` writes it
ACCEPTANCES = ((0.55, 0.5, 0.45), (0.8, 0.75, 0.7), (0.92, 0.88, 0.84))  # as `time_step` has them
PLANNED = (*MODELS, "27b:nvfp4-a4")  # the last: W4A4 layers, which an H200 cannot run as a GB10
IMAGES = (34 * 60, 32 * 32, 16 * 16)  # rows of images: the first of a screenshot of 1,920 x 1,088
DEFAULT_STATE = "f16"  # of a build for a GB10 without options
# A block drafter, the model that it is of, its drafts a round, and tokens that such a round brings.
DRAFTER = (CONFIGS / "qwen38-27b-dflash2", "27b:nvfp4-a4", 7, 4.4)
NARROW = "bf16"  # states of which decode alone is predicted, as many bytes as the default's, f16
OLDER = {"mlp_activations": "bf16"}  # of rows that do not say; as builds were by default
NEWER_RULES = {"gdn_prefill"}  # than runs without an op of that name
SLOWEST = 3
LIMIT = 0.10  # of a step that a prediction may err by
Row = dict[str, Any]


def learnt(path: Path) -> list[tuple[Machine, list[Measured]]]:
    """What a file of measurements says, by machine: of `time_step`, its runs or its rows."""
    found = read(path)
    if "runs" not in found:
        return [(h200(), list(_fitted_engines(found["rows"])))]
    by_machine: dict[int, tuple[Machine, list[Measured]]] = {}
    for run in found["runs"]:
        measured = calibration.of_launches(run, plan_of_run(run))
        machine = calibration.machine_of(run, measured)
        known, held = by_machine.setdefault(machine.sms, (machine, []))
        held += measured
        by_machine[machine.sms] = (max(known, machine, key=lambda m: m.dram_rate), held)
    return list(by_machine.values())


def plan_of_run(run: Mapping[str, Any]) -> calibration.Plan:
    """The plan of the engine that a run of `launch_times` has, of the GPU that it rehearsed
    if it did; tactics are the run's own where they differ."""
    card = CARDS.get(run["engine_card"].partition(" ")[0])
    target = card.name if card else run["target"]
    sizes: dict[str, list[int]] = {}
    for bucket in run["buckets"]:
        sizes.setdefault(bucket["family"], []).append(bucket["rows"])
    rounds = [(r, drafts_of(f)) for f, rows in sizes.items() for r in rows if drafts_of(f)]
    older = {"draft_vocab": "full"} if run["options"].get("drafts") else {}  # than the list
    given = OLDER | older | run["options"]
    given["decode"] = tuple(sizes.get(DECODE, [run["options"]["max_seqs"]]))
    given["prefill"] = tuple(PREFILL_TILE * r for r in sizes.get(PREFILL, [1]))
    given["verify"] = tuple(rounds)
    context = max((b["context"] for b in run["buckets"]), default=1024)
    model = run["model"] if (CONFIGS / run["model"]).is_dir() else run["config"]
    timed = {op for bucket in run["buckets"] for _, op, *_ in bucket["kinds"]}
    return plan_of(model, options(target, **given), context, NEWER_RULES - timed)


def _fitted_engines(rows: Iterable[Mapping[str, Any]]) -> Iterable[Measured]:
    """The rows of `time_step` with sums by part, of the engines that it describes."""
    for model in MODELS:
        mine = [r for r in rows if r["model"] == model and "parts_ms" in r]
        tokens = {r["prefill_split"]["tokens"] for r in mine if "prefill_split" in r}
        sizes = {"decode": tuple(r["npl"] for r in mine), "prefill": (1024, *sorted(tokens))}
        given = options(H200_TARGET.name, **sizes, verify=None, drafts=0, max_context=1536, **OLDER)
        yield from calibration.of_parts(mine, plan_of(model, given))


def nearest(path: Path) -> tuple[Machine, list[Measured]]:
    """The machine of a file that is nearest to a GB10 in multiprocessors, and its times."""
    return min(learnt(path), key=lambda found: abs(found[0].sms - GB10.sms))


def predicted(bucket: Bucket, laws: Laws, machine: Machine = GB10) -> Row:
    """One bucket's time in ms, its floor, and what bounds its nodes."""
    bounds: dict[str, float] = {}
    whole = apart = floor = moved = 0.0
    for node, count in grouped(bucket.nodes).items():
        times = node_times(node, laws, machine, bucket.prefills)
        whole, apart = whole + count * times.seconds, apart + count * times.apart
        floor += count * floor_of(node, machine)
        moved += count * node.amounts.cold
        bounds[times.bound] = bounds.get(times.bound, 0.0) + count * times.seconds
    return {
        "family": bucket.family,
        "rows": bucket.rows,
        "launches": sum(len(node.symbols) for node in bucket.nodes),
        "byte_floor_ms": _ms(moved / machine.dram_rate),
        "floor_ms": _ms(floor),
        "ms": _ms(whole),
        "apart_ms": _ms(apart),
        "bounds_ms": {name: _ms(s) for name, s in sorted(bounds.items())},
        "slowest": slowest(bucket, laws, machine),
        "untimed": untimed(bucket, laws, machine),
    }


def floor_of(node: Node, machine: Machine = GB10) -> float:
    """Seconds that no kernel is below: its bytes, or its operations at a library's rate."""
    rate = machine.rates.get(node.amounts.kind, math.inf)
    return max(node.amounts.cold / machine.dram_rate, node.amounts.ops / rate)


def slowest(bucket: Bucket, laws: Laws, machine: Machine = GB10) -> list[Row]:
    """The parts that take longest: equal nodes together."""
    rows: dict[tuple[str, str, str], Row] = {}
    for node, count in grouped(bucket.nodes).items():
        times = node_times(node, laws, machine, bucket.prefills)
        key = (node.label, node.op, node.tactic)
        row = rows.setdefault(key, {"ms": 0.0, "floor_ms": 0.0, "nodes": 0, "bound": times.bound})
        row["ms"] += count * times.seconds * 1e3
        row["floor_ms"] += count * floor_of(node, machine) * 1e3
        row["nodes"] += count
        row["measured"] = laws.exact(node, bucket.prefills)
    ordered = sorted(rows.items(), key=lambda pair: -pair[1]["ms"])[:SLOWEST]
    return [
        {"node": key[0], "op": key[1], "tactic": key[2]}
        | row
        | {name: round(row[name], 3) for name in ("ms", "floor_ms")}
        for key, row in ordered
    ]


def untimed(bucket: Bucket, laws: Laws, machine: Machine = GB10) -> list[Row]:
    """The kinds of kernel with an untimed tactic, the longest first: what their law is of instead
    (`BY` of `calibration`, or nothing), and their share of launches, bytes and time."""
    rows: dict[tuple[str, str, str], Row] = {}
    whole = {"launches": 0, "bytes": 0.0, "ms": 0.0}
    for node, count in grouped(bucket.nodes).items():
        seconds = node_times(node, laws, machine, bucket.prefills).seconds
        mine = {"launches": len(node.symbols), "bytes": node.amounts.cold, "ms": seconds * 1e3}
        key = (node.op, node.tactic, laws.fitted_by(node, bucket.prefills))
        kept = [whole]
        if not laws.exact(node, bucket.prefills):
            kept.append(rows.setdefault(key, dict.fromkeys(whole, 0)))
        for row in kept:
            row |= {name: row[name] + count * value for name, value in mine.items()}
    return [
        {"op": op, "tactic": tactic, "fitted_by": by, "ms": round(row["ms"], 3)}
        | {f"{name}_share": round(row[name] / (whole[name] or 1), 4) for name in whole}
        for (op, tactic, by), row in sorted(rows.items(), key=lambda pair: -pair[1]["ms"])
    ]


def rounds(plan: calibration.Plan, laws: Laws) -> list[Row]:
    """Tokens a second with drafts, of each number of rows and acceptance: the best of the k."""
    found = []
    for rows in ROWS:
        times = {0: calibration.step_seconds(plan[DECODE, rows], laws, GB10)}
        for k in DRAFTS:
            times[k] = calibration.step_seconds(plan[verify_family(k), rows], laws, GB10)
        for acceptance in ACCEPTANCES:
            rates = {k: rows * kept(acceptance, k) / seconds for k, seconds in times.items()}
            best = max(rates, key=lambda k: rates[k])
            row = {"rows": rows, "acceptance": list(acceptance), "k": best}
            row["round_ms"] = {str(k): _ms(seconds) for k, seconds in times.items()}
            row["tok_s"] = {str(k): round(rate, 1) for k, rate in rates.items()}
            found.append(row)
    return found


def default_rounds(model: str, laws: Laws) -> Iterator[Row]:
    """Rounds of one sequence as a GB10's default build has them, at the middle acceptance: of the
    draft head, and of the model's block drafter."""
    folder, drafted, most, tokens = DRAFTER
    built = [("draft head", None, max(DRAFTS), kept(ACCEPTANCES[1], max(DRAFTS)))]
    built += [("DFlash2", str(folder), most, tokens)] if model == drafted else []
    for name, drafter, k, brought in built:
        given = {"decode": (1,), "prefill": (64,), "verify": ((1, k),), "drafts": k}
        given |= {"drafter": drafter, "state_dtype": DEFAULT_STATE}
        plan = plan_of(model, options(GB10_TARGET.name, **given))
        whole = plan[verify_family(k), 1]
        own = replace(whole, nodes=tuple(n for n in whole.nodes if n.label.startswith(DRAFT)))
        row = {"drafter": name, "k": k, "tokens": round(brought, 2)}
        row["step_ms"] = _ms(calibration.step_seconds(plan[DECODE, 1], laws, GB10))
        yield predicted(whole, laws) | row | {"slowest_drafts": slowest(own, laws)}


def kept(acceptance: Sequence[float], k: int) -> float:
    """Tokens that a round of k drafts is expected to bring."""
    return 1 + sum(math.prod(acceptance[: i + 1]) for i in range(k))


def images(model: str, laws: Laws) -> Iterator[Row]:
    """The tower for one image of each of IMAGES, and the prefill of a prompt with it, which takes
    as long as that of a text."""
    tiles = [-(-(WORDS + rows + 2) // PREFILL_TILE) for rows in IMAGES]
    given = {"prefill": tuple(PREFILL_TILE * n for n in sorted(tiles)), "decode": (1,)}
    given |= {"verify": None, "drafts": 0, "max_seqs": 1, "max_image_pixels": max(IMAGES) << 10}
    with TemporaryDirectory() as folder:
        plan = plan_of(with_tower(model, Path(folder)), options(GB10_TARGET.name, **given))
    for rows, count in zip(IMAGES, tiles, strict=True):
        size = min(n for family, n in plan if family == VISION and n >= rows)
        text = predicted(plan[PREFILL, count], laws)
        more = {f"prefill_{name}": text[name] for name in ("floor_ms", "ms", "apart_ms")}
        yield predicted(plan[VISION, size], laws) | {"rows": rows} | more


def everything(laws: Laws) -> list[Row]:
    """The rows of the models: each bucket and rounds of drafts, and decode with narrow states."""
    found = []
    for model in PLANNED:
        plan = plan_of(model, options(GB10_TARGET.name, state_dtype="f32"))
        known = {"model": model, "state": "f32"}
        found += [known | predicted(bucket, laws) for bucket in plan.values()]
        found += [known | {"family": "rounds"} | row for row in rounds(plan, laws)]
        found += [known | row for row in images(model, laws)]
        found += [known | {"state": DEFAULT_STATE} | row for row in default_rounds(model, laws)]
        narrow = options(GB10_TARGET.name, state_dtype=NARROW, drafts=0, verify=None, prefill=(64,))
        found += [
            known | {"state": NARROW} | predicted(bucket, laws)
            for bucket in plan_of(model, narrow).values()
            if not bucket.prefills
        ]
    return found


def held_lines(path: Path) -> tuple[list[str], bool]:
    """What is printed of a file that the predictions are held to; whether all buckets are within
    LIMIT."""
    lines, good = [], True
    for machine, measured in learnt(path):
        lines.append(f"{machine.name}, {machine.dram_rate / 1e9:,.0f} GB/s drawn:")
        for row in calibration.held_to(measured, machine):
            lines.append(held_line(row))
            good = good and abs(row["seen_error"]) <= LIMIT
    return lines, good


def held_line(row: Mapping[str, Any]) -> str:
    unseen = row["unseen_error"]
    apart = "–" if unseen is None else f"{row['unseen_ms']:8.2f} ms ({unseen:+.1%})"
    model = f"{row['model']:15} " if "model" in row else ""
    return (
        f"  {model}{row['family']:10} {row['rows']:4} rows: measured {row['measured_ms']:8.2f} ms, "
        f"predicted {row['seen_ms']:8.2f} ms ({row['seen_error']:+.1%}), unseen {apart}"
    )


def line(row: Mapping[str, Any]) -> str:
    tokens = row["rows"] * (PREFILL_TILE if row["family"] == PREFILL else 1)  # or rows of an image
    parts = ", ".join(
        f"{s['node']} {s['ms']:.1f} of {s['floor_ms']:.1f} ({s['bound']})" for s in row["slowest"]
    )
    return (
        f"{row['model']:15} {row['state']:5} {row['family']:10} {row['rows']:4} rows: floor "
        f"{row['floor_ms']:8.1f}, {row['ms']:8.1f} ms ({row['apart_ms']:.1f} apart), "
        f"{tokens / row['ms'] * 1e3:8,.1f} tok/s; {parts}"
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = LAUNCHES if LAUNCHES.is_file() else KNOWN
    parser.add_argument("--from", dest="source", type=Path, default=default, help="measured times")
    parser.add_argument("--held-to", type=Path, help="predict what was measured there instead")
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args(words)
    for option, path in (("--from", args.source), ("--held-to", args.held_to)):
        if path and not path.is_file():
            parser.error(f"{option} {path}: no such file; `time_step --per-launch` makes one")
    if args.held_to:
        lines, good = held_lines(args.held_to)
        print("\n".join(lines))
        raise SystemExit(0 if good else f"a bucket is off by more than {LIMIT:.0%}")
    machine, measured = nearest(args.source)
    laws = calibration.laws_of(measured, machine)
    rows = everything(laws)
    print("GB10, decode at 1,024 tokens of context: predicted, not run.\n")
    for row in rows:
        if "slowest" in row:
            print(line(row), flush=True)
    if args.out:
        head = {"machine": machine.name, "source": args.source.name, "commit": args.commit}
        held = calibration.held_to(measured, machine)
        whole = {**head, "date": str(date.today()), "held": held, "rows": rows}
        write(args.out, whole)


if __name__ == "__main__":
    main()
