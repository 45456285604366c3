"""Every op, every case, every tactic equals the reference on the GPU.

A case in f32 activations is refused by the tactics; its bf16 variant runs in its place.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.op import Case, Op  # noqa: E402
from spark_engine.plugins import registry  # noqa: E402
from spark_engine.tensors import DType  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402

OPS = [op for op in registry.OPS if op.cuda.tactics]
PAIRS = [
    pytest.param(op, case, id=f"{op.name}-{case.label}")
    for op in OPS
    for case in cuda_node.cases_of(op)
]
# Where an op's arithmetic is coarser than one rounding of its result; the reason beside it.
LIMITS: dict[str, cuda_node.Limits] = {
    # bf16 activations between the two products, which the reference keeps whole: a sum over few
    # inner columns then cancels to 2^-6 of its spread (numpy with that one rounding does the same)
    "grouped_moe": cuda_node.Limits(element=2.0**-5),
    # The same rounding, then codes of it: numpy with that one rounding has 4.4 % of the codes of a
    # case elsewhere, those near zero by many steps. test_cuda_moe holds the bits against those of
    # grouped_moe and norm_quant.
    "moe_norm_quant": cuda_node.Limits(element=2.0**-5, codes=0.05, blur=2.0**-7),
    # Over bf16 pages q and the softmax's weights are bf16, as in every kernel on this matrix unit:
    # in numpy those two roundings alone put one element of the cases 2.7 times 2^-7 off (relative
    # L2 distance 3e-3). Over e4m3 pages both are f16; test_cuda_attention holds those to 2^-7.
    "paged_attention": cuda_node.Limits(element=2.0**-5),
    # The same over bf16 pages: y is 3e-3 off. A step of e4m3 is a tenth of a value, so that a
    # value of the usual size changes its code once in thirty times, and one near zero, whose steps
    # are as fine as it is small, by many steps: those are blurred. Measured: 0.03 % of the codes
    # beyond the blur, 2.1 % where a block's scale (f32, a maximum of such elements; 1e-3 off) moves
    # all codes of the block.
    "attention_decode": cuda_node.Limits(element=2.0**-5, state=2e-3, codes=0.03, blur=2.0**-7),
}
# Over e4m3 pages q and the softmax's weights are f16, an eighth of that: y is 7e-4 off, which is
# mostly its own rounding to bf16; 0.8 % of the codes are, each by one step.
FINE = cuda_node.Limits(codes=0.02)


def limits_of(op: Op, case: Case) -> cuda_node.Limits:
    if op.name == "attention_decode" and case.attrs["kv_dtype"] == DType.F8E4M3.value:
        return FINE
    return LIMITS.get(op.name, cuda_node.Limits())


def arrays_of(op: Op, case: Case) -> tuple[np.ndarray, ...]:
    return case.inputs(np.random.default_rng(zlib.crc32(f"{op.name}/{case.label}".encode())))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_every_tactic_equals_the_reference(op: Op, case: Case, bench: cuda_node.Bench) -> None:
    works = list(cuda_node.planned(op, case, bench.target))
    if not works:
        pytest.skip("every tactic refuses this case")
    arrays = arrays_of(op, case)
    want = tuple(o.copy() for o in op.reference(case.attrs, tuple(a.copy() for a in arrays)))
    if case.ignore is not None:
        case.ignore(want)
    limits = limits_of(op, case)
    for work in works:
        got = cuda_node.run(bench, work, arrays)
        if case.ignore is not None:
            case.ignore(got)
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            label = f"{op.name}/{work.tactic.name}/{case.label} output {index}"
            nibbles = index not in op.aliases  # pages hold one e4m3 code a byte
            note = cuda_node.compare(label, g, w, limits, nibbles)
            if note:
                print(note)


def test_a_case_in_f32_becomes_one_in_bf16() -> None:
    for op in registry.OPS:
        for case in op.cases:
            made = cuda_node.as_bf16(op, case)
            if made is None:
                continue
            arrays = made.inputs(np.random.default_rng(0))
            op.infer(made.attrs, cuda_node.specs_of(op, made.attrs, arrays))
