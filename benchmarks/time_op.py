"""How long each tactic of an op takes, at the shapes it has in the published models or its cases.

`python -m benchmarks.time_op linear,fp8_linear --at decode:1,decode:128,prefill:2048` times every
tactic that takes a node of these ops in the engines of `--models`, as a build times tactics (cold
weights and states, replayed graphs), in `--rounds` that take turns: microseconds, the least of the
rounds, and next to them the floor: bytes at the card's bandwidth or products at its rate, whichever
is longer (`node_work`). A line per shape, with the node's name and how many equal nodes there are.
`all` names every op; models are folders of `configs/` or layouts such as `35b-a3b:int4`
(`published.py`). `--behind N`: of each prompt N tokens were prefilled before; `--context N`: decode
rows have N tokens behind them; `--tp N`: the nodes of one of N ranks; sums are timed on N GPUs at
once. `--cases` takes the ops' declared benchmark cases instead (`Case.bench`). Launches of drafts
from the text: `match_drafts,store_ids --draft-suffix 6 --at verify_k3:8 --context 32768`.

`--predict` needs no GPU: the floors, and the costs by which a build without timing would choose,
for `--card`. With SPARK_REHEARSE=sm_121a kernels of a GB10 run on 48 multiprocessors of a Hopper
GPU. `--out FILE` keeps all times as JSON.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.graphs import target_here
from benchmarks.node_work import amounts
from benchmarks.published import folder_of
from benchmarks.result_files import MODELS, commit_here, write
from benchmarks.weightless_plan import decided_of, label_of, options, work_of
from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.gpu_timer import GpuTimer, this_machine
from spark_engine.builder.native.tactics import CONTEXT, Work
from spark_engine.interface import PREFILL, PREFILL_TILE, drafts_of
from spark_engine.kernel import CARDS, Plan, Tactic, Target
from spark_engine.op import Case, Op
from spark_engine.operand import Role
from spark_engine.plugins.registry import OPS, REGISTRY, STANDARD
from spark_engine.plugins.tuning.recorded import op_of
from tests.plugins import cuda_node

AT = "decode:1,decode:8,decode:32,decode:128,prefill:1024,prefill:8192"
RATES = {"bf16": 1.0, "e4m3": 2.0, "nvfp4": 4.0}  # products a second, over bf16's
L2_BYTES = 50e6  # of which an activation may take half before it counts as DRAM traffic
COLD = (Role.WEIGHT, Role.SCALE, Role.STATE)
Times = Mapping[str, Sequence[float]]  # microseconds of each round, by tactic
Pairs = list[tuple[Tactic, Plan]]


@dataclass(frozen=True)
class Shape:
    """Equal nodes: `label` names where the first of `count` is; `tokens` of its bucket."""

    label: str
    work: Work
    count: int = 1
    tokens: int = 0


def sizes_of(text: str) -> dict[str, tuple[int, ...]]:
    """`decode:1,prefill:2048` as numbers by family. Raises ArgumentTypeError for anything else."""
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split(","):
        family, given, number = word.partition(":")
        if not given or not number.isdigit():
            raise argparse.ArgumentTypeError(f"{word} is neither FAMILY:ROWS nor prefill:TOKENS")
        found[family] = (*found.get(family, ()), int(number))
    return found


def shapes(
    models: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    target: Target,
    ops: set[str],
    behind: int = 0,
    context: int = CONTEXT,
    **given: Any,
) -> Iterator[Shape]:
    """The different nodes of these ops in the models' buckets; `given` are options of the build."""
    rounds = tuple((n, drafts_of(f)) for f, ns in sizes.items() for n in ns if drafts_of(f))
    decode, prefill = (tuple(sizes.get(f, (n,))) for f, n in (("decode", 1), (PREFILL, 1024)))
    most = max((k for _, k in rounds), default=0)
    rows = max((*decode, *(n for n, _ in rounds)))
    wanted = {"decode": decode, "prefill": prefill, "verify": rounds or None, "drafts": most}
    longest = max(8192, behind + max(prefill), context) + 1024
    wanted |= {"max_context": longest, "kv_tokens": max(163_840, rows * context + longest)}
    for model in models:
        asked = options(target.name, gpu=target, max_seqs=rows, **wanted | given)
        for decided in decided_of(model, asked):
            size = decided.size
            number = size.rows * (PREFILL_TILE if size.family == PREFILL else 1)
            if number not in sizes.get(size.family, ()):
                continue
            there = behind + number if size.family == PREFILL else context
            found: dict[tuple[object, ...], tuple[str, Work, int]] = {}
            for node, _ in decided.nodes:
                if node.op in ops:
                    work = work_of(node, size, there)
                    first, _, count = found.get(work.key, (label_of(node.name), work, 0))
                    found[work.key] = first, work, count + 1
            for name, work, count in found.values():
                yield Shape(f"{model} {size.family}:{number} {name}", work, count, number)


def of_case(op: Op, case: Case) -> Shape:
    """A case as a node, its operands packed as kernels take them."""
    specs = cuda_node.specs_of(op, case.attrs, case.inputs(np.random.default_rng(0)))
    ins = cuda_node.packed_specs(op, case.attrs, specs)
    given = op.given(case.attrs)
    cold = frozenset(i for i, o in enumerate(given[: len(ins)]) if o.role in COLD)
    outs = op.infer(case.attrs, specs)
    return Shape(f"{op.name}: {case.label}", Work(op.name, op, case.attrs, ins, outs, cold))


def takers(work: Work, target: Target, names: Sequence[str] | None = None) -> Pairs:
    """The tactics that take the node, or those named, with their plans."""
    cuda = work.op.cuda if work.op is not None else STANDARD[work.name]
    able = [t for t in cuda.tactics if names is None or t.name in names]
    able = [t for t in able if t.refuse(work.attrs, work.ins, target) is None]
    return [(t, t.plan(work.attrs, work.ins, target)) for t in able]


def floor_of(work: Work, target: Target) -> tuple[float, str]:
    """Seconds that no kernel is below, and what asks for them: bytes or products."""
    moved = amounts(work)
    of_bytes = moved.dram(L2_BYTES) / target.bandwidth
    of_products = moved.ops / (target.bf16_flops * RATES[moved.kind]) if moved.kind else 0.0
    return max(of_bytes, of_products), "products" if of_products > of_bytes else "bytes"


def time_at(work: Work, plans: Pairs, target: Target, rounds: int, folder: Path) -> Times:
    """Microseconds of the tactics on this machine's GPU by round, every other one in reverse order;
    kernels are compiled into `folder` first."""
    jobs = nvrtc.jobs_of([(t.source, plan) for t, plan in plans])
    nvrtc.compile_all(jobs, target, folder, os.cpu_count() or 1)
    found: dict[str, list[float]] = {tactic.name: [] for tactic, _ in plans}
    for turn in range(rounds):
        known = folder / f"times_{turn}.json"
        known.unlink(missing_ok=True)  # of this round alone: a time that is known is not taken
        with GpuTimer(target, folder, known) as timer:
            for tactic, plan in plans[::-1] if turn % 2 else plans:
                if (seconds := timer(work, tactic, plan)) is not None:
                    found[tactic.name].append(round(seconds * 1e6, 2))
    return {name: us for name, us in found.items() if us}


def predicted(work: Work, plans: Pairs, target: Target) -> Times:
    """Microseconds by the tactics' own costs."""
    return {t.name: [round(t.cost(work.attrs, work.ins, target) * 1e6, 2)] for t, _ in plans}


def line(shape: Shape, times: Times, target: Target) -> str:
    """A shape's tactics, the fastest marked, and its floor."""
    floor, bound = floor_of(shape.work, target)
    best = min(times, key=lambda name: min(times[name]), default="")
    words = (f"{'*' if n == best else ''}{n} {min(us):.2f}" for n, us in times.items())
    share = f", {floor * 1e6 / min(times[best]):.0%} of the best" if best else ""
    count = f" x{shape.count}" if shape.count > 1 else ""
    return f"{shape.label}{count}: {', '.join(words)} us; floor {floor * 1e6:.2f} ({bound}{share})"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("ops", help="names of ops, a list; or all")
    parser.add_argument("--at", type=sizes_of, default=sizes_of(AT), help=f"default {AT}")
    usual = ",".join(MODELS)
    parser.add_argument("--models", default=usual, help="a list, as published.py names them")
    parser.add_argument("--cases", action="store_true", help="the ops' benchmark cases instead")
    parser.add_argument("--tactics", help="names, a list; default all")
    parser.add_argument("--behind", type=int, default=0, help="tokens prefilled before")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of decode rows")
    parser.add_argument("--mlp-activations", default="auto", help="of the build: auto, bf16 or fp8")
    parser.add_argument("--draft-suffix", type=int, default=0, help="of the build")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine")
    parser.add_argument("--rounds", type=int, default=3, help="times of each tactic")
    parser.add_argument("--predict", action="store_true", help="costs and floors, without a GPU")
    parser.add_argument("--card", choices=sorted(CARDS), default="h200", help="of --predict")
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    args = parser.parse_args(words)
    known = {*REGISTRY, *STANDARD}
    args.ops = sorted(known) if args.ops == "all" else args.ops.split(",")
    if unknown := [name for name in args.ops if name not in known]:
        parser.error(f"there is no op {unknown[0]}; there are {', '.join(sorted(known))}")
    for model in args.models.split(","):
        folder_of(model)
    if args.rounds < 1 or args.tp < 1:
        parser.error("--rounds and --tp are at least 1")
    return args


def asked(args: argparse.Namespace, target: Target) -> Iterator[Shape]:
    """The shapes of the command line."""
    if args.cases:
        for op in (op for op in OPS if op.name in args.ops):
            yield from (of_case(op, case) for case in cuda_node.cases_of(op) if case.bench)
        return
    ranks = {"tp": args.tp} if args.tp > 1 else {}
    ranks |= {"mlp_activations": args.mlp_activations, "draft_suffix": args.draft_suffix}
    models, where = args.models.split(","), (args.behind, args.context)
    yield from shapes(models, args.at, target, set(args.ops), *where, **ranks)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    target = CARDS[args.card] if args.predict else target_here()
    names = args.tactics.split(",") if args.tactics else None
    machine = target.card.product if args.predict else this_machine().label
    head = {"machine": machine, "predicted": args.predict, "commit": commit_here()}
    rows: list[dict[str, Any]] = []
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        for shape in asked(args, target):
            if not (plans := takers(shape.work, target, names)):
                continue  # a case in f32 activations, or one of another card
            if args.predict:
                times = predicted(shape.work, plans, target)
            else:
                times = time_at(shape.work, plans, target, args.rounds, folder)
            print(line(shape, times, target), flush=True)
            floor_us = round(floor_of(shape.work, target)[0] * 1e6, 2)
            at = plans[0][0].size(shape.work.attrs, shape.work.ins, target) or (0, shape.tokens)
            known = {"op": op_of(shape.work.name, shape.work.attrs), "shape": shape.label}
            known |= {"count": shape.count, "size": at[0], "tokens": at[1]}
            rows.append(known | {"floor_us": floor_us, "us": times})
            if args.out:
                write(args.out, {**head, "date": str(date.today()), "rows": rows})
    if not rows:
        print("no node of these ops is in these buckets: try --cases, --at or --tp")


if __name__ == "__main__":
    main()
