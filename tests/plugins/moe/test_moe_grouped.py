"""How `grouped` cuts a node into chunks of tokens: what is launched, over which rows, in how much
memory. The index arithmetic of the kernels, in numpy, replaces them.
"""

from dataclasses import replace

import numpy as np
import pytest

from spark_engine.kernel import (
    GB10,
    H200,
    TARGETS,
    Arg,
    Attrs,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Specs,
    Target,
)
from spark_engine.plugins.formats import expert_layout
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.kernels.moe.experts import experts_grouped_kernels, experts_problem
from spark_engine.plugins.launch import node_of
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.tensors import Array
from tests.plugins import packed_node

OP = grouped_moe.OP
(GROUPED,) = (t for t in OP.cuda.tactics if t.name == "grouped")
KINDS = tuple(name for name, form in FORMATS.items() if form.experts is not None)
TOKENS = (1, 128, 129, 284, 285, 512, 1024, 1309, 2048, 4096, 8192)
SIZES = (257, 9, 2048, 512)  # experts and the shared one, chosen and it, H, I: the 35B's
TINY = (13, 3, 64, 128)


def specs(kind: str, tokens: int, sizes: tuple[int, int, int, int]) -> tuple[Attrs, Specs]:
    experts, chosen, hidden, inner = sizes
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    found = packed_node.declared(OP, attrs, tokens=tokens, k=chosen, E=experts, H=hidden, I=inner)
    return attrs, packed_node.packed_specs(OP, attrs, found)


def problem(attrs: Attrs, packed: Specs) -> experts_problem.Problem:
    return experts_problem.Problem.of(node_of(OP, attrs, packed, GB10))


def with_shared(target: Target, nbytes: int) -> Target:
    """The target with so much shared memory a block."""
    return replace(target, architecture=replace(target.architecture, shared_bytes=nbytes))


def squeezed(attrs: Attrs, packed: Specs, target: Target, tokens: int) -> Target:
    """The target with shared memory for the ids of so many tokens."""
    p = problem(attrs, packed)
    w = experts_grouped_kernels.config_of(p, target)
    fixed = experts_grouped_kernels.fixed_bytes(
        p, w.columns, min(w.depth, experts_grouped_kernels.SHALLOW)
    )
    ids = expert_layout.padded(2 * tokens * p.chosen, 16)
    return with_shared(target, experts_grouped_kernels.STATIC + fixed + ids)


def scalars(launch: Launch) -> list[int]:
    return [int(a.value) for a in launch.args if isinstance(a, Scalar)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_tokens_is_served(kind: str, target: Target) -> None:
    for tokens in TOKENS:
        attrs, packed = specs(kind, tokens, SIZES)
        assert GROUPED.refuse(attrs, packed, target) is None
        plan = GROUPED.plan(attrs, packed, target)
        for launch in plan.launches:
            assert launch.shared + experts_grouped_kernels.STATIC <= target.shared_bytes
        rows = [scalars(n) for n in plan.launches if n.symbol == "moe_up"]
        if len(rows) == 1:
            assert rows == [[tokens]] and "CHUNKED" not in dict(plan.launches[0].defines)
            continue
        assert all(dict(n.defines)["CHUNKED"] == "1" for n in plan.launches)
        covered = [t for count, first in rows for t in range(first, first + count)]
        assert covered == list(range(tokens)), "each token once, in order"


@pytest.mark.parametrize(
    ("kind", "target", "chunks"),
    [
        ("nvfp4", GB10, {128: 1, 284: 1, 285: 1, 1308: 1, 1309: 2, 4096: 4, 8192: 7}),
        ("nvfp4_a4", GB10, {2218: 1, 2219: 2, 8192: 4}),
        ("fp8", GB10, {625: 1, 626: 2, 4096: 7, 8192: 14}),
        ("fp8_block", GB10, {625: 1, 8192: 14}),
        ("dense", GB10, {625: 1, 8192: 14}),
        ("nvfp4", H200, {8192: 1}),
        ("fp8", H200, {4096: 1, 8192: 2}),
    ],
    ids=str,
)
def test_chunks_are_as_few_as_the_ids_allow(
    kind: str, target: Target, chunks: dict[int, int]
) -> None:
    for tokens, count in chunks.items():
        plan = GROUPED.plan(*specs(kind, tokens, SIZES), target)
        assert [n.symbol for n in plan.launches].count("moe_up") == count, tokens


def test_the_ring_is_deep_where_the_ids_leave_memory() -> None:
    def depth(tokens: int) -> str:
        plan = GROUPED.plan(*specs("nvfp4", tokens, SIZES), GB10)
        return dict(plan.launches[0].defines)["DEPTH"]

    assert [depth(n) for n in (1, 284, 285, 4096)] == ["3", "3", "2", "2"]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_share_the_scratch_memory_of_one(kind: str) -> None:
    attrs, packed = specs(kind, 8192, SIZES)
    w = experts_grouped_kernels.config_of(problem(attrs, packed), GB10)
    one = GROUPED.plan(*specs(kind, w.tokens, SIZES), GB10)
    assert GROUPED.plan(attrs, packed, GB10).scratch == one.scratch


def test_a_chunk_costs_what_it_costs_alone() -> None:
    def cost(tokens: int) -> float:
        return GROUPED.cost(*specs("nvfp4", tokens, SIZES), GB10)

    assert cost(4096) == pytest.approx(4 * cost(1024))
    assert cost(1309) > cost(1308)


def test_a_target_that_cannot_hold_a_token_is_refused() -> None:
    attrs, packed = specs("nvfp4", 4, SIZES)
    small = with_shared(GB10, 40_000)
    assert "40000 bytes of shared memory" in (GROUPED.refuse(attrs, packed, small) or "")


def test_parts_that_registers_do_not_hold_are_refused() -> None:
    """Of 37 k-slabs no two warps share a dot product; tiles keep no activations in registers."""
    attrs, packed = specs("nvfp4", 4, (13, 3, 37 * 64, 128))
    reasons = {t.name: t.refuse(attrs, packed, GB10) for t in OP.cuda.tactics}
    assert reasons["grouped"] == "H = 2368, I = 128: 37 k-slabs a warp, more than registers hold"
    assert "do not fit" in (reasons["each"] or "") and reasons["tiles"] is None


def test_tactics_of_one_order_say_so() -> None:
    def keys(tokens: int) -> dict[str, str | None]:
        attrs, packed = specs("nvfp4", tokens, SIZES)
        takers = [t for t in OP.cuda.tactics if t.refuse(attrs, packed, H200) is None]
        return {t.name: t.reduction_key(attrs, packed, H200) for t in takers}

    assert set(keys(1)) == {"each", "grouped", "tiles"} and len(set(keys(1).values())) == 1
    many = keys(4096)
    assert many["grouped"] == many["tiles"] == keys(1)["each"] != many["tiles_128"]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_keep_the_order_of_their_sums(kind: str, target: Target) -> None:
    """Where a norm may join the last launch, which reads parts of f32."""
    attrs, packed = specs(kind, 511, SIZES)
    takers = [t for t in OP.cuda.tactics if t.refuse(attrs, packed, target) is None]
    assert {t.reduction_key(attrs, packed, target) for t in takers} == {"k in parts"}


SOURCES = {  # of tiles of 64 and of 128 tokens
    ("nvfp4", H200): ("wide_wgmma_sm90", "wide_wgmma_sm90"),
    ("dense", H200): ("wide_wgmma_sm90", "wide_wgmma_sm90"),
    ("fp8", H200): ("tiles_mma", "tiles_mma"),
    ("nvfp4_a4", H200): ("tiles_mma", "tiles_mma"),
    ("fp8_block", H200): ("", "wide_fp8_wgmma_sm90"),
    ("fp8_channel", H200): ("", "wide_fp8_wgmma_sm90"),
    ("nvfp4", GB10): ("tiles_mma", "tiles_mma"),
    ("fp8", GB10): ("tiles_mma", "tiles_mma"),
    ("nvfp4_a4", GB10): ("tiles_mma", "tiles_fp4_sm120"),
    ("fp8_block", GB10): ("", ""),
}


@pytest.mark.parametrize(("kind", "target"), SOURCES, ids=lambda v: getattr(v, "name", v))
def test_a_prefill_is_tiles_of_the_instructions_that_serve(kind: str, target: Target) -> None:
    found = []
    for tokens, name in ((256, "tiles"), (4096, "tiles_128")):
        attrs, packed = specs(kind, tokens, SIZES)
        takers = {t.name: t for t in OP.cuda.tactics if t.refuse(attrs, packed, target) is None}
        sources = set()
        if name in takers:
            plan = takers[name].plan(attrs, packed, target)
            sources = {n.source for n in plan.launches_of(takers[name].source)}
        found.append(sources)
        if tokens == 4096 and name in takers:
            best = min(takers.values(), key=lambda t: t.cost(attrs, packed, target))
            assert best.name == name
    wanted = [{f"moe/experts/experts_{s}.cu"} if s else set() for s in SOURCES[kind, target]]
    assert found == wanted
    few = specs(kind, 8, SIZES)
    able = [t for t in OP.cuda.tactics if t.refuse(*few, target) is None]
    assert min(able, key=lambda t: t.cost(*few, target)).name == "grouped"


# ---- the index arithmetic ------------------------------------------------------------------------


class Rows:
    """A plan's kernels on rows of one number, which depends on every row and id that was read."""

    def __init__(self, plan: Plan, x: Array, ids: Array, weights: Array, quant: int) -> None:
        self.k1, self.plan = ids.shape[1], plan
        self.apart = quant in (1, 3)  # x and h are quantised by launches, by expert
        self.places: dict[tuple[str, int], Array] = {
            ("input", 0): x,
            ("input", 1): ids.reshape(-1),
            ("input", 2): weights.reshape(-1),
            ("output", 0): np.full(len(x), np.nan),
        }

    def run(self, scratch_rows: int) -> Array:
        """y; scratch buffers hold `scratch_rows` rows."""
        for launch in self.plan.launches:
            start = scalars(launch)[-1] if "CHUNKED" in dict(launch.defines) else 0
            if launch.symbol == ("quantise_x" if self.apart else "moe_up"):
                for i in range(len(self.plan.scratch)):  # nothing of the last chunk may be read
                    self.places["scratch", i] = np.full(scratch_rows, np.nan)
            getattr(self, launch.symbol)(launch, start, [self.at(a) for a in launch.args])
        return self.places["output", 0]

    def at(self, arg: Arg) -> Array:
        key = (arg.kind, arg.index) if isinstance(arg, Pointer) else ("", 0)
        return self.places.get(key, np.empty(0))

    def quantise_x(self, launch: Launch, start: int, args: list[Array]) -> None:
        x, ids, _, out, *_ = args
        for row in range(launch.grid[0]):
            out[row] = x[start + row // self.k1] + 1e-3 * ids[start * self.k1 + row]

    def moe_up(self, launch: Launch, start: int, args: list[Array]) -> None:
        x, ids, h = args[0], args[1], args[6]
        first = 0 if self.apart else start  # x is scratch memory where it was quantised
        for pair in range(scalars(launch)[0] * self.k1):
            row = pair if self.apart else pair // self.k1
            h[pair] = x[first + row] + 100 * ids[start * self.k1 + pair]

    def quantise_h(self, launch: Launch, start: int, args: list[Array]) -> None:
        raw, ids, _, out, *_ = args
        for row in range(launch.grid[0]):
            out[row] = raw[row] + 1e-3 * ids[start * self.k1 + row]

    def moe_down(self, launch: Launch, start: int, args: list[Array]) -> None:
        h, ids, parts = args[0], args[1], args[6]
        for pair in range(scalars(launch)[0] * self.k1):
            parts[pair] = h[pair] * (1 + ids[start * self.k1 + pair])

    def moe_combine(self, launch: Launch, start: int, args: list[Array]) -> None:
        ids, weights, parts, y, *_ = args
        for token in range(launch.grid[0]):
            pairs = token * self.k1 + np.arange(self.k1)
            order = pairs[np.argsort(ids[start * self.k1 + pairs], kind="stable")]
            y[start + token] = np.sum(weights[start * self.k1 + order] * parts[order])


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_each_token_what_one_launch_gives_it(kind: str) -> None:
    tokens, rng = 37, np.random.default_rng(1)
    experts, chosen = TINY[:2]
    x, weights = rng.normal(size=tokens), rng.normal(size=(tokens, chosen))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen]
    attrs, packed = specs(kind, tokens, TINY)
    quant = problem(attrs, packed).quant
    found = []
    for scratch_rows in (tokens, 17, 16, 5, 1):
        target = squeezed(attrs, packed, GB10, scratch_rows)
        plan = GROUPED.plan(attrs, packed, target)
        most = max(scalars(n)[0] for n in plan.launches if n.symbol == "moe_up")
        assert (most == tokens) == (scratch_rows == tokens)
        found.append(Rows(plan, x, ids, weights, quant).run(most * chosen))
    assert np.isfinite(found[0]).all()
    for y in found[1:]:
        np.testing.assert_array_equal(y, found[0])
