"""Attention's kernels over rounds of drafts: the bits are those of one token at a time.

Compiling needs no GPU. Page elements beyond a row's context hold NaN, and so does scratch memory.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from pathlib import Path  # noqa: E402

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.op import Attrs, Case, Op  # noqa: E402
from spark_engine.plugins.kernels.attention import attention_round_kernels
from spark_engine.plugins.ops.attention import append_kv, attention_decode, paged_attention
from spark_engine.tensors import Array, DType  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.cases.attention.paged_attention import Launch  # noqa: E402

B16, F8 = DType.BF16, DType.F8E4M3
SERVED = {"27B": (24, 4), "35B": (16, 2), "122B": (32, 2), "three": (6, 2)}
SERVED |= {"alone": (2, 2)}
# Tiles, pages, sizes of chunks and numbers of chunks (8 and 9 are merged unlike) change within.
STARTS = (0, 1, 13, 15, 61, 63, 126, 190, 318, 510, 893, 1021, 1022, 1087, 1151, 1535, 2046, 4093)
Columns = tuple[int, ...]


def rounds(tile: int, kv: DType, heads: int, kv_heads: int, starts: Columns = STARTS) -> Launch:
    """A row at each start with 1 to `tile` tokens, most of them full, and two inert ones."""
    n = len(starts)
    counts = tuple(tile if i % 3 else 1 + i // 3 % tile for i in range(n))
    slots = (-1, *range(n - 1, -1, -1), n)
    return Launch(
        tile, slots, (7, *starts, 0), (0, *counts, 0), heads, kv_heads, 256, 32, kv=kv, dtype=B16
    )


def fused(launch: Launch, quant: str = "fp8") -> Attrs:
    return {**launch.attrs, "keep": 1, "quant": quant, "n": 1}


def works(op: Op, attrs: Attrs, arrays: tuple[Array, ...], target: Target) -> list:  # type: ignore[type-arg]
    return list(cuda_node.planned(op, Case("round", attrs, lambda _: arrays), target))


def given(launch: Launch) -> tuple[Array, ...]:
    """Operands of attention_decode; scores rise late, and what is not there has gates alone."""
    qkv, *rest = launch.inputs(np.random.default_rng(launch.tile))
    rest[0] *= 4  # the queries' norm
    size = 2 * launch.heads * launch.dim
    pairs = qkv[:, :size].reshape(-1, launch.heads, 2, launch.dim)
    dead = np.arange(launch.tile) >= np.asarray(launch.counts)[:, None]
    pairs[dead.reshape(-1), :, 1] = 1
    qkv[:, :size] = pairs.reshape(len(qkv), -1)
    return (qkv, *rest, np.asarray([0.01], np.float32))


def compile_side_by_side(found: list[cuda_node.Planned], target: Target, cache: Path) -> None:
    jobs = nvrtc.jobs_of([(w.tactic.source, w.plan) for w in found])
    nvrtc.compile_all(jobs, target, cache, os.cpu_count() or 1)


def one_by_one(arrays: tuple[Array, ...], tile: int) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """(t, the launch of token t of every row), without the pages that the ones before made."""
    qkv, *rest = arrays
    slots, starts, counts = rest[8:11]
    rows = len(slots)
    for t in range(tile):
        there = counts > t
        token = np.ascontiguousarray(qkv.reshape(rows, tile, -1)[:, t])
        steps = (np.where(there, slots, -1), starts + t, there)
        yield t, (token, *rest[:8], *(np.asarray(x, np.int32) for x in steps), *rest[11:])


def check(launch: Launch, seed: int, bench: cuda_node.Bench, cache: Path) -> None:
    """Every tactic of paged_attention against the reference."""
    arrays, op = launch.inputs(np.random.default_rng(seed)), paged_attention.OP
    found = works(op, launch.attrs, arrays, bench.target)
    compile_side_by_side(found, bench.target, cache)
    want = op.reference(launch.attrs, arrays)
    launch.ignore(want)
    for work in found:
        got = cuda_node.run(bench, work, arrays)
        launch.ignore(got)
        limits = op.tolerance(launch.attrs)
        cuda_node.compare(work.tactic.name, got[0], want[0], limits, False)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kv", [B16, F8], ids=str)
@pytest.mark.parametrize("tile", range(2, 9))
def test_every_order_of_one_token_is_there(tile: int, kv: DType, target: Target) -> None:
    """An invariant build finds what decode and every round can do alike."""
    for heads, kv_heads in SERVED.values():
        launch = rounds(tile, kv, heads, kv_heads, (5, 100))
        arrays = given(launch)
        found = works(attention_decode.OP, fused(launch), arrays, target)
        _, alone = next(one_by_one(arrays, tile))
        ones = works(attention_decode.OP, {**fused(launch), "tile": 1}, alone, target)
        assert [w.tactic.name for w in ones] == [w.tactic.name for w in found]
        shared = [w for w in found if dict(w.plan.launches[0].defines)["QUERIES"] != "1"]
        assert shared, "no tactic reads a row's keys once for several queries"


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kv", [B16, F8], ids=str)
@pytest.mark.parametrize("model", ["27B", "122B"])
def test_kernels_take_what_a_target_has(model: str, kv: DType, target: Target, cache: Path) -> None:
    launch = rounds(4, kv, *SERVED[model], (5, 300))
    seen = set()
    for work in works(attention_decode.OP, fused(launch), given(launch), target):
        (made,) = work.plan.launches
        form = tuple(v for n, v in made.defines if n in ("READERS", "QUERIES"))
        if form in seen:
            continue
        seen.add(form)
        (job,) = nvrtc.jobs_of([(work.tactic.source, work.plan)])
        usage = nvrtc.compile(job, target, cache).usage["paged_round"]
        assert usage.spills == 0, (form, usage)
        assert usage.registers * made.block[0] <= 65536, (form, usage)
    widest = max(int(queries) for queries, _ in seen)
    assert widest == 4, "four drafts' keys are read once"


@pytest.mark.parametrize(("dim", "half", "most"), [(64, 8, 1), (128, 16, 4)])
def test_teams_take_heads_with_rows_that_fill_the_banks(dim: int, half: int, most: int) -> None:
    launch = replace(rounds(3, F8, 4, 2, (5, 100)), dim=dim, half=half)
    arrays = given(launch)
    found = works(attention_decode.OP, fused(launch), arrays, TARGETS["sm_90a"])
    assert max(int(dict(w.plan.launches[0].defines)["TEAM"]) for w in found) == most


def test_runs_fit_their_list() -> None:
    """What list_runs may make of a row, for all lengths up to 3000 and all sizes of chunks."""

    def size(length: int, chunk: int, most: int) -> int:
        chunks = min(most, max(1, (length + chunk // 2) // chunk))
        return max(64, -(-length // (64 * chunks)) * 64)

    starts = np.array([*range(0, 200), *range(900, 1200), *range(2000, 2200)])
    for chunk, most in itertools.product((128, 256, 512, 1024), (8, 64)):
        sizes = np.array([size(n, chunk, most) for n in range(1, 3001)])
        for n in range(2, 3001):  # the kernel looks only there for another size
            assert sizes[n - 1] == sizes[n - 2] or n % 64 < 2
        for tile, queries in itertools.product(range(2, 9), range(1, 5)):
            for live in range(tile + 1):
                runs, before, own = 0, np.full(len(starts), -1), np.zeros(len(starts), int)
                for t in range(tile):
                    now = sizes[starts + t] if t < live else np.zeros(len(starts), int)
                    own = np.where(now == before, own + 1, 0)  # of this size, those before t
                    runs, before = runs + (own % queries == 0), now
                assert np.max(runs) <= attention_round_kernels.runs_of(tile, queries)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", [B16, F8], ids=str)
class TestOnGpu:
    @pytest.mark.parametrize(
        ("tile", "model"),
        [(2, "three"), (3, "alone"), (4, "27B"), (4, "35B"), (5, "three"), (8, "35B")],
    )
    def test_a_round_has_the_bits_of_its_tokens(
        self, bench: cuda_node.Bench, cache: Path, kv: DType, tile: int, model: str
    ) -> None:
        """For each tactic, that is for each order of the sums: y, its codes, and the pages."""
        launch = rounds(tile, kv, *SERVED[model])
        arrays, op, attrs = given(launch), attention_decode.OP, fused(launch)
        live = np.arange(tile) < np.asarray(launch.counts)[:, None]
        found = works(op, attrs, arrays, bench.target)
        compile_side_by_side(found, bench.target, cache)
        for work in found:
            pages, parts = list(arrays[6:8]), []
            for _, token in one_by_one(arrays, tile):
                at = (*token[:6], *pages, *token[8:])
                ones = works(op, {**attrs, "tile": 1}, at, bench.target)
                (same,) = (w for w in ones if w.tactic.name == work.tactic.name)
                *pages, y, codes = cuda_node.run(bench, same, at)
                parts.append((y, codes))
            got_k, got_v, *got = cuda_node.run(bench, work, arrays)
            for g, w in zip((got_k, got_v), pages, strict=True):
                assert g[:-1].tobytes() == w[:-1].tobytes(), work.tactic.name
            for g, alone in zip(got, zip(*parts, strict=True), strict=True):
                want = np.stack(alone, axis=1)
                g = g.reshape(want.shape)
                off = np.argwhere((g[live] != want[live]).any(axis=-1)).ravel()
                assert g[live].tobytes() == want[live].tobytes(), (work.tactic.name, off)

    def test_long_rows(self, bench: cuda_node.Bench, cache: Path, kv: DType) -> None:
        """Chunks at their greatest number; every tactic against the reference."""
        launch = rounds(4, kv, 8, 1, (20_000, 8_190, 2))
        check(launch, 3, bench, cache)

    @pytest.mark.parametrize(("dim", "half", "page"), [(32, 4, 16), (64, 8, 256), (128, 16, 32)])
    def test_other_sizes(
        self, bench: cuda_node.Bench, cache: Path, kv: DType, page: int, dim: int, half: int
    ) -> None:
        launch = replace(rounds(3, kv, 4, 2), dim=dim, half=half, page=page)
        check(launch, 4, bench, cache)

    @pytest.mark.parametrize("tile", [1, 4, 8, 64])
    def test_append_kv_has_the_bits_of_attention(
        self, bench: cuda_node.Bench, kv: DType, tile: int
    ) -> None:
        starts = (0, 14, 61, 126, 1021)
        counts = tuple(min(tile, 1 + 2 * i) for i in range(5))
        launch = Launch(tile, (4, 3, -1, 0, 1), starts, counts, 6, 2, 256, 32, kv=kv, dtype=B16)
        launch = replace(launch, counts=(*counts[:2], 0, *counts[3:]))
        arrays = launch.inputs(np.random.default_rng(2))
        (first, *_) = works(paged_attention.OP, launch.attrs, arrays, bench.target)
        _, *want = cuda_node.run(bench, first, arrays)
        attrs = {k: v for k, v in launch.attrs.items() if k != "heads"}
        packed = np.ascontiguousarray(arrays[0][:, -2 * launch.kv_heads * launch.dim :])
        assert packed.dtype == ml_dtypes.bfloat16
        operands = (packed, *arrays[2:])
        (work,) = works(append_kv.OP, attrs, operands, bench.target)
        for got, w in zip(cuda_node.run(bench, work, operands), want, strict=True):
            assert got[:-1].tobytes() == w[:-1].tobytes()
