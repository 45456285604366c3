"""How the stream-K linear kernels (`stream_k_gemm.cuh`) are instantiated and launched.

Knows tiles, stages and the ring's size; the ops' own modules say what their operands are.
Imports no CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from spark_engine.kernel import Attrs, Early, Pack, Plan, Scratch, Target
from spark_engine.plugins.formats import linear_layout as wt
from spark_engine.plugins.formats.linear_layout import KSLAB, M16, PANEL
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.launch import Kernel, Macros, Node
from spark_engine.tensors import Array, DType, TensorSpec

BLOCK_MS = (8, 16, 32, 64, 128)
SMALL = 16
LARGE_N, LARGE_M = 128, 256
SWIZZLED = 1024  # bytes of eight rows in the 128-byte swizzle
# k-slabs up to which turns of large tiles take longer than products and scales that collide: 5 % at
# 40 k-slabs; at 136 they take 7 % less (benchmarks/log/gemm/linear_fp8_block_mma.md)
FEW_SLABS = 64
_RESERVED = 1024  # shared memory of the barriers, after which the ring is aligned


@dataclass(frozen=True)
class StreamKForm:
    """What sets one op's kernels apart: name, source, operands, bits a weight, bytes of scales.

    NVFP4 activations have two codes a byte: there k counts bytes, and `weight_bits` are a byte's.
    """

    symbol: str
    source: str
    operands: str
    weight_bits: int
    scale_bytes: int  # of an m16 tile's k-slab
    x_bytes: int
    x_scale_bytes: int = 0  # of an activation row's k-slab; 4: an f32, and weights have one too
    k: str = "K"  # of the problem, in the op's dimensions
    table_bytes: int = 0  # of the shared memory, besides the ring and barriers
    held: int = 9  # m16 tiles that one of 16 skinny warps holds, whatever the rows, without spills
    more: Callable[[Node], Macros] = lambda node: {}  # macros of stream-K's epilogue

    @property
    def kernel(self) -> Kernel:
        """That of stream-K."""
        args = f"{self.operands} y partial arrived m n k"
        return Kernel(self.symbol, args, early=Early(begins=True))

    @property
    def slab(self) -> int:
        """Elements of k in a k-slab."""
        return KSLAB // self.x_bytes

    @property
    def slab_scales(self) -> bool:
        """Whether k-slabs are scaled by f32 (SLAB_SCALES)."""
        return self.x_scale_bytes == 4

    @property
    def wgmma(self) -> bool:
        """Whether there is a form by wgmma: scales within a k-slab have none."""
        return self.x_scale_bytes <= 4

    @property
    def m16_slab_bytes(self) -> int:
        """Bytes of an m16 tile's k-slab."""
        return M16 * self.slab * self.weight_bits // 8 + self.scale_bytes


@dataclass(frozen=True)
class Problem:
    """y[m, n] over k."""

    m: int
    n: int
    k: int

    @staticmethod
    def of(node: Node, form: StreamKForm) -> Problem:
        return Problem(*node.shape("tokens", "N", form.k))

    @staticmethod
    def recorded(node: Node) -> tuple[int, int] | None:
        """`Candidate.recorded`: elements of the weight, and tokens. `linear` was recorded of narrow
        weights, the others of wide ones."""
        m, n, k = node.shape("tokens", "N", "K")
        return (n * k, m) if (n <= PANEL) == (node.op == "linear") else None


@dataclass(frozen=True)
class StreamKConfig:
    """One instantiation.

    Attributes:
        block_n: weight rows of a tile.
        block_m: activation rows of a tile.
        warp_tiles: m16 tiles of a consumer warp.
        stage_slabs: k-slabs of a stage.
        stages: of the ring.
        wgmma: Hopper's warpgroup instructions, else mma.sync.
        resident: blocks that a multiprocessor holds, so that the next launch may begin early.
        warps_m: consumer warps that share an m16 tile, each with a part of the tokens.
    """

    block_n: int
    block_m: int
    warp_tiles: int
    stage_slabs: int
    stages: int
    wgmma: bool
    resident: int = 1
    warps_m: int = 1

    @property
    def warps(self) -> int:
        """Consumer warps."""
        return self.block_n // M16 // self.warp_tiles * self.warps_m

    @property
    def threads(self) -> int:
        """Consumers, and four producer warps."""
        return (self.warps + 4) * 32

    def stage_bytes(self, form: StreamKForm) -> int:
        """Shared memory of one stage; wgmma's swizzle counts from a multiple of 1,024 bytes."""
        x_scales = self.block_m * form.x_scale_bytes
        if form.slab_scales:  # and one of the weights; stages are at multiples of 128 bytes
            x_scales = padded(x_scales + 4, KSLAB) * (2 if self.block_m == LARGE_M else 1)
        x, w = self.block_m * KSLAB, self.block_n // M16 * form.m16_slab_bytes
        own = self.stage_slabs * (x + x_scales + w)
        return padded(own, SWIZZLED) if self.wgmma else own


def refuse(problem: Problem) -> str | None:
    """Why the kernels cannot do this, if so."""
    if problem.k % M16:
        return (
            f"the weight is {problem.n}x{problem.k}; its columns must be divisible by {M16} for "
            "16-byte loads of activations: pad the projection"
        )
    return None


def packs(n: int, k: int) -> bool:
    """Whether a weight of this shape is laid out for the kernels."""
    return refuse(Problem(1, n, k)) is None


def choose(
    problem: Problem, form: StreamKForm, target: Target, exact: bool = False
) -> StreamKConfig:
    """The tile for a problem. BLOCK_N, and with it the cut of k, does not depend on m. `exact`:
    without wgmma."""
    wgmma = target.wgmma and form.wgmma and not exact
    # On Hopper four warpgroups take turns: one multiplies, the others decode. Elsewhere 8 warps
    # hold the sums: of 128 tokens each has two m16 tiles and half of the tokens, so that one
    # decodes while the other on its scheduler multiplies, and a fragment read serves two products.
    most = 256 if wgmma and form.weight_bits == 4 else 128
    # Hopper multiplies e4m3 by bf16: with scales within a k-slab 64 tokens are too many registers.
    sizes = BLOCK_MS[:-2] if form.slab_scales and exact and target.wgmma else BLOCK_MS
    block_m = next((b for b in sizes if problem.m <= b), sizes[-1])
    block_n = next((r for r in (64, 128) if problem.n <= r), most)
    shared = 2 if not wgmma and block_n >= 128 and block_m >= 128 else 1
    # mma.sync and wgmma give the same bits for bf16; the former is ahead at up to 8 rows.
    wgmma = wgmma and not (form.weight_bits == 4 and form.x_bytes == 2 and block_m < SMALL)
    tile = StreamKConfig(block_n, block_m, shared, 1, 2, wgmma, warps_m=shared)
    return fill(tile, problem, form, target)


def choose_large(problem: Problem, form: StreamKForm, target: Target) -> StreamKConfig | None:
    """The tile where there are several for each multiprocessor; None where there are not.

    A weight is decoded once for 256 rows, and L2 gives three quarters of what it gives for tiles
    of 128 x 128. Without wgmma the registers hold no more than `choose`'s tile; there it is the
    order of the tiles that counts, since L2 does not hold a prefill's activations.
    """
    large_m = LARGE_M if target.wgmma and form.wgmma else BLOCK_MS[-1]
    tiles = -(-problem.n // LARGE_N) * -(-problem.m // large_m)
    if problem.m <= BLOCK_MS[-1] or tiles <= target.sms:
        return None
    if large_m < LARGE_M:
        return choose(problem, form, target)
    tile = fill(StreamKConfig(LARGE_N, LARGE_M, 1, 1, 2, True), problem, form, target)
    # A row's scales are read four by four, one for each stage of the ring.
    slabs = cut_of(LARGE_N, problem, form, target)
    if form.slab_scales and not (tile.stages == slabs == 4 and tile.stage_slabs == 1):
        return choose(problem, form, target)
    return tile


def cut_of(block_n: int, problem: Problem, form: StreamKForm, target: Target) -> int:
    """k-slabs between which the line may be cut, for any m.

    Four, or two where weights are decoded and pieces become more equal by it (5120 x 17408: 11
    fours for 10.3, 45.2 -> 44.0 us at 128 rows). Others lose more by the tiles that are cut then
    (9216 x 2048 of FP8: 7.4 -> 8.7 us at 32 rows).
    """
    slabs = -(-problem.k // form.slab)
    tiles = -(-problem.n // block_n)
    cut = next(c for c in (4, 2, 1) if slabs % c == 0)
    if cut < 4 or form.weight_bits != 4 or tiles * slabs < 4 * target.sms:
        return cut
    fours, twos = (c * -(-tiles * slabs // (c * target.sms)) for c in (4, 2))
    return 2 if twos <= 0.97 * fours else 4


def fill(tile: StreamKConfig, problem: Problem, form: StreamKForm, target: Target) -> StreamKConfig:
    """The tile with stages that suit: long ones while a few fit, as many as fit."""
    cut = cut_of(tile.block_n, problem, form, target)
    one = replace(tile, stage_slabs=1).stage_bytes(form)
    usable = target.shared_bytes // tile.resident - 2 * _RESERVED * (tile.resident - 1) - _RESERVED
    usable -= form.table_bytes
    decoding = form.weight_bits == 4
    wanted = ((4, 3 if tile.wgmma and decoding else 5), (2, 3 if tile.wgmma else 5))
    # A stage of two k-slabs of 64 tokens with 8-bit activations would spill.
    short = decoding and tile.wgmma and form.x_bytes == 1 and tile.block_m == 64
    fitting = [u for u, s in wanted if not short and cut % u == 0 and usable // (u * one) >= s]
    per_stage = fitting[0] if fitting else 1
    # Where weights are decoded that is the pace: a deep ring only delays the first activations.
    most = 12 // per_stage if decoding else 12
    return replace(tile, stage_slabs=per_stage, stages=min(usable // (per_stage * one), most))


def plan(
    node: Node, tile: StreamKConfig, problem: Problem, form: StreamKForm, band: int = 0
) -> Plan:
    """One launch, over partial sums and arrival counters.

    `band`: no tile is cut; each block takes whole ones in turn, in bands of so many along m.
    """
    target = node.target
    tiles = -(-problem.n // tile.block_n) * -(-problem.m // tile.block_m)
    slabs = -(-problem.k // form.slab)
    cut = cut_of(tile.block_n, problem, form, target)
    line = tiles * slabs // cut
    blocks = min(tiles, target.sms) if band else blocks_for(line, form, target)
    macros: dict[str, int | float] = {
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "WARP_TILES": tile.warp_tiles,
        "STAGE_SLABS": tile.stage_slabs,
        "CUT": cut,
        "STAGES": tile.stages,
        "WGMMA": tile.wgmma,
        "OUT_BF16": node.text("dtype") == "bf16",
        "RAGGED": problem.n % M16 != 0,
        "WHOLE_K": problem.k % form.slab == 0,
        "RESIDENT": tile.resident,
    }
    if band:
        macros["BAND"] = band
    if tile.warps_m > 1:
        macros["WARPS_M"] = tile.warps_m
    if node.number("by_token"):
        macros["BY_TOKEN"] = 1
    if form.slab_scales and tile.block_m == LARGE_M and slabs > FEW_SLABS:
        macros["TURNS"] = 1
    macros |= form.more(node)
    partial = 256 if band else 2 * blocks * tile.block_n * tile.block_m * 4
    arrived = Scratch(2 * blocks * tile.warps * 4, zeroed=True)
    node = node.with_scratch(partial=partial, arrived=arrived)
    launch = form.kernel.launch(
        node, blocks, tile.threads, macros, tile.stages * tile.stage_bytes(form),
        resident=blocks != tiles and not band,  # else none waits for another
        m=problem.m, n=problem.n, k=problem.k,
    )  # fmt: skip
    return node.plan(launch)


def plan_large(node: Node, problem: Problem, form: StreamKForm) -> Plan | None:
    """`plan` of `choose_large`'s tiles, whole."""
    tile = choose_large(problem, form, node.target)
    if tile is None:
        return None
    return plan(node, tile, problem, form, band_of(tile, form, node.target))


def pack(form: StreamKForm, dtype: DType) -> Pack:
    """The layout of weights of that dtype, [n, k]; others stay as they are."""

    def infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
        n, k = spec.dims
        if spec.dtype is not dtype or not packs(n, k):
            return spec
        return replace(spec, shape=(n, wt.row_width(n, padded(k, form.slab))))

    def apply(attrs: Attrs, w: Array) -> Array:
        if w.dtype != dtype.numpy or not packs(*w.shape):
            return w
        return wt.as_rows(wt.pack_bytes(w.view(np.uint8)).view(w.dtype), len(w))

    return Pack(infer, apply)


def band_of(tile: StreamKConfig, form: StreamKForm, target: Target) -> int:
    """Tiles along m of a band, a power of two: so many that the tiles of one round, as many as
    multiprocessors, fetch the least together."""
    weights, rows = tile.block_n * form.weight_bits / 8, tile.block_m * form.x_bytes
    return int(2 ** round(math.log2(target.sms * weights / rows) / 2))


def blocks_for(line: int, form: StreamKForm, target: Target) -> int:
    """How many blocks share a line of so many cuts, at most one a multiprocessor.

    No more than the longest piece asks for: the fewer blocks, the fewer tiles are cut (16384 x
    5120 of FP8: none, 21.3 -> 19.5 us at 8 rows, 27.5 -> 24.5 at 128, H200). Where weights are
    decoded every multiprocessor counts, unless the pieces become equal.
    """
    fewest = -(-line // -(-line // target.sms))
    if form.weight_bits == 4 and line % fewest:
        return min(target.sms, line)
    return fewest


def bytes_moved(problem: Problem, form: StreamKForm, dtype: str) -> int:
    """Bytes that a launch must move: weights, scales, activations, results, each once."""
    slabs = -(-problem.k // form.slab)
    weights = problem.n * slabs * form.m16_slab_bytes // M16
    y = problem.m * problem.n * (2 if dtype == "bf16" else 4)
    x = problem.m * (problem.k * form.x_bytes + slabs * form.x_scale_bytes)
    return weights + x + y


def floor(problem: Problem, form: StreamKForm, target: Target, dtype: str) -> float:
    """Seconds that no kernel beats: bytes or arithmetic, whichever takes longer."""
    rate = target.bf16_flops * (2 if form.x_bytes == 1 else 1)
    work = 2 * math.prod((problem.m, problem.n, problem.k)) / rate
    return max(bytes_moved(problem, form, dtype) / target.bandwidth, work)


def cost_of(form: StreamKForm, launch: float = 3e-6) -> Callable[[Node], float]:
    """1.2 times the floor, and `launch` seconds for start, fix-up and epilogue."""

    def cost(node: Node) -> float:
        least = floor(Problem.of(node, form), form, node.target, node.text("dtype"))
        return 1.2 * least + launch

    return cost
