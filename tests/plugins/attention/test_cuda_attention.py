"""Paged attention's kernels where the op's own cases do not reach: long, ragged, permuted.

Compiling needs no GPU. Page elements beyond a row's context hold NaN, and so does scratch memory.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.device.gpu import architecture  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.op import Case, Tolerance  # noqa: E402
from spark_engine.plugins.ops.attention.paged_attention import OP  # noqa: E402
from spark_engine.tensors import Array, DType  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.cases.attention.paged_attention import Launch  # noqa: E402

NAME = architecture()
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000, 1024, 3001,
           5000)  # fmt: skip
B16, F8 = DType.BF16, DType.F8E4M3
# Bytes: of paged_prefill two registers on sm_121a over bf16; of paged_prefill_pair three there, of
# the 27B over e4m3; of paged_pairs, where parts meet, what is used before and after the loop.
SPARED = {"paged_prefill": 16, "paged_prefill_pair": 24, "paged_pairs": 128}
SERVED = {"27B": (24, 4), "35B": (16, 2), "122B": (32, 2), "two": (2, 1)}
SERVED |= {"three": (6, 2), "alone": (2, 2)}


def decode(lengths: tuple[int, ...], kv: DType, heads: int = 8, kv_heads: int = 1) -> Launch:
    """A row of each length (0: inert), slots out of order."""
    slots = tuple(len(lengths) - 1 - i if n else -1 for i, n in enumerate(lengths))
    starts = tuple(n - 1 if n else 1 << 30 for n in lengths)
    return Launch(
        1, slots, starts, tuple(int(n > 0) for n in lengths), heads, kv_heads, 256, 32,
        kv=kv, dtype=B16,
    )  # fmt: skip


def tiles(chunks: dict[int, tuple[int, ...]], kv: DType, heads: int, kv_heads: int) -> Launch:
    """slot -> (first position, tokens of each tile…)."""
    rows = []
    for slot, (start, *counts) in chunks.items():
        for n in counts:
            rows.append((slot, start, n))
            start += n
    slots, starts, counts_ = zip(*rows, strict=True)
    return Launch(64, slots, starts, counts_, heads, kv_heads, 256, 32, kv=kv, dtype=B16)


def as_case(launch: Launch) -> Case:
    return Case("long", launch.attrs, launch.inputs, ignore=launch.ignore)


def plans(launch: Launch, target: Target) -> list[cuda_node.Planned]:
    return list(cuda_node.planned(OP, as_case(launch), target))


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kv", [B16, F8])
@pytest.mark.parametrize("model", ["27B", "35B", "122B"])
def test_kernels_take_what_a_target_has(target: Target, kv: DType, model: str, cache: Path) -> None:
    heads, kv_heads = SERVED[model]
    for launch in (decode((5, 300), kv, heads, kv_heads), tiles({0: (0, 64)}, kv, heads, kv_heads)):
        found = plans(launch, target)
        shapes = {n.tactic.form: n for n in found}
        warps = {f"64 chunks, {8 if target.large_shared else 4} warps"}
        prefill = ("tiles", "pairs", "pairs_split") if target.wgmma else ("tiles", "tiles_pair")
        assert shapes.keys() == (warps if launch.tile == 1 else {*prefill})
        for work in shapes.values():
            jobs = nvrtc.jobs_of([(work.tactic.source, work.plan)])
            usage = {k: u for j in jobs for k, u in nvrtc.compile(j, target, cache).usage.items()}
            for made in work.plan.launches:
                spared = SPARED.get(made.symbol, 0)
                assert usage[made.symbol].spills <= spared, (made.symbol, usage[made.symbol])


def check_all(bench: cuda_node.Bench, launch: Launch) -> None:
    for tactic in range(len(plans(launch, bench.target))):
        check(bench, launch, tactic)


pytestmark_gpu = pytest.mark.skipif(NAME not in TARGETS, reason="needs one of the target GPUs")


def run(
    bench: cuda_node.Bench, launch: Launch, arrays: tuple[Array, ...], tactic: int = 0
) -> tuple[Array, ...]:
    case = replace(as_case(launch), inputs=lambda _: arrays)
    work = list(cuda_node.planned(OP, case, bench.target))[tactic]
    return cuda_node.run(bench, work, arrays)


def check(bench: cuda_node.Bench, launch: Launch, tactic: int = 0) -> None:
    """The kernels' outputs against the reference; untouched page elements keep their bits."""
    arrays = launch.inputs(np.random.default_rng(5))
    got = run(bench, launch, arrays, tactic)
    want = OP.reference(launch.attrs, arrays)
    for outputs in (got, want):
        launch.ignore(outputs)
    limits = Tolerance()
    wide = OP.tolerance(launch.attrs) if launch.kv is B16 else limits  # q is bf16 too
    assert cuda_node.compare("o", got[0], want[0], wide, False) == ""
    for g, w, before in zip(got[1:], want[1:], arrays[6:8], strict=True):
        g_bits, w_bits, old = (x.view(f"u{x.itemsize}") for x in (g, w, before))
        same = w_bits == old
        same[-1] = False
        assert (g_bits[same] == old[same]).all(), "a bystander changed"
        if g.dtype == np.uint8:
            cuda_node.compare("pages", g, w, limits, False)
        else:
            known = ~np.isnan(w.astype(np.float32))
            cuda_node.compare("pages", g[known], w[known], limits, False)


@pytestmark_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kv", [B16, F8])
class TestOnGpu:
    @pytest.mark.parametrize("model", SERVED)
    def test_ragged_lengths(self, bench: cuda_node.Bench, kv: DType, model: str) -> None:
        check_all(bench, decode((0, *LENGTHS, 0), kv, *SERVED[model]))

    @pytest.mark.parametrize("page", [16, 32, 128, 256])
    def test_other_pages(self, bench: cuda_node.Bench, kv: DType, page: int) -> None:
        check(bench, replace(decode((1, 16, 17, 600, 0), kv), page=page))
        check_all(bench, replace(tiles({1: (90, 64, 64, 9), 0: (0, 17)}, kv, 2, 1), page=page))

    @pytest.mark.parametrize(("dim", "half"), [(32, 4), (64, 8), (64, 32), (128, 16)])
    def test_other_heads(self, bench: cuda_node.Bench, kv: DType, dim: int, half: int) -> None:
        check(bench, replace(decode((1, 65, 700), kv, 4, 2), dim=dim, half=half))
        check_all(bench, replace(tiles({1: (90, 64, 9), 0: (0, 17)}, kv, 4, 2), dim=dim, half=half))

    def test_long(self, bench: cuda_node.Bench, kv: DType) -> None:
        check(bench, decode((20_001, 2), kv))

    @pytest.mark.parametrize("model", ["27B", "35B", "122B"])
    def test_tiles_from_anywhere(self, bench: cuda_node.Bench, kv: DType, model: str) -> None:
        spans = {2: (0, 64, 64, 1), 0: (61, 64, 5), 5: (1000, 64), 3: (63, 1), 7: (128, 64, 64)}
        check_all(bench, tiles(spans, kv, *SERVED[model]))

    def test_tiles_far_on(self, bench: cuda_node.Bench, kv: DType) -> None:
        """Of 511's nine tiles of keys the last is a separate part that query 0 does not see."""
        spans = {1: (8127, 64, 64), 0: (4096, 64, 3), 2: (511, 64)}
        check_all(bench, tiles(spans, kv, 4, 2))

    @pytest.mark.parametrize("tactic", range(6))
    def test_odd_splits_of_a_prompt_agree(
        self, bench: cuda_node.Bench, kv: DType, tactic: int
    ) -> None:
        """A prompt in one launch, and in two cut at an odd place, on the pages the first left."""
        whole = tiles({0: (0, 64, 64, 64, 8)}, kv, 4, 2)
        if tactic >= len(plans(whole, bench.target)):
            pytest.skip("this target has one tactic of tiles")
        arrays = whole.inputs(np.random.default_rng(6))
        want = run(bench, whole, arrays, tactic)
        first = tiles({0: (0, 64, 37)}, kv, 4, 2)
        second = tiles({0: (101, 64, 35)}, kv, 4, 2)
        tokens = arrays[0].reshape(4 * 64, -1)
        got, pages = [], arrays[6:8]
        for part, begin, n in ((first, 0, 101), (second, 101, 99)):
            qkv = np.full((128, tokens.shape[1]), np.nan, tokens.dtype)
            qkv[:n] = tokens[begin : begin + n]
            steps = [np.asarray(x, np.int32) for x in (part.slots, part.starts, part.counts)]
            turns = np.zeros((128, 3), np.int32)
            turns[:n] = arrays[4].reshape(-1, 3)[begin : begin + n]
            constants = (*arrays[1:4], turns.reshape(2, -1), arrays[5])
            given = (qkv, *constants, *pages, arrays[8], *steps)
            o, *pages = run(bench, part, given, tactic)
            got.append(o[:n])
        joined = np.concatenate(got)
        assert joined.tobytes() == want[0][: len(joined)].tobytes()
        for g, w in zip(pages, want[1:], strict=True):
            assert g.tobytes() == w.tobytes()

    def test_company_changes_no_bit(self, bench: cuda_node.Bench, kv: DType) -> None:
        """Rows permuted, and one alone, give the bits they gave before."""
        launch = decode((0, *LENGTHS), kv, 24, 4)
        arrays = launch.inputs(np.random.default_rng(8))
        want = run(bench, launch, arrays)[0]
        order = np.random.default_rng(1).permutation(len(want))
        for rows in (order, np.asarray([17])):
            qkv, *constants, turns = arrays[:5]
            picked = [qkv[rows], *constants, turns[rows], *arrays[5:9]]
            picked += [a[rows] for a in arrays[9:]]
            got = run(bench, launch, tuple(picked))[0]
            assert got.tobytes() == want[rows].tobytes()
