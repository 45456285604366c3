"""The experts and the router on the GPU, at routings that the ops' own cases do not have."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.op import Attrs, Case, Tolerance  # noqa: E402
from spark_engine.plugins.common import random_arrays  # noqa: E402
from spark_engine.plugins.ops.moe import grouped_moe, moe_norm_quant  # noqa: E402
from spark_engine.plugins.ops.norm import norm_quant  # noqa: E402
from spark_engine.plugins.ops.rowwise import silu_mul  # noqa: E402
from spark_engine.tensors import Array, DType  # noqa: E402
from tests.plugins import cuda_node, packed_node  # noqa: E402
from tests.plugins.moe.test_moe_grouped import squeezed  # noqa: E402
from tests.plugins.test_cuda_compile import disassembled  # noqa: E402

OP = grouped_moe.OP
Sizes = tuple[int, int, int, int]  # experts and the shared one, chosen and it, H, I
TINY: Sizes = (13, 5, 256, 128)
MANY: Sizes = (257, 9, 256, 128)
NEXT: Sizes = (513, 11, 256, 128)  # the 80B's experts
LARGE: Sizes = (12, 9, 2048, 512)
LARGER: tuple[Sizes, ...] = ((12, 9, 3072, 1024), (13, 11, 4096, 1024))  # 122B, 397B
SERVED = ((257, *LARGE[1:]), (257, *LARGER[0][1:]), (513, *LARGER[1][1:]))  # all their experts
OWN_ORDER = "tiles_128"  # of sums; parts are bf16
# Formats that round activations to codes.
QUANTISED = ("nvfp4_a4", "fp8", "fp8_block", "fp8_channel")
Route = Callable[[np.random.Generator, int, Sizes], Array]


def uniform(rng: np.random.Generator, tokens: int, sizes: Sizes) -> Array:
    """Distinct experts at random, the shared one last."""
    experts, chosen = sizes[0] - 1, sizes[1] - 1
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen]
    return np.concatenate([ids, np.full((tokens, 1), experts)], axis=1).astype(np.int32)


def same(rng: np.random.Generator, tokens: int, sizes: Sizes) -> Array:
    """All tokens to the same experts; those with poisoned weights get none."""
    return np.repeat(uniform(rng, 1, sizes), tokens, axis=0)


def crowded(rng: np.random.Generator, tokens: int, sizes: Sizes) -> Array:
    """Expert 3 in every row, the others at random."""
    ids = uniform(rng, tokens, sizes)
    missing = ~(ids == 3).any(axis=1)
    ids[missing, 0] = 3
    return ids


@dataclass(frozen=True)
class Routed(Case):
    """A case that is planned without its experts: to make them takes longer than all else."""

    tokens: int = 0
    sizes: Sizes = TINY

    def planned(self, target: Target) -> list[cuda_node.Planned]:
        experts, chosen, hidden, inner = self.sizes
        dims = {"tokens": self.tokens, "k": chosen, "E": experts, "H": hidden, "I": inner}
        specs = packed_node.declared(OP, self.attrs, **dims)
        return list(cuda_node.planned_for(OP, self, specs, target))


@functools.lru_cache(8)
def stacked(kind: str, sizes: Sizes) -> tuple[Array, ...]:
    return grouped_moe.arrays(np.random.default_rng(5), kind, 1, sizes)[3:]


def case(tokens: int, sizes: Sizes, route: Route = uniform, kind: str = "nvfp4") -> Routed:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, tokens, sizes[2])
        weights = random_arrays.positive(rng, tokens, sizes[1], low=0.0, high=1.0)
        params = [param.copy() for param in stacked(kind, sizes)]
        ids = route(rng, tokens, sizes)
        unused = np.setdiff1d(np.arange(sizes[0]), ids)
        for name, param in zip(grouped_moe.PARAMS[kind], params, strict=True):
            if kind in ("nvfp4", "nvfp4_a4", "int4") and name.endswith("_scale"):
                param[unused] = 1 if kind == "int4" else 448  # packed ones hold no NaN
            elif param.dtype.kind != "u":
                param[unused] = np.nan
        if tokens > 2:
            x[2] = np.nan
        return x.astype(DType.BF16.numpy), ids, weights, *params

    label = f"{kind} {tokens} tokens {route.__name__} {sizes}"
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    return Routed(label, attrs, make, tokens=tokens, sizes=sizes)


CASES = [
    *(case(n, TINY) for n in (1, 2, 4, 5, 33)),
    *(case(n, TINY, kind="dense") for n in (1, 7, 40)),
    *(case(n, MANY) for n in (1, 3, 17, 129)),
    *(case(n, NEXT, kind=kind) for kind in ("nvfp4", "fp8_block") for n in (1, 17, 129)),
    case(40, TINY, same),
    case(60, MANY, same),
    case(200, MANY, crowded),
    *(case(n, LARGE) for n in (1, 4, 6, 30, 140)),
    case(700, TINY),
    case(300, LARGE, crowded),
    case(260, TINY, kind="dense"),
    case(600, LARGE, crowded),
    case(530, (13, 5, 336, 144)),  # half k-slabs
    *(case(600, LARGE, crowded, kind) for kind in ("dense", "fp8", "nvfp4_a4")),
    case(530, (13, 5, 112, 144), kind="nvfp4_a4"),
    case(1030, MANY, kind="nvfp4_a4"),
    case(520, TINY, kind="dense"),
    *(case(n, TINY, kind=kind) for kind in QUANTISED for n in (1, 7, 40)),
    *(case(n, MANY, kind=kind) for kind in QUANTISED for n in (17, 129)),
    case(30, (12, 9, 1024, 512), kind="fp8_block"),
    case(600, LARGE, crowded, kind="fp8_block"),
    case(1030, MANY, kind="fp8_block"),
    case(520, (5, 3, 512, 256), same, kind="fp8_block"),
    case(600, LARGE, crowded, kind="fp8_channel"),
    case(1030, MANY, kind="fp8_channel"),
    case(520, (5, 3, 512, 256), same, kind="fp8_channel"),
    *(case(n, sizes) for sizes in LARGER for n in (1, 4, 30, 140)),
    *(case(n, LARGER[0], kind=kind) for kind in ("dense", *QUANTISED) for n in (1, 30)),
    *(case(600, LARGER[1], crowded, kind) for kind in ("nvfp4", "nvfp4_a4")),
    *(case(n, TINY, kind="int4") for n in (1, 4, 33, 520)),
    *(case(n, LARGE, crowded, "int4") for n in (140, 600)),
    case(530, (13, 5, 352, 160), kind="int4"),  # half k-slabs
]


def with_bf16_inside(one: Case, arrays: tuple[Array, ...], parts: bool) -> Array:
    """The reference with activations between the two products as the kernels have them: bf16,
    where the format does not round them itself; an expert's output too, if `parts`."""
    kind = str(one.attrs["format"])
    if kind in QUANTISED:
        return OP.reference(one.attrs, arrays)[0]
    x, ids, weights, *params = arrays
    y = np.zeros(x.shape, np.float64)
    for e in np.unique(ids):
        rows, places = np.nonzero(ids == e)
        own = {n: p[e] for n, p in zip(grouped_moe.PARAMS[kind], params, strict=True)}
        up = grouped_moe._project(kind, own, "w13", x[rows].astype(np.float32))
        inner = silu_mul.evaluate(up).astype(DType.BF16.numpy).astype(np.float32)
        down = grouped_moe._project(kind, own, "w2", inner)
        down = (down.astype(DType.BF16.numpy) if parts else down).astype(np.float64)
        y[rows] += weights.astype(np.float64)[rows, places][:, None] * down
    return y.astype(DType.BF16.numpy)


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["nvfp4", "int4", "fp8_block", "fp8_channel"])
@pytest.mark.parametrize("tokens", [1, 128, 256, 1024, 4096])
@pytest.mark.parametrize("sizes", SERVED, ids=str)
def test_served_sizes_compile_without_spills(
    sizes: Sizes, tokens: int, kind: str, target: Target, cache: Path
) -> None:
    works = case(tokens, sizes, kind=kind).planned(target)
    tiled = not kind.startswith("fp8")
    few, many = ["each"] * (tiled and tokens < 5), ["tiles"] * tiled
    more = ["tiles_128"] * (tokens >= 512 and (tiled or target.wgmma))
    assert [w.tactic.name for w in works] == [*few, "grouped", *many, *more]
    for work in works:
        for job in nvrtc.jobs_of([(work.tactic.source, work.plan)]):
            usage = nvrtc.compile(job, target, cache).usage
            for launch in work.plan.launches:
                spared = 16 if launch.symbol == "wide_down" else 0  # bytes: its item, once a tile
                assert usage[launch.symbol].spills <= spared, (launch.symbol, usage[launch.symbol])


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["dense", *QUANTISED])
@pytest.mark.parametrize("sizes", SERVED[1:], ids=str)
def test_decode_of_other_formats_compiles_without_spills(
    sizes: Sizes, kind: str, target: Target, cache: Path
) -> None:
    works = case(8, sizes, kind=kind).planned(target)
    (work,) = (w for w in works if w.tactic.name == "grouped")
    for job in nvrtc.jobs_of([(work.tactic.source, work.plan)]):
        for usage in nvrtc.compile(job, target, cache).usage.values():
            assert (usage.spills, usage.stack) == (0, 0), usage


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["dense", "fp8", "nvfp4_a4"])
def test_prefills_of_other_formats_compile_without_spills(
    kind: str, target: Target, cache: Path, tmp_path: Path
) -> None:
    works = {w.tactic.name: w for w in case(512, SERVED[0], kind=kind).planned(target)}
    work = works["tiles_128"]
    for job in nvrtc.jobs_of([(work.tactic.source, work.plan)]):
        usage = nvrtc.compile(job, target, cache).usage
        for launch in work.plan.launches:
            assert usage[launch.symbol].spills == 0, (launch.symbol, usage[launch.symbol])
        if kind == "nvfp4_a4" and target.fp4_mma:
            assert disassembled(job, target, cache, tmp_path).count("OMMA") >= 2 * 64
        if kind == "dense" and target.wgmma:  # of a k-slab's four products the last alone waits
            sass = disassembled(job, target, cache, tmp_path)
            assert 0 < 4 * sass.count(", gsb0 ;") == sass.count("HGMMA")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("one", CASES, ids=lambda c: c.label)
def test_experts_equal_the_reference(one: Routed, bench: cuda_node.Bench) -> None:
    works = one.planned(bench.target)
    assert works
    for work in works:
        bench.functions(work.tactic.source, work.plan)  # compiled before experts are drawn
    arrays = one.inputs(np.random.default_rng(5))
    made = [cuda_node.run(bench, work, arrays)[0] for work in works]
    (want,) = OP.reference(one.attrs, arrays)
    found = []
    for work, got in zip(works, made, strict=True):
        label = f"{work.tactic.name} {one.label}"
        own = work.tactic.name == OWN_ORDER
        # Sums of Hopper's FP8 products have 13 bits: 0.5 % of the inner codes are another, and in
        # numpy one of them moves an element of the cases by 0.14 of the spread.
        short = own and one.attrs["format"] in ("fp8_block", "fp8_channel")
        element = 2.0**-2 if short else 2.0**-5
        cuda_node.compare(label, got, want, Tolerance(element=element), False)
        rounds = one.attrs["format"] == "int4"  # weights to bf16, too
        norm = 5e-3 if rounds else 4e-3
        if one.attrs["format"] in QUANTISED:
            norm = 1e-2  # a code may round differently
        near = Tolerance(norm=norm, element=element if norm > 4e-3 or own else 2.0**-7)
        cuda_node.compare(label, got, with_bf16_inside(one, arrays, own), near, False)
        if not own:
            found.append(got.tobytes())
    assert len(set(found)) == 1, "the tactics differ in bits"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("quant", "n"), [("none", 1), ("fp8", 2), ("fp8_block", 1), ("nvfp4", 1), ("fp8_token", 1)]
)
@pytest.mark.parametrize("kind", ["nvfp4", "dense", "int4", *QUANTISED])
@pytest.mark.parametrize("tokens", [1, 4, 7, 140, 600])
def test_the_norm_in_the_same_launch_changes_no_bit(
    tokens: int, kind: str, quant: str, n: int, bench: cuda_node.Bench
) -> None:
    """moe_norm_quant, each tactic, is grouped_moe and then norm_quant, in chunks too."""
    one, rng = case(tokens, TINY, crowded, kind), np.random.default_rng(9)
    x, ids, weights, *params = one.inputs(rng)
    residual = (3 * rng.standard_normal(x.shape)).astype(x.dtype)
    norm = rng.uniform(0.5, 2, x.shape[1]).astype(np.float32)
    scales = [rng.uniform(3e-3, 3e-2, n).astype(np.float32)] if quant in ("fp8", "nvfp4") else []
    attrs: Attrs = {"eps": 1e-6, "keep": 1, "quant": quant, "n": n}
    works = list(cuda_node.planned(OP, one, bench.target))
    apart = Case("", {**attrs, "add": 1}, lambda rng: (x, norm, residual, *scales))
    (second,) = cuda_node.planned(norm_quant.OP, apart, bench.target)
    wanted = {}
    for work in (works[0], *(w for w in works if w.tactic.name == OWN_ORDER)):
        (y,) = cuda_node.run(bench, work, (x, ids, weights, *params))
        wanted[work.tactic.name] = cuda_node.run(bench, second, (y, norm, residual, *scales))
    given = (x, ids, weights, residual, norm, *params, *scales)
    whole = Case("", {**attrs, **one.attrs}, lambda rng: given)
    found = list(cuda_node.planned(moe_norm_quant.OP, whole, bench.target))
    assert [w.tactic.name for w in found] == [w.tactic.name for w in works]
    if tokens > 48:
        inner = cuda_node.specs_of(OP, one.attrs, (x, ids, weights, *params))
        packed = cuda_node.packed_specs(OP, one.attrs, inner)
        small = squeezed(one.attrs, packed, bench.target, 48)
        chunked = cuda_node.planned(moe_norm_quant.OP, whole, small)
        found += [w for w in chunked if w.tactic.name == "grouped"]
        assert [n.symbol for n in found[-1].plan.launches].count("moe_combine") > 1
    for work in found:
        got = cuda_node.run(bench, work, given)
        want = wanted.get(work.tactic.name, wanted[works[0].tactic.name])
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.tobytes() == b.tobytes(), (work.tactic.name, index)


@pytest.mark.gpu
def test_a_tokens_bits_do_not_depend_on_its_company(bench: cuda_node.Bench) -> None:
    arrays = case(64, TINY, crowded).inputs(np.random.default_rng(6))
    arrays[0][2] = 1
    whole = _run_first(bench, arrays, 64)
    order = np.random.default_rng(7).permutation(64)
    mixed = (*(a[order] for a in arrays[:3]), *arrays[3:])
    assert _run_first(bench, mixed, 64).tobytes() == whole[order].tobytes()
    few = (*(a[10:13] for a in arrays[:3]), *arrays[3:])
    assert _run_first(bench, few, 3).tobytes() == whole[10:13].tobytes()


def _run_first(bench: cuda_node.Bench, arrays: tuple[Array, ...], tokens: int) -> Array:
    one = Case("", {"format": "nvfp4", "dtype": "bf16"}, lambda rng: arrays)
    work = next(cuda_node.planned(OP, one, bench.target))
    return cuda_node.run(bench, work, arrays)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nvfp4", "dense", "int4", *QUANTISED])
def test_chunks_give_the_bits_of_one_launch(kind: str, bench: cuda_node.Bench) -> None:
    one = case(140, TINY, crowded, kind)
    arrays = one.inputs(np.random.default_rng(8))
    specs = cuda_node.packed_specs(OP, one.attrs, cuda_node.specs_of(OP, one.attrs, arrays))
    found = []
    for tokens, chunks in ((140, 1), (70, 2), (48, 3), (3, 47)):
        target = squeezed(one.attrs, specs, bench.target, tokens)
        works = cuda_node.planned(OP, one, target)
        (work,) = (w for w in works if w.tactic.name == "grouped")
        assert [n.symbol for n in work.plan.launches].count("moe_up") == chunks
        found.append(cuda_node.run(bench, work, arrays)[0].tobytes())
    assert len(set(found)) == 1
