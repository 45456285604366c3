"""Every op, every case, every tactic: it compiles for each target, and equals the reference.

Compiling needs no GPU. A case in f32 activations is refused by the tactics; its bf16 variant
runs in its place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.op import Case, Op  # noqa: E402
from spark_engine.plugins import registry  # noqa: E402
from spark_engine.runtime import device  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402

WORKERS = 2
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
    # Over bf16 pages q and the softmax's weights are bf16, as in every kernel on this matrix unit:
    # in numpy those two roundings alone put one element of the cases 2.7 times 2^-7 off (relative
    # L2 distance 3e-3). Over e4m3 pages both are f16; test_cuda_attention holds those to 2^-7.
    "paged_attention": cuda_node.Limits(element=2.0**-5),
    "attention_decode": cuda_node.Limits(element=2.0**-5, codes=0.05, blur=2.0**-7),
}


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config) -> Path:
    """Cubins of earlier runs, by content."""
    assert pytestconfig.cache is not None
    return Path(pytestconfig.cache.mkdir("cubins"))


@pytest.fixture(scope="session")
def bench(cache: Path) -> Iterator[cuda_node.Bench]:
    name = device.architecture()
    if name is None:
        pytest.skip("no CUDA device")
    gpu = device.Gpu()
    yield cuda_node.Bench(gpu, TARGETS[name], cache)
    gpu.close()


def arrays_of(op: Op, case: Case) -> tuple[np.ndarray, ...]:
    return case.inputs(np.random.default_rng(zlib.crc32(f"{op.name}/{case.label}".encode())))


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_tactic_compiles(op: Op, target: Target, cache: Path) -> None:
    works = [w for case in cuda_node.cases_of(op) for w in cuda_node.planned(op, case, target)]
    jobs = nvrtc.jobs_of((w.tactic.source, w.plan) for w in works)
    cubins = nvrtc.compile_all(jobs, target, cache, WORKERS)
    by_key = {(job.source, job.defines): cubin for job, cubin in cubins.items()}
    for work in works:
        for launch in work.plan.launches:
            usage = by_key[work.tactic.source, launch.defines].usage[launch.symbol]
            label = f"{op.name}/{work.tactic.name}/{launch.symbol} {work.case.label}"
            shared = usage.shared + launch.shared
            assert shared <= target.shared_bytes, f"{label} takes {shared} bytes of shared memory"
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            assert threads <= 1024 and threads * usage.registers <= 65536, label
            if work.case.attrs.get("tile", 1) == 1:
                assert usage.spills == 0, f"{label} spills {usage.spills} bytes"


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
    limits = LIMITS.get(op.name, cuda_node.Limits())
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


def test_a_source_that_does_not_compile_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void k() { x = WIDTH; }')
    job = nvrtc.Job("bad.cu", (("WIDTH", "7"),), ("k",))
    with pytest.raises(nvrtc.InternalError, match=r"bad.cu -DWIDTH=7 for sm_90a does not compile"):
        nvrtc.compile(job, TARGETS["sm_90a"], None, tmp_path)


def test_a_missing_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.cu").write_text('extern "C" __global__ void k() {}')
    with pytest.raises(nvrtc.InternalError, match=r"has no extern \"C\" kernel \['other'\]"):
        nvrtc.compile(nvrtc.Job("one.cu", (), ("other",)), TARGETS["sm_90a"], None, tmp_path)


def test_cubins_are_kept_by_content(tmp_path: Path) -> None:
    header, source = tmp_path / "h.cuh", tmp_path / "one.cu"
    header.write_text("#define V 1.0f\n")
    source.write_text('#include "h.cuh"\nextern "C" __global__ void k(float* p) { *p = V; }')
    job, target = nvrtc.Job("one.cu", (), ("k",)), TARGETS["sm_121a"]
    first = nvrtc.compile(job, target, tmp_path / "kept", tmp_path)
    assert nvrtc.compile(job, target, tmp_path / "kept", tmp_path) == first
    assert nvrtc.compile(job, target, None, tmp_path) == first, "compilation is deterministic"
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert nvrtc.compile(job, target, tmp_path / "kept", tmp_path) == first, "damage is seen"
    header.write_text("#define V 2.0f\n")
    assert nvrtc.compile(job, target, tmp_path / "kept", tmp_path).code != first.code
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert replace(first.usage["k"], registers=0) == nvrtc.Usage(0, 0, 0, 0)
