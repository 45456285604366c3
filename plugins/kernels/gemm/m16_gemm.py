"""How the linears with scales along k (`m16_gemm.cuh`) are laid out and launched.

Knows m16 tiles, k-slabs and BLOCK_M; the ops' own modules say what their operands are. Imports
no CUDA.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_engine.kernel import Pack, Plan
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.launch import Kernel, Node
from spark_engine.tensors import DType, TensorSpec

M16 = 16
THREADS = 256
U8 = NDArray[np.uint8]


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


def pack(slab: int, per_byte: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> Pack:
    """The layout of a weight or its scales, `per_byte` elements of k a byte (or one per 16).

    An m16 tile's k-slab [16, bytes] is seen as `shape` and its axes are put in the order `axes`; k
    is filled up with zeros to whole k-slabs.
    """

    def laid_out(spec: TensorSpec) -> bool:
        n, width = spec.dims
        return refuse(n, width * per_byte) is None

    def infer(attrs: object, spec: TensorSpec) -> TensorSpec:
        if not laid_out(spec):
            return spec
        n, width = spec.dims
        return replace(spec, shape=(n, padded(width, slab // per_byte)))

    def apply(attrs: object, array: NDArray[np.generic]) -> NDArray[np.generic]:
        if not laid_out(TensorSpec("w", DType.of(array.dtype), array.shape)):
            return array
        raw = array.view(np.uint8)
        wide = np.pad(raw, ((0, 0), (0, -raw.shape[1] % (slab // per_byte))))
        tiles = wide.reshape(-1, M16, wide.shape[1] // (slab // per_byte), slab // per_byte)
        grid = tiles.transpose(0, 2, 1, 3).reshape(*tiles.shape[::2], *shape)
        order = (0, 1, *(2 + a for a in axes))
        packed: U8 = np.ascontiguousarray(grid.transpose(order)).reshape(wide.shape)
        return packed.view(array.dtype)

    return Pack(infer, apply)


def plan(node: Node, form: Form) -> Plan:
    """One launch."""
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
