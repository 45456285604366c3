"""Runs one tactic of one op on the GPU, over poisoned memory, and compares with the reference.

Knows the contract of a kernel and no op. Every buffer has guard bytes before and after it, so that
a write outside it is seen; outputs hold 0xFF bytes (a NaN in every float format) before the run.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Launch, Plan, Pointer, Tactic, Target
from spark_engine.op import Attrs, Case, Op, Tolerance
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins.cases.seeded import arrays_of, seeded
from tests.plugins.packed_node import packed_arrays as packed_arrays
from tests.plugins.packed_node import packed_specs as packed_specs
from tests.plugins.packed_node import specs_of as specs_of

BF16: Attrs = {"dtype": "bf16"}
GUARD = 512  # bytes before and after each buffer
GUARD_BYTE, POISON_BYTE = 0xA5, 0xFF

# ---- cases -----------------------------------------------------------------------------------


def as_bf16(op: Op, case: Case) -> Case | None:
    """The case with bf16 where it has f32 activations; None where that changes nothing."""
    attrs = {k: "bf16" if v == "f32" else v for k, v in case.attrs.items()}

    def narrow(arrays: Sequence[Array]) -> tuple[Array, ...]:
        given = op.given(case.attrs)[: len(arrays)]
        return tuple(
            a.astype(ml_dtypes.bfloat16) if o.narrow and a.dtype == np.float32 else a
            for o, a in zip(given, arrays, strict=True)
        )

    sample = case.inputs(np.random.default_rng(0))
    same = all(a is b for a, b in zip(sample, narrow(sample), strict=True))
    if same and attrs == dict(case.attrs):
        return None
    return replace(
        case,
        label=f"{case.label} as bf16",
        attrs=attrs,
        inputs=lambda rng: narrow(case.inputs(rng)),
        rtol=max(case.rtol, 1e-2),
        atol=max(case.atol, 1e-3),
    )


def cases_of(op: Op) -> list[Case]:
    """The op's cases and their bf16 variants."""
    variants = (as_bf16(op, case) for case in seeded(op))
    return [*seeded(op), *(v for v in variants if v is not None)]


# ---- packing and planning ------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """One tactic that does not refuse one case."""

    op: Op
    case: Case
    tactic: Tactic
    plan: Plan


def planned(op: Op, case: Case, target: Target) -> Iterator[Planned]:
    """Every tactic that takes the case on `target`."""
    arrays = case.inputs(np.random.default_rng(0))
    yield from planned_for(op, case, specs_of(op, case.attrs, arrays), target)


def planned_for(
    op: Op, case: Case, specs: Sequence[TensorSpec], target: Target
) -> Iterator[Planned]:
    """`planned` of a case by the specs of its operands, which are not drawn."""
    specs = packed_specs(op, case.attrs, specs)
    for tactic in op.cuda.tactics:
        if tactic.refuse(case.attrs, specs, target) is None:
            yield Planned(op, case, tactic, tactic.plan(case.attrs, specs, target))


# ---- running ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """Guarded device memory; `address` is that of the bytes between the guards."""

    address: int
    nbytes: int


class Bench:
    """A GPU, compiled kernels, and guarded buffers."""

    def __init__(self, gpu: Gpu, target: Target, cache: Path) -> None:
        self.gpu, self.target = gpu, target
        self._cache = cache
        self._functions: dict[tuple[str, nvrtc.Defines, str, int], object] = {}

    def functions(self, source: str, plan: Plan) -> list[tuple[object, Launch]]:
        """The kernel of each launch, and the launch with the shared memory of its kernel."""
        made = []
        for launch in plan.launches:
            job = nvrtc.Job(launch.source or source, launch.defines, (launch.symbol,))
            cubin = nvrtc.compile(job, self.target, self._cache)
            launch = cubin.launched(launch)
            key = (job.source, launch.defines, launch.symbol, launch.shared)
            if key not in self._functions:
                found = self.gpu.load(cubin.code, [launch.symbol], launch.shared)
                self._functions[key] = found[launch.symbol]
            made.append((self._functions[key], launch))
        return made

    @contextmanager
    def buffers(self, sizes: Sequence[int]) -> Iterator[list[Buffer]]:
        """Guarded buffers; leaving checks that no guard was written."""
        whole = [-(-n // 256) * 256 + 2 * GUARD for n in sizes]
        bases = [self.gpu.allocate(n) for n in whole]
        made = [Buffer(b + GUARD, n) for b, n in zip(bases, sizes, strict=True)]
        for base, n in zip(bases, whole, strict=True):
            self.gpu.fill(base, GUARD_BYTE, n)
        try:
            yield made
            for i, (base, n) in enumerate(zip(bases, whole, strict=True)):
                image = np.empty(n, np.uint8)
                self.gpu.download(image, base)
                self.gpu.wait()
                around = np.delete(image, slice(GUARD, GUARD + sizes[i]))
                assert (around == GUARD_BYTE).all(), f"a write outside the bytes of buffer {i}"
        finally:
            for base in bases:
                self.gpu.free(base)

    def put(self, buffer: Buffer, array: Array) -> None:
        """Copies an array in, at once."""
        data = np.ascontiguousarray(array)
        self.gpu.upload(buffer.address, data)
        self.gpu.wait()

    def get(self, buffer: Buffer, spec: TensorSpec) -> Array:
        """Copies an array out, at once."""
        array = np.empty(spec.dims, spec.dtype.numpy)
        self.gpu.download(array, buffer.address)
        self.gpu.wait()
        return array

    def launch(
        self, functions: Sequence[tuple[object, Launch]], places: Mapping[str, list[int]]
    ) -> None:
        """Queues the launches of `functions`; `places` holds addresses by pointer kind."""
        for function, launch in functions:
            values = [
                places[a.kind][a.index] if isinstance(a, Pointer) else a.value for a in launch.args
            ]
            self.gpu.launch(function, launch, values)

    def results(self, op: Op, arrays: tuple[Array, ...], attrs: Attrs = BF16) -> dict[str, Array]:
        """The first result of each tactic that takes these operands, by the tactic's name."""
        works = planned(op, Case("served", attrs, lambda rng: arrays), self.target)
        return {work.tactic.name: run(self, work, arrays)[0] for work in works}


def run(bench: Bench, work: Planned, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The outputs of one tactic over `arrays` (as docs/graph.md has them).

    Runs twice and compares the bits; checks that operands stay as they were and that zeroed
    scratch memory is left zero.
    """
    op, case, plan = work.op, work.case, work.plan
    outs = op.infer(case.attrs, specs_of(op, case.attrs, arrays))
    packed = packed_arrays(op, case.attrs, arrays)
    functions = bench.functions(work.tactic.source, plan)
    sizes = [a.nbytes for a in packed] + [s.nbytes for s in outs] + [s.nbytes for s in plan.scratch]
    with bench.buffers(sizes) as made:
        inputs = made[: len(packed)]
        outputs = made[len(packed) : len(packed) + len(outs)]
        scratch = made[len(packed) + len(outs) :]
        aliases = op.aliases(case.attrs)
        outputs = [inputs[aliases[i]] if i in aliases else b for i, b in enumerate(outputs)]
        for buffer, need in zip(scratch, plan.scratch, strict=True):
            bench.gpu.fill(buffer.address, 0 if need.zeroed else POISON_BYTE, buffer.nbytes)
        places = {
            "input": [b.address for b in inputs],
            "output": [b.address for b in outputs],
            "scratch": [b.address for b in scratch],
        }
        results = []
        for _ in range(2):
            for buffer in outputs:
                bench.gpu.fill(buffer.address, POISON_BYTE, buffer.nbytes)
            for buffer, array in zip(inputs, packed, strict=True):
                bench.put(buffer, array)
            bench.launch(functions, places)
            results.append([bench.get(b, s) for b, s in zip(outputs, outs, strict=True)])
        _check_scratch(bench, plan, scratch)
        _check_inputs(bench, set(aliases.values()), packed, inputs)
    for i, (first, second) in enumerate(zip(*results, strict=True)):
        assert first.tobytes() == second.tobytes(), f"output {i} differs from run to run"
    return tuple(results[0])


def _check_scratch(bench: Bench, plan: Plan, scratch: Sequence[Buffer]) -> None:
    for i, (buffer, need) in enumerate(zip(scratch, plan.scratch, strict=True)):
        if need.zeroed:
            left = bench.get(buffer, TensorSpec("scratch", DType.U8, (need.nbytes,)))
            assert not left.any(), f"scratch {i} is promised zero and was left otherwise"


def _check_inputs(
    bench: Bench, written: set[int], packed: Sequence[Array], inputs: Sequence[Buffer]
) -> None:
    for i, (array, buffer) in enumerate(zip(packed, inputs, strict=True)):
        if i not in written:
            spec = TensorSpec("input", DType.of(array.dtype), array.shape)
            assert bench.get(buffer, spec).tobytes() == array.tobytes(), f"operand {i} was written"


# ---- comparing -------------------------------------------------------------------------------


def truth(op: Op, case: Case) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """A case's operands and what the reference makes of them."""
    arrays = arrays_of(op, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        want = tuple(o.copy() for o in op.reference(case.attrs, tuple(a.copy() for a in arrays)))
    if case.ignore is not None:
        case.ignore(want)
    return arrays, want


def compared(bench: Bench, work: Planned, given: Sequence[Array], want: Sequence[Array]) -> str:
    """What is to be said of outputs that are right. Raises AssertionError for others."""
    op, case = work.op, work.case
    limits, states = op.tolerance(case.attrs), op.aliases(case.attrs)  # pages: a code a byte
    got = run(bench, work, given)
    if case.ignore is not None:
        case.ignore(got)
    pairs = enumerate(zip(got, want, strict=True))
    label = f"{op.name}/{work.tactic.name}/{case.label} output"
    notes = [compare(f"{label} {i}", g, w, limits, i not in states) for i, (g, w) in pairs]
    return "; ".join(filter(None, notes))


def compare(label: str, got: Array, want: Array, limits: Tolerance, nibbles: bool) -> str:
    """Asserts that `got` is `want` within the limits; returns what to report, if anything.

    `nibbles`: a U8 holds two e2m1 codes; otherwise it is one e4m3 code.
    """
    assert (got.dtype, got.shape) == (want.dtype, want.shape), label
    dtype = DType.of(got.dtype)
    if dtype in (DType.F8E4M3, DType.U8):
        return _compare_codes(label, got, want, limits, nibbles and dtype is DType.U8)
    if dtype in (DType.I32, DType.I64, DType.BOOL):
        np.testing.assert_array_equal(got, want, err_msg=label)
        return ""
    g, w = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(g), np.isfinite(w), err_msg=f"{label}: NaN or inf")
    finite = np.isfinite(w)
    if not finite.any():
        return ""
    narrow = dtype in (DType.BF16, DType.F16)
    far = np.where(finite, g - w, 0.0)
    distance = float(np.linalg.norm(far)) / max(float(np.linalg.norm(w[finite])), 1e-30)
    bound = limits.norm if narrow else limits.exact
    assert distance <= bound, f"{label}: relative L2 distance {distance:.3g} > {bound:.3g}"
    if narrow:  # an element's bound comes from all values, or from its row's where they are larger
        size, spread = np.abs(np.where(finite, w, 0.0)), _spread(w)
        for at in zip(*np.nonzero(np.abs(far) > limits.element * (size + spread)), strict=True):
            assert abs(far[at]) <= limits.element * (size[at] + _spread(w[at[:-1]])), (
                f"{label}: element {tuple(map(int, at))} is {g[at]:.6g}, not {w[at]:.6g}"
            )
    return ""


def _spread(values: Array) -> float:
    """The size of the values that an element is a sum of: few outliers do not raise it."""
    size = np.minimum(np.abs(values[np.isfinite(values) & (values != 0)]), 1e30)  # zeros: padding
    return float(min(np.sqrt(np.mean(size**2)), 1.0 + np.median(size))) if size.size else 0.0


def _compare_codes(label: str, got: Array, want: Array, limits: Tolerance, nibbles: bool) -> str:
    g, w = _steps(got, nibbles), _steps(want, nibbles)
    far = np.abs(g - w)
    if limits.blur and not nibbles:
        g_value, w_value = (
            np.ascontiguousarray(x).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            for x in (got, want)
        )
        far[np.abs(g_value - w_value) <= limits.blur * np.abs(w_value).max(initial=0)] = 0
    assert far.max(initial=0) <= 1, f"{label}: a code is {far.max()} steps off"
    off = int(np.count_nonzero(far))
    assert off <= max(1, limits.codes * far.size), f"{label}: {off} of {far.size} codes are off"
    return f"{label}: {off} of {far.size} codes one step off" if off else ""


def _steps(codes: Array, nibbles: bool) -> NDArray[np.int32]:
    """Codes as whole numbers in the order of their values; both zeros are 0."""
    raw = np.ascontiguousarray(codes).view(np.uint8)
    if nibbles:
        raw = np.stack([raw & np.uint8(15), raw >> np.uint8(4)])
    sign = np.uint8(8 if nibbles else 128)
    size = (raw & (sign - np.uint8(1))).astype(np.int32)
    return np.where(raw & sign, -size, size)
