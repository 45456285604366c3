"""How the skinny GEMM (m <= 16, `skinny_gemm.cuh`) is instantiated and launched.

Knows m16 tiles, split-K, and the rings; the ops' own modules say what their operands are.
Imports no CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from spark_engine.kernel import Early, Plan, Target
from spark_engine.plugins.formats.linear_layout import KSLAB, M16
from spark_engine.plugins.kernels.gemm.stream_k.stream_k_gemm import Problem, StreamKForm, floor
from spark_engine.plugins.launch import Candidate, Kernel, Node

MOST_ROWS = 16  # m
_HELD = 9  # m16 tiles of which a warp holds the sums
_CHUNK = 5  # m16 tiles of a stage
_BUSY = 65536  # bytes of rings
_FIXED = 2048  # shared memory of the barriers and what the system keeps
_SMALL_BLOCKS = 8192  # what a block that begins early leaves to small ones that run with it
_DECODED = (
    16e-9  # seconds in which a multiprocessor decodes a k-slab of an NVFP4 m16 tile, as on an H200
)


@dataclass(frozen=True)
class SkinnyConfig:
    """How n and k are cut. `splits` and `wk`, the reduction order, depend on n and k alone.

    Attributes:
        splits: blocks of a cluster, each with a part of k (split-K).
        each: m16 tiles of a cluster.
        wk, wn: warps of a block along k and along n.
        chunk: m16 tiles of a stage.
        stages: of a warp's ring.
    """

    splits: int
    each: int
    wk: int
    wn: int
    chunk: int = 1
    stages: int = 0

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.wk * self.wn

    @property
    def held(self) -> int:
        """m16 tiles of a warp."""
        return -(-self.each // self.wn)

    def sums_bytes(self, problem: Problem) -> int:
        """Of a warp."""
        return self.held * block_m(problem) * 64

    def static_bytes(self, problem: Problem) -> int:
        """Shared memory next to the rings: partial sums of the other blocks, mbarriers."""
        return (self.splits - 1) * self.wn * self.sums_bytes(problem) + _FIXED


def block_m(problem: Problem) -> int:
    """BLOCK_M of the instantiation."""
    return 8 if problem.m <= 8 else 16


def _m16_tiles(problem: Problem) -> int:
    return -(-problem.n // M16)


def _each(problem: Problem, target: Target, splits: int) -> int:
    return -(-_m16_tiles(problem) // (target.sms // splits))


def choose(problem: Problem, form: StreamKForm, target: Target) -> SkinnyConfig:
    """The cut that leaves no multiprocessor much more to decode than another."""
    splits, slabs = 1, -(-problem.k // form.slab)
    if target.clusters and form.weight_bits == 4:  # others leave the multiprocessors idle anyway
        one, two = (_each(problem, target, s) * -(-slabs // s) for s in (1, 2))
        splits = 2 if two < 0.95 * one else 1
    each = _each(problem, target, splits)
    # 16 warps to decode; of 8, each has more memory
    wide = target.large_shared and form.weight_bits == 4
    wk, wn = (16, 1) if wide and each <= form.held else (8, 2 if wide else 1)
    return fill(SkinnyConfig(splits, each, wk, wn), problem, form, target)


def fill(config: SkinnyConfig, problem: Problem, form: StreamKForm, target: Target) -> SkinnyConfig:
    """The config with stages that suit: long ones, and no more of them than keep memory busy.

    None suits where `stages` comes back as 0.
    """
    usable = _usable_bytes(config, problem, form, target)
    m16_tiles = usable // config.warps // form.m16_slab_bytes
    for chunks in range(1, config.held + 1):
        chunk = -(-config.held // chunks)
        stage = chunk * form.m16_slab_bytes
        least = max(config.sums_bytes(problem), _BUSY // config.warps)
        stages = max(2 if chunks == 1 else 3, -(-least // stage))
        if chunk <= _CHUNK and stages * chunk <= m16_tiles:
            return replace(config, chunk=chunk, stages=stages)
    return replace(config, chunk=1, stages=0)


def deepened(
    config: SkinnyConfig, problem: Problem, form: StreamKForm, target: Target
) -> SkinnyConfig:
    """With rings as deep as shared memory and the block's share of k allow, for a launch that
    begins long before its activations are there. They change no order."""
    usable = _usable_bytes(config, problem, form, target)
    stage = config.chunk * form.m16_slab_bytes
    slabs = -(-problem.k // form.slab)
    turns = -(-slabs // (config.splits * config.wk))
    most = min(
        (usable - _SMALL_BLOCKS) // (config.warps * stage), turns * -(-config.held // config.chunk)
    )
    return replace(config, stages=max(config.stages, most))


def _usable_bytes(config: SkinnyConfig, problem: Problem, form: StreamKForm, target: Target) -> int:
    """Shared memory that is left to the rings."""
    inputs = config.warps * _inputs(problem, form)
    return target.shared_bytes - config.static_bytes(problem) - inputs


def _inputs(problem: Problem, form: StreamKForm) -> int:
    """Shared memory of a warp's activations: two k-slabs, their scales behind them."""
    return 2 * (block_m(problem) * KSLAB + 128 * form.slab_scales)


def refuse(problem: Problem, form: StreamKForm, target: Target) -> str | None:
    """Why the kernels cannot do this, if so."""
    if problem.m > MOST_ROWS:
        return f"{problem.m} rows are not few; up to {MOST_ROWS} are served"
    config = choose(problem, form, target)
    if config.held > _HELD or not config.stages:
        return (
            f"{config.each} m16 tiles for each multiprocessor; their sums and as many "
            "weights in flight are more than a block holds"
        )
    return None


def plan(node: Node, config: SkinnyConfig, problem: Problem, form: StreamKForm) -> Plan:
    macros = {
        "SKINNY": 1,
        "BLOCK_M": block_m(problem),
        "WK": config.wk,
        "WN": config.wn,
        "WARP_TILES": config.held,
        "CHUNK": config.chunk,
        "STAGES": config.stages,
        "SPLITS": config.splits,
        "OUT_BF16": node.text("dtype") == "bf16",
        "RAGGED": problem.n % M16 != 0,
    }
    if node.number("by_token"):
        macros["BY_TOKEN"] = 1

    def shared(stages: int) -> int:
        ring = stages * config.chunk * form.m16_slab_bytes
        return config.warps * (ring + _inputs(problem, form))

    deep = deepened(config, problem, form, node.target).stages
    more = ((("STAGES", str(deep)),), shared(deep)) if deep > config.stages else None
    args, early = f"{form.operands} y m n k each", Early(begins=True, stages=more)
    launch = Kernel(f"{form.symbol}_skinny", args, early=early).launch(
        node,
        (config.splits, -(-_m16_tiles(problem) // config.each)),
        config.warps * 32,
        macros,
        shared(config.stages),
        config.splits,
        m=problem.m, n=problem.n, k=problem.k, each=config.each,
    )  # fmt: skip
    return node.plan(launch)


def candidate(form: StreamKForm, refused: Callable[[Node], str | None]) -> Candidate:
    """That of a format; `refused`: what no kernel of it takes.

    Its sums are in one order for any number of rows.
    """

    def refusing(node: Node) -> str | None:
        return refused(node) or refuse(Problem.of(node, form), form, node.target)

    def planned(node: Node) -> Plan:
        problem = Problem.of(node, form)
        return plan(node, choose(problem, form, node.target), problem, form)

    def cost(node: Node) -> float:
        """The floor, the longest decoding or what the shortest take, and a launch."""
        problem = Problem.of(node, form)
        config = choose(problem, form, node.target)
        work = config.each * -(-problem.k // form.slab) // config.splits
        decoding = work * _DECODED * (1 + block_m(problem) / 32) if form.weight_bits == 4 else 0.0
        least = 1.05 * floor(problem, form, node.target, node.text("dtype"))
        return max(least, decoding, 2e-6) + 1e-6

    return Candidate("skinny", form.source, planned, cost, refusing, recorded=Problem.recorded)
