"""Every kernel compiles for every target and takes no more than the target has. Needs no GPU.

The op's cases are many sizes of few forms; covering_cases.py chooses which are compiled.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache as once
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.errors import InternalError  # noqa: E402
from spark_engine.kernel import DECLARED, GB10, H200, TARGETS, Launch, Target  # noqa: E402
from spark_engine.op import Op  # noqa: E402
from spark_engine.plugins import registry  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.covering_cases import covering, forms, tactic_of  # noqa: E402

WORKERS = 2
OPS = [op for op in registry.OPS if op.cuda.tactics]
Choice = Callable[[Op, Target], list[cuda_node.Planned]]
APART = "sample"  # takes 25 s: test_cuda_sample.py compiles the served width and holds it to this
# Header that holds an instruction -> what the instruction is called in SASS.
FP4 = {"common/fp4_mma_sm120.cuh": "OMMA"}


def chosen(op: Op, target: Target) -> list[cuda_node.Planned]:
    """What `make kernels` compiles of an op: every length, and all of it for this op."""
    return covering(_planned(op.name, target), every=True)


def shared(op: Op, target: Target) -> list[cuda_node.Planned]:
    """What `make test` compiles of an op; others have the rest of the kernels that it launches."""
    return [work for work in _shared(target) if work.op is op]


@once
def _shared(target: Target) -> list[cuda_node.Planned]:
    return covering([w for op in OPS if op.name != APART for w in _planned(op.name, target)])


@once
def _planned(name: str, target: Target) -> list[cuda_node.Planned]:
    op = registry.get(name)
    return [w for case in cuda_node.cases_of(op) for w in cuda_node.planned(op, case, target)]


@pytest.fixture(scope="session")
def compiled(cache: Path, request: pytest.FixtureRequest) -> Path:
    """The cache with what the session's tests ask for, compiled side by side; a failure is left to
    its own test."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    every = "kernels" in request.config.getoption("-m")  # else planned: conftest.py
    asked = [i.callspec.params for i in items if every or not i.get_closest_marker("kernels")]
    for target in TARGETS.values():
        pairs = [
            (w.tactic.source, w.plan)
            for p in asked
            if p.get("target") is target and "choice" in p
            for w in p["choice"](p["op"], target)
        ]
        try:
            nvrtc.compile_all(nvrtc.jobs_of(pairs), target, cache, WORKERS)
        except InternalError:
            continue
    return cache


@pytest.mark.parametrize(
    "choice", [shared, pytest.param(chosen, marks=pytest.mark.kernels)], ids=["few", "all"]
)
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("op", [o for o in OPS if o.name != APART], ids=lambda op: op.name)
def test_every_kernel_compiles_and_fits(
    op: Op, target: Target, choice: Choice, compiled: Path
) -> None:
    works = choice(op, target)
    assert works, "every tactic refuses every case"
    for work in works:
        for launch in work.plan.launches:
            source = launch.source or work.tactic.source
            job = nvrtc.Job(source, launch.defines, (launch.symbol,))
            cubin = nvrtc.compile(job, target, compiled)
            usage, launch = cubin.usage[launch.symbol], cubin.launched(launch)
            label = f"{op.name}/{work.tactic.name}/{launch.symbol} {work.case.label}: {usage}"
            assert usage.shared + launch.shared <= target.shared_bytes, label
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            assert threads <= 1024 and threads * usage.registers <= 65536, label
            assert usage.spills == 0, label


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_launch_asks_for_what_a_target_has(op: Op, target: Target) -> None:
    for work in _planned(op.name, target):
        for launch in work.plan.launches:
            label = f"{work.tactic.name}/{launch.symbol} {work.case.label}"
            assert launch.shared <= target.shared_bytes, label
            assert launch.block[0] * launch.block[1] * launch.block[2] <= 1024, label


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("columns", [(64, 64), (8, 128, 40), (4, 4), (2, 6, 10, 30), (1, 3)])
def test_standard_operators_compile(
    columns: tuple[int, ...], target: Target, compiled: Path
) -> None:
    for name, cuda in registry.STANDARD.items():
        specs = tuple(TensorSpec("x", DType.BF16, (5, n)) for n in columns)
        (tactic,) = cuda.tactics
        if name == "Add":
            specs = (replace(specs[0], shape=(5, -(-columns[0] // 8) * 8)),) * 2
        assert tactic.refuse({"axis": 1}, specs, target) is None
        (launch,) = tactic.plan({"axis": 1}, specs, target).launches
        job = nvrtc.Job(tactic.source, launch.defines, (launch.symbol,))
        assert nvrtc.compile(job, target, compiled).usage[launch.symbol].spills == 0


def test_what_concat_refuses_is_named() -> None:
    (tactic,) = registry.STANDARD["Concat"].tactics

    def refusal(*shapes: tuple[int, ...], axis: int = 1, dtype: DType = DType.BF16) -> str:
        specs = tuple(TensorSpec("x", dtype, s) for s in shapes)
        return tactic.refuse({"axis": axis}, specs, H200) or ""

    assert refusal((5, 8), (5, 8)) == refusal((5, 8), (5, 8), axis=-1) == ""
    assert "axis 0 of [[5, 8], [5, 8]]" in refusal((5, 8), (5, 8), axis=0)
    assert refusal(*[(5, 8)] * 8) == "" and "9 parts; up to 8" in refusal(*[(5, 8)] * 9)
    assert "rows and dtype must agree" in refusal((5, 8), (4, 8))
    assert "pairs of bytes" in refusal((5, 8), (5, 3), dtype=DType.U8)
    assert "up to 4 bytes" in refusal((5, 8), (5, 8), dtype=DType.I64)


@pytest.mark.parametrize("every", [False, True])
def test_a_cover_leaves_no_form_out(every: bool) -> None:
    for op in OPS:
        works = _planned(op.name, H200)
        few = covering(works, every)
        found, all_of_it = (set().union(*(forms(w, every) for w in some)) for some in (few, works))
        assert found == all_of_it
        assert {tactic_of(w, every) for w in few} == {tactic_of(w, every) for w in works}


def test_ops_share_what_is_compiled_of_a_kernel() -> None:
    made = {op.name: shared(op, H200) for op in OPS}
    assert all(made[op.name] for op in OPS if op.name != APART)
    one, other = "attention_decode", "paged_attention"
    names = {tactic_of(w) for name in (one, other) for w in _planned(name, H200)}
    assert {tactic_of(w) for name in (one, other) for w in made[name]} == names
    assert {
        "8 chunks, 12 warps",
        "64 chunks, 3 warps",
        "pairs",
        "pairs_split",
    } <= names, "not of any length"
    apart = sum(len(chosen(registry.get(name), H200)) for name in (one, other))
    assert len(made[one]) + len(made[other]) < apart / 2


def disassembler() -> Path | None:
    """nvdisasm of its wheel, or of a toolkit."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.name == "nvdisasm"]
    other = shutil.which("nvdisasm")
    return found[0] if found else Path(other) if other else None


def disassembled(job: nvrtc.Job, target: Target, compiled: Path, folder: Path) -> str:
    tool = disassembler()
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(nvrtc.compile(job, target, compiled).code)
    command = [tool, "-c", "-ndf", path]  # without an analysis of branches
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def jobs_with(header: str, target: Target) -> set[nvrtc.Job]:
    """Compilations that include `header`, of what is compiled of every op."""
    pairs = [(w.tactic.source, w.plan) for op in OPS for w in shared(op, target)]
    return {job for job in nvrtc.jobs_of(pairs) if header in nvrtc.sources(job.source)}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_fp4_matrix_instructions_are_where_the_target_has_them(
    target: Target, compiled: Path, tmp_path: Path
) -> None:
    seen = 0
    for name, instruction in FP4.items():
        for job in jobs_with(name, target):
            sass = disassembled(job, target, compiled, tmp_path)
            assert (instruction in sass) == target.fp4_mma, (job, target.name)
            seen += 1
    assert seen, "no kernel has the instruction"


def test_a_kernel_that_copies_for_wgmma_fences(compiled: Path, tmp_path: Path) -> None:
    """wgmma reads shared memory through the async proxy. What cp.async wrote there is announced by
    a plain arrival behind the copying thread's fence, never by an arrival of the copies themselves.
    """
    seen = 0
    for job in jobs_with("common/wgmma_sm90.cuh", H200):
        if ("WGMMA", "0") in job.defines:
            continue  # compiled without them
        for kernel in disassembled(job, H200, compiled, tmp_path).split(".section\t.text.")[1:]:
            if "GMMA" in kernel and "LDGSTS.E" in kernel:
                label = job, kernel.split(",")[0]
                assert "ARRIVES.LDGSTSBAR" not in kernel, label
                assert "FENCE.VIEW.ASYNC" in kernel, label
                seen += 1
    assert seen, "no kernel copies for wgmma"


def test_a_source_that_does_not_compile_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void k() { x = WIDTH; }')
    job = nvrtc.Job("bad.cu", (("WIDTH", "7"),), ("k",))
    with pytest.raises(nvrtc.InternalError, match=r"bad.cu -DWIDTH=7 for sm_90a does not compile"):
        nvrtc.compile(job, TARGETS["sm_90a"], None, tmp_path)


def test_a_missing_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.cu").write_text('extern "C" __global__ void k() {}')
    with pytest.raises(nvrtc.InternalError, match=r"has no extern \"C\" kernel \['other'\]"):
        nvrtc.compile(nvrtc.Job("one.cu", (), ("other",)), TARGETS["sm_90a"], None, tmp_path)


def test_a_launch_has_the_shared_memory_that_its_kernel_declares(tmp_path: Path) -> None:
    shutil.copytree(nvrtc.SOURCES / "common", tmp_path / "common")
    (tmp_path / "some.cu").write_text(
        '#include "common/ptx.cuh"\nDYNAMIC_SHARED(k, 100 << 10);\n'
        'extern "C" __global__ void k() {}\nextern "C" __global__ void none() {}'
    )
    job = nvrtc.Job("some.cu", (), ("k", "none"))
    cubin = nvrtc.compile(job, H200, tmp_path / "kept", tmp_path)
    assert nvrtc.compile(job, H200, tmp_path / "kept", tmp_path) == cubin
    one, more = Launch("k", (1, 1, 1), (32, 1, 1), ()), (100 << 10) + 16
    assert cubin.launched(replace(one, shared=DECLARED)).shared == 100 << 10
    assert cubin.launched(replace(one, shared=more)).shared == more, "and what rows take"
    for bad in (replace(one, shared=more - 17), replace(one, symbol="none", shared=4), one):
        with pytest.raises(InternalError, match=f"{bad.symbol} declares .* planned with"):
            cubin.launched(bad)
    with pytest.raises(InternalError, match="k takes 102400 bytes of shared memory, a block has"):
        nvrtc.compile(job, GB10, None, tmp_path)


def test_machine_code_is_compared_by_kernel(tmp_path: Path) -> None:
    """benchmarks/cubins.py: comments and the order of kernels do not count, code and folders do."""
    from benchmarks import cubins

    one = 'extern "C" __global__ void one(float* p) { *p += V; }\n'
    two = 'extern "C" __global__ void two(float* p) { *p *= V; }\n'
    target = TARGETS["sm_90a"]
    before: cubins.Snapshot = {}
    moved: cubins.Snapshot = {}
    changed: cubins.Snapshot = {}
    for found, text, value in (
        (before, one + two, "2.0f"),
        (moved, "// moved\n\n" + two + one, "2.0f"),
        (changed, one + two.replace("*=", "-="), "2.0f"),
    ):
        (tmp_path / "some.cu").write_text(text)
        job = nvrtc.Job("some.cu", (("V", value),), ("one", "two"))
        found[cubins.label(job, target)] = cubins.kernels(
            nvrtc.compile(job, target, None, tmp_path)
        )
    assert list(cubins.differences(before, moved)) == []
    (line,) = cubins.differences(before, changed)
    assert line.startswith("two: ") and line.endswith("(sm_90a some.cu -DV=2.0f)")
    assert list(cubins.differences(before, {})) == ["only before: sm_90a some.cu -DV=2.0f"]


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
    assert replace(first.usage["k"], registers=0) == nvrtc.KernelUsage(0, 0, 0, 0)


def test_the_report_is_of_this_compilation() -> None:
    """NVRTC's own cache, where a driver is, gives cubins back without the report."""
    job = nvrtc.Job("one.cu", (), ("k",))
    assert nvrtc._options(job, TARGETS["sm_90a"], Path(".")).no_cache
    with pytest.raises(InternalError, match="reports no kernel"):
        dict(nvrtc._usage(""))
