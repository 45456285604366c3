"""The gated delta net's kernels against their references, on a GPU; that they compile, anywhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import TARGETS, Tactic, Target
from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins import registry
from spark_engine.plugins.ops.delta_rule import gated_delta, gdn_decode, gdn_prefill
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases
from tests.plugins.cases.delta_rule import gdn_decode as fused_cases
from tests.plugins.cases.delta_rule import gdn_prefill as prefill_cases
from tests.plugins.cases.delta_rule.gated_delta import Launch
from tests.plugins.cases.seeded import arrays_of

nvrtc = pytest.importorskip("spark_engine.builder.native.nvrtc")
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.test_cuda_compile import disassembled  # noqa: E402

MODELS = {"tiny": (2, 4), "27B": (16, 48), "35B": (16, 32), "one": (4, 4)}


@pytest.fixture
def hopper(bench: cuda_node.Bench) -> cuda_node.Bench:
    """The GPU, if it is Hopper's and not a rehearsal's part of one."""
    if not bench.target.wgmma:
        pytest.skip("needs a Hopper GPU")
    return bench


def run(
    bench: cuda_node.Bench, op: Op, tactic: Tactic, attrs: Attrs, arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Its outputs, which are the same twice."""
    plan = tactic.plan(attrs, cuda_node.specs_of(op, attrs, arrays), bench.target)
    work = cuda_node.Planned(op, Case("", attrs, lambda _: arrays), tactic, plan)
    return cuda_node.run(bench, work, arrays)


def served(
    model: str, rows: int, state: DType = DType.F32, ring: int = 0
) -> gated_delta_cases.Launch:
    """`rows` decode rows in bf16: some inert, some fresh, some without a token."""
    slots = tuple(-1 if i % 7 == 3 else i for i in range(rows))
    starts = tuple(0 if i % 5 == 2 else 9 + i for i in range(rows))
    counts = tuple(int(s >= 0) for s in slots)
    keys, values = MODELS[model]
    return gated_delta_cases.Launch(
        1, slots, starts, counts, keys, values, 128, 128, DType.BF16, state, units=rows, ring=ring
    )


def fused(model: str, rows: int, quant: str, state: DType = DType.F32, ring: int = 0) -> Case:
    inner = served(model, rows, state, ring)
    launch = fused_cases.Launch(inner, quant, keep=int(quant == "none"))
    label = f"{model} {rows} {quant} {state}" + f" ring of {ring}" * bool(ring)
    return Case(label, launch.attrs, launch.inputs, ignore=launch.ignore)


SERVED = [
    fused(model, rows, quant, state)
    for model, rows, quant, state in (
        ("tiny", 5, "fp8", DType.F32),
        ("27B", 3, "none", DType.F32),
        ("27B", 9, "fp8", DType.F32),
        ("27B", 9, "nvfp4", DType.BF16),
        ("35B", 9, "fp8_block", DType.F32),
        ("one", 6, "nvfp4", DType.F32),
    )
]


RINGS = [
    fused("27B", 9, "fp8", ring=8),
    fused("27B", 9, "nvfp4", DType.BF16, 8),
    fused("27B", 9, "fp8", DType.F16, 8),
    fused("35B", 9, "fp8_block", ring=16),
    fused("35B", 9, "none", ring=4),
    fused("one", 6, "nvfp4", ring=8),
    fused("tiny", 6, "none", ring=5),
]


def chunked(model: str, speed: float = 0.0, state: DType = DType.F32, ring: int = 0) -> Case:
    """Three sequences: fresh, continuing, and one that ends within its first tile; behind rings
    that are not empty."""
    keys, values = MODELS[model]
    rows = ((0, 0, 0, -1, 2, 1, 1), (0, 64, 128, 0, 7, 191, 255), (64, 64, 2, 0, 33, 64, 64))
    launch = gated_delta_cases.Launch(
        64, *rows, keys, values, 128, 128, DType.BF16, state, speed, units=4, ring=ring
    )
    label = f"{model} {speed} {state}" + f" ring of {ring}" * bool(ring)
    return Case(label, launch.attrs, launch.inputs, ignore=launch.ignore)


CHUNKED = [
    chunked("27B"),
    chunked("35B", -4.0),
    chunked("tiny", -2.0, DType.BF16),
    chunked("one", 2.0),
    chunked("27B", ring=8),
    chunked("tiny", state=DType.BF16, ring=16),
    chunked("27B", state=DType.F16, ring=8),
]
PREFILLED = [prefill_cases.case_of(case) for case in CHUNKED]
CASES = [  # in addition to the ops' own, which test_cuda_ops.py runs
    *((gdn_decode.OP, case) for case in (*SERVED, *RINGS)),
    *((gated_delta.CHUNK, case) for case in CHUNKED),
    *((gdn_prefill.OP, case) for case in PREFILLED),
]
PAIRS = [pytest.param(op, case, id=f"{op.name}-{case.label}") for op, case in CASES]


def far(got: Array, want: Array) -> float:
    """‖got − want‖ / ‖want‖; infinite where one is not finite."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(a).all():
        return float("inf")
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def check(
    op: Op, case: Case, got: tuple[Array, ...], arrays: tuple[Array, ...], tactic: str = ""
) -> None:
    """Each output against the reference: f32 within 1e-5, bf16 within 1e-2, codes nearly all."""
    want = op.reference(case.attrs, arrays)
    if case.ignore is not None:
        case.ignore(want)
        case.ignore(got)
    names = op.names(case.attrs, len(arrays))
    written = [a for n, a in zip(names, arrays, strict=True) if n in ("slots", "saves")]
    touched = np.unique(np.concatenate(written))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        label = f"{op.name}/{case.label} {tactic} output {i}"
        if i in op.aliases(case.attrs):
            untouched = np.setdiff1d(np.arange(len(w) - 1), touched)
            assert g[untouched].tobytes() == w[untouched].tobytes(), f"{label}: a bystander changed"
            live = touched[touched >= 0]
            g, w = g[live], w[live]
        if w.dtype == np.uint8 or w.dtype == DType.F8E4M3.numpy:
            other = np.mean(g.view(np.uint8) != w.view(np.uint8))
            assert other < 0.02, f"{label}: {other:.2%} of the codes differ"
            continue
        place = op.aliases(case.attrs).get(i)
        if place is not None and (names[place] == "gdn_ring" or case.attrs.get("drafts")):
            # records and columns that are of no use hold NaN, and keep it
            assert np.array_equal(np.isnan(g), np.isnan(w)), f"{label}: others were written"
            g, w = (np.where(np.isnan(a), a.dtype.type(0), a) for a in (g, w))
        limit = 1e-5 if w.dtype == np.float32 and not _rounds(op, arrays) else 1e-2
        assert far(g, w) <= limit, f"{label}: {far(g, w):.2e} from the reference"


def _rounds(op: Op, arrays: tuple[Array, ...]) -> bool:
    """A fusion rounds c to bf16, where the last bit of f32 may decide otherwise."""
    return op in (gdn_decode.OP, gdn_prefill.OP) and arrays[0].dtype == DType.BF16.numpy


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_every_tactic_equals_the_reference(op: Op, case: Case, hopper: cuda_node.Bench) -> None:
    """As it is given, and with bf16 activations."""
    taken = 0
    for variant in filter(None, (case, cuda_node.as_bf16(op, case))):
        tried = replace(variant, label=case.label)
        arrays = arrays_of(op, tried)
        for work in cuda_node.planned(op, tried, hopper.target):
            got = cuda_node.run(hopper, work, arrays)
            check(op, tried, got, arrays, work.tactic.name)
            taken += 1
    if not taken:
        pytest.skip("every tactic refuses this case")


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILLED, ids=lambda c: c.label)
def test_a_prefill_has_the_bits_of_its_parts(case: Case, bench: cuda_node.Bench) -> None:
    op, attrs = gdn_prefill.OP, case.attrs
    arrays = arrays_of(op, case)
    qkvz, ba, weight, columns, *rest = arrays
    parts = op.fuses(attrs).parts if op.fuses else ()
    conv, rule = (registry.get(part.op) for part in parts)

    def launch(of: Op, own: Attrs, given: tuple[Array, ...]) -> tuple[Array, ...]:
        specs = cuda_node.specs_of(of, own, given)
        taken = [t for t in of.cuda.tactics if t.refuse(own, specs, bench.target) is None]
        return run(bench, of, taken[0], own, given)

    got = launch(op, attrs, arrays)
    c, left = launch(conv, parts[0].attrs, (qkvz, weight, columns, *rest[-gdn_prefill.ROWS :]))
    o, *states = launch(rule, attrs, (c, ba, *rest))
    for i, (a, b) in enumerate(zip(got, (o, left, *states), strict=True)):
        assert a.tobytes() == b.tobytes(), f"output {i}"


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("state", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("ring", [False, True])
def test_decode_kernels_compile_without_spills(
    target: Target, state: DType, ring: bool, cache: Path
) -> None:
    case = fused("27B", 4, "fp8", state, 8 * ring)
    accepted = list(cuda_node.planned(gdn_decode.OP, case, target))
    assert accepted
    for work in accepted:
        (job,) = nvrtc.jobs_of([(work.tactic.source, work.plan)])
        usage = nvrtc.compile(job, target, cache).usage["gdn_decode"]
        assert (usage.spills, usage.stack) == (0, 0), f"{work.tactic.name}: {usage}"


# Bytes that a form of the scan (ring, drafts, dtype of the state) spills.
SCAN_SPILLS = {(0, 0, DType.BF16): 128}


@pytest.mark.kernels
@pytest.mark.parametrize("state", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("form", [(0, 0), (8, 0), (8, 3)])
def test_a_scan_waits_for_wgmma_where_its_source_does(
    form: tuple[int, int], state: DType, cache: Path, tmp_path: Path
) -> None:
    """ptxas neither makes a wgmma wait for the one before nor inserts waits."""
    op, tactic = gdn_prefill.OP, next(t for t in gdn_prefill.OP.cuda.tactics if t.name == "wgmma")
    target, (ring, drafts) = TARGETS["sm_90a"], form
    delta = Launch(
        64, (3, 3), (0, 64), (64, 64), 16, 32, 128, 128,
        DType.BF16, state, ring=ring, drafts=drafts,
    )  # fmt: skip
    given = prefill_cases.Launch(delta)
    specs = cuda_node.specs_of(op, given.attrs, given.inputs(np.random.default_rng(0)))
    plan = tactic.plan(given.attrs, specs, target)
    (job,) = nvrtc.jobs_of([(tactic.source, plan)])
    usage = nvrtc.compile(job, target, cache).usage["gated_delta_scan"]
    assert usage.spills <= SCAN_SPILLS.get((*form, state), 0), usage
    sass = disassembled(job, target, cache, tmp_path).split(".section\t.text.")
    (scan,) = (part for part in sass if part.startswith("gated_delta_scan"))
    waits = (nvrtc.SOURCES / tactic.source).read_text().count("wgmma_wait<")
    assert scan.count("WARPGROUP.DEPBAR") == waits


@pytest.mark.gpu
@pytest.mark.parametrize("state", [DType.F32, DType.BF16, DType.F16])
def test_512_steps(hopper: cuda_node.Bench, state: DType) -> None:
    """A sequence decoded for 512 steps, the state kept on the device."""
    steps, keys, values = 512, 2, 4
    launch = gated_delta_cases.Launch(
        1, (1,) * steps, tuple(range(steps)), (1,) * steps, keys, values, 128, 128,
        DType.BF16, state, units=2,
    )  # fmt: skip
    op = gated_delta.STEP
    c, ba, *rest = launch.inputs(np.random.default_rng(3))
    *weights, _, _, _ = rest
    one = np.ones(1, np.int32)
    want_o, want = op.reference({**launch.attrs}, (c, ba, *rest))
    tactic = op.cuda.tactics[0]
    worst, last = 0.0, weights[2].copy()
    for t in range(steps):
        arrays = (c[t : t + 1], ba[t : t + 1], *weights[:2], last, one, one * t, one)
        o, last = run(hopper, op, tactic, launch.attrs, arrays)
        worst = max(worst, far(o[0], want_o[t]))
    limit = {DType.F32: 1e-5, DType.F16: 3e-3}.get(state, 3e-2)
    assert far(last[1], want[1]) <= limit, f"state {far(last[1], want[1]):.2e}"
    assert worst <= (1e-2 if state is DType.F32 else 5e-2), f"worst step {worst:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
def test_steps_between_prefills(hopper: cuda_node.Bench, state: DType) -> None:
    """Steps from position 0, a prefill, steps: as the plain rule's reference over all."""
    keys, values, parts = 2, 4, (("steps", 21), ("chunk", 40), ("steps", 30), ("chunk", 3))
    total = sum(n for _, n in parts) + 61
    plain = gated_delta_cases.Launch(
        1, (1,) * total, tuple(range(total)), (1,) * total, keys, values, 128, 128,
        DType.BF16, state, units=2,
    )  # fmt: skip
    c, ba, *rest = plain.inputs(np.random.default_rng(4))
    want, _ = gated_delta.STEP.reference(plain.attrs, (c, ba, *rest))
    launch = replace(plain, slots=(1,), starts=(0,), counts=(1,), ring=8)
    records = launch.records(np.random.default_rng(0))
    held = [*rest[:3], records]
    at, worst = 0, 0.0
    for kind, n in (*parts, ("steps", total - sum(n for _, n in parts))):
        tile = 1 if kind == "steps" else 64
        op = gated_delta.STEP if tile == 1 else gated_delta.CHUNK
        for t in range(at, at + n, n if tile > 1 else 1):
            pad = ((0, 64 - n), (0, 0)) if tile > 1 else ((0, 0), (0, 0))
            size = n if tile > 1 else 1
            rows = [np.asarray([x], np.int32) for x in (1, t, size)]
            rows += [np.asarray([x], np.int32) for x in (1, -1)] if tile > 1 else []
            arrays = (np.pad(c[t : t + size], pad), np.pad(ba[t : t + size], pad), *held, *rows)
            attrs = {**launch.attrs, "tile": tile}
            o, *states = run(hopper, op, op.cuda.tactics[-1], attrs, arrays)
            held[2:] = states
            worst = max(worst, far(o[:size], want[t : t + size]))
        at += n
    assert worst <= (1e-2 if state is DType.F32 else 3e-2), f"worst launch {worst:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [RINGS[0], RINGS[1]], ids=lambda case: case.label)
def test_tactics_behind_a_ring_give_the_same_bits(case: Case, hopper: cuda_node.Bench) -> None:
    """They sum in one order, as `Tactic.reduction_key` says."""
    works = list(cuda_node.planned(gdn_decode.OP, case, hopper.target))
    assert len(works) > 2 and "registers" in {w.tactic.name for w in works}
    found = {}
    for work in works:
        outputs = cuda_node.run(hopper, work, arrays_of(gdn_decode.OP, case))
        case.ignore(outputs)  # type: ignore[misc]
        found[work.tactic.name] = [x.tobytes() for x in outputs]
    assert all(bits == found["registers"] for bits in found.values())


@pytest.mark.gpu
def test_launches_of_many_rows_do_not_mix(hopper: cuda_node.Bench) -> None:
    """A row's bits are its own: alone and among others."""
    op, case = gdn_decode.OP, fused("27B", 9, "fp8")
    arrays = arrays_of(op, case)
    tactic = op.cuda.tactics[0]
    many = run(hopper, op, tactic, case.attrs, arrays)
    pick = [4]
    per_row = {"qkvz", "ba", "slots", "starts", "counts"}
    names = op.names(case.attrs, len(arrays))
    single = tuple(a[pick] if n in per_row else a for n, a in zip(names, arrays, strict=True))
    alone = run(hopper, op, tactic, case.attrs, single)
    assert alone[1][4].tobytes() == many[1][4].tobytes()
    assert alone[2][0].tobytes() == many[2][4].tobytes()
