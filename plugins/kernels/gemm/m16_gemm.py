"""How the linears with scales along k (`m16_gemm.cuh`) are laid out and launched.

Knows m16 tiles, k-slabs and BLOCK_M; the ops' own modules say what their operands are. Imports
no CUDA.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_engine.kernel import Plan
from spark_engine.plugins.launch import Kernel, Node

M16 = 16
THREADS = 256


@dataclass(frozen=True)
class Form:
    """What sets one op's kernel apart.

    Attributes:
        symbol: of the kernel.
        operands: that it is given, in order.
        slab: elements of k that one lane's load covers.
        tiles: BLOCK_M -> (m16 tiles of a block, k-slabs fetched ahead).
    """

    symbol: str
    operands: str
    slab: int
    tiles: Mapping[int, tuple[int, int]]


def refuse(n: int, k: int) -> str | None:
    """Why a weight [n, k] is not laid out for the kernels, if so."""
    if n % M16 or k % M16:
        return (
            f"the weight is {n}x{k}; both must be divisible by {M16} for 16-byte loads of "
            "fragments: pad the projection"
        )
    return None


def plan(node: Node, form: Form) -> Plan:
    m, n, k = node.shape("tokens", "N", "K")
    block_m = next((b for b in sorted(form.tiles) if m <= b), max(form.tiles))
    block_tiles, depth = form.tiles[block_m]
    macros = {
        "BLOCK_M": block_m,
        "BLOCK_TILES": block_tiles,
        "DEPTH": depth,
        "WHOLE": k % form.slab == 0,
        "OUT_BF16": node.text("dtype") == "bf16",
    }
    grid = (-(-m // block_m), -(-n // (M16 * block_tiles)))
    kernel = Kernel(form.symbol, f"{form.operands} y m n k")
    return node.plan(kernel.launch(node, grid, THREADS, macros, m=m, n=n, k=k))


def floor(node: Node, rate: float) -> float:
    """Seconds no kernel beats: each operand once and y, or the products at `rate` a second."""
    m, n, k = node.shape("tokens", "N", "K")
    moved = sum(s.nbytes for s in node.specs) + m * n * (2 if node.text("dtype") == "bf16" else 4)
    return max(moved / node.target.bandwidth, 2.0 * m * n * k / rate)
