"""Planner of decode attention: `paged_attention` and `attention_decode` of one token a row.

Each is one launch. The chunks of a row depend on the tactic and on the row's length only: with one
tactic in every bucket, a row's bits do not depend on the other rows or the bucket. Sizes mirror
`struct Block` of attention_merge.cuh. `attention_round_kernels.py` has the tactics; it and prefill
use the sizes, macros and refusals of this module.
"""

from dataclasses import replace

from spark_engine.interface import PREFILL_TILE
from spark_engine.kernel import Early, Plan, Scratch, Target
from spark_engine.plugins.formats.quantised import BY_TOKEN, QUANTS
from spark_engine.plugins.launch import Kernel, Node
from spark_engine.plugins.state.paged_kv import SECTIONS, Sizes, sizes_of
from spark_engine.plugins.tuning.sizes import FAN, Chunks
from spark_engine.tensors import DType

DIMS = (32, 64, 128, 256)
COLUMNS = 8  # heads of a group, padded; more heads of a kv head are several groups
RESIDENT = 12  # warps of a multiprocessor, at most: 170 registers a thread
TYPICAL = 1024  # tokens of a row, for predicted costs
COPIES = 2  # quantised copies of a launch, at most
ROW = 16  # bytes of `struct Row`
# Arguments of the kernels of one token and of a round; y is the result in the activations' dtype.
PAGES = "k_pages_out v_pages_out page_table slots starts counts"
ARGS = (
    f"qkv q_norm k_norm inv_freq rope_offsets kv_scale {PAGES} y? scales? q0? s0? q1? s1?"
    " sums stats counters rows longest"
)
DECODED = Kernel("paged_decode", ARGS, early=Early(lets=True))


def sizes(node: Node) -> Sizes:
    """The node's attributes and the size of its pages."""
    return sizes_of(node.attrs, node.dim("page"))


def grouped_sizes(node: Node) -> Sizes:
    """`sizes` with groups of at most COLUMNS query heads as kv heads: each reads its keys again."""
    s = sizes(node)
    parts = next(n for n in range(1, s.group + 1) if s.group % n == 0 and s.group // n <= COLUMNS)
    return replace(s, kv_heads=parts * s.kv_heads)


def token_bytes(s: Sizes) -> int:
    """Bytes of the key of one token and kv head."""
    return s.dim * s.storage.itemsize


def pages_macros(node: Node, heads: int) -> dict[str, int | float]:
    """The macros of attention_kv_pages.cuh for rows of `heads` query heads."""
    s = sizes(node)
    return {
        "HEADS": heads,
        "KV_HEADS": s.kv_heads,
        "HEAD_DIM": s.dim,
        "HALF": node.dim("R/2"),
        "PAGE": s.page,
        "KV_FP8": s.storage is DType.U8,
        "EPS": node.real("eps"),
    }


def rope_macros(node: Node) -> dict[str, int]:
    """The pairs that height and width turn, where prefill's tokens are appended."""
    prefill = sizes(node).tile == PREFILL_TILE
    return {name.upper(): node.number(name) for name in SECTIONS} if prefill else {}


def refuse_pages(node: Node, x: str = "qkv") -> str | None:
    """Why no kernel over pages takes the node, or None; `x`: the activations."""
    s, half = sizes(node), node.dim("R/2")
    if node[x].dtype is not DType.BF16:
        return f"activations are {node[x].dtype}, not bf16"
    if s.storage not in (DType.BF16, DType.U8):
        return f"pages hold {s.storage}, not bf16 or fp8 codes"
    if s.dim not in DIMS:
        return f"heads of {s.dim} are none of {', '.join(map(str, DIMS))}"
    if s.page < 16 or s.page & (s.page - 1):
        return f"pages of {s.page} tokens are no power of two from 16"
    if half % (s.dim // 32) or 2 * half > s.dim:
        return f"{half} rotary pairs do not fall on lanes of {s.dim // 32} dimensions"
    return None


def refuse_group(node: Node, size: Chunks) -> str | None:
    """Why neither kernel takes the node, or None: its copies or pages, or a size for other
    targets."""
    s = sizes(node)
    if node.attrs.get("quant") == "fp8_block" and s.dim % 128:
        return f"heads of {s.dim} columns do not come in 128-column blocks of fp8_block"
    if node.attrs.get("quant") in BY_TOKEN:
        return f"the heads of a token are in several blocks, and {BY_TOKEN} have a scale for all"
    if node.number("n") > COPIES:
        return f"{node.number('n')} quantised copies; at most {COPIES} are written"
    if size.large != node.target.large_shared:
        return f"blocks of {size.warps} warps are not for the shared memory of {node.target.name}"
    return refuse_pages(node)


def readers_of(s: Sizes, most: int) -> int:
    """Rings of tiles of a block: half of `most` if a token's key has more than 256 bytes."""
    return most // 2 if token_bytes(s) > 256 else most


def most_warps(target: Target) -> int:
    """Warps of a block with teams, at most."""
    return RESIDENT if target.large_shared else 16


def stages_alone(s: Sizes) -> int:
    """Tiles of the ring of a reader of one warp."""
    return 2 if token_bytes(s) >= 256 else 4


def shape(s: Sizes, most: int) -> tuple[int, int, int]:
    """(warps, stages, bytes of `struct Block` without `rows`)."""
    token, warps, stages = token_bytes(s), readers_of(s, most), stages_alone(s)
    arena = max(stages * 2 * 16 * token, COLUMNS * (s.dim + 4) * 4)
    rest = COLUMNS * (s.dim + 8) * 2 + 2 * token + warps * COLUMNS * 8
    return warps, stages, warps * arena + rest + 80


def plan_decode(node: Node, size: Chunks) -> Plan:
    """A grid of the resident blocks; scratch memory for the partial sums of every chunk."""
    s, rows, target = grouped_sizes(node), node.dim("rows"), node.target
    warps, stages, shared = shape(s, size.warps)
    each = shared + ROW * rows + 1024  # the hardware reserves 1 KiB a block
    blocks = min(RESIDENT // size.warps, (target.shared_bytes + 1024) // each)
    longest = node.dim("MP") * s.page
    items = rows * s.kv_heads * min(size.most, -(-longest // size.tokens))
    macros = {
        **pages_macros(node, s.heads),
        "WARPS": warps,
        "STAGES": stages,
        "CHUNK": size.tokens,
        "MOST_CHUNKS": size.most,
        "BLOCKS": blocks,
        "SHARED": shared,
        **epilogue(node),
    }
    node = with_sums(node, items * s.group, rows * s.kv_heads)
    launch = DECODED.launch(
        node, min(items, target.sms * blocks), 32 * warps, macros, shared + ROW * rows,
        rows=rows, longest=node.dim("MP"),
    )  # fmt: skip
    return node.plan(launch)


def with_sums(node: Node, sums: int, groups: int) -> Node:
    """The node with scratch memory for `sums` partial sums of heads and the counters of `groups`
    merges."""
    counters = Scratch(groups * (FAN + 1) * 4, zeroed=True)
    return node.with_scratch(sums=sums * sizes(node).dim * 4, stats=sums * 16, counters=counters)


def epilogue(node: Node) -> dict[str, int]:
    """The macros of the epilogue, attention_merge.cuh, and of its groups of heads."""
    fused, groups = "quant" in node.attrs, grouped_sizes(node).kv_heads
    return {
        **({"HEAD_GROUPS": groups} if groups > sizes(node).kv_heads else {}),
        "FUSED": fused,
        "KEEP": node.number("keep") if fused else 1,
        "QUANT": QUANTS.index(node.text("quant")) if fused else 0,
        "COPIES": node.number("n") if fused else 1,
    }


def cost_decode(node: Node, size: Chunks) -> float:
    """Seconds for rows of TYPICAL tokens: the latency of a warp, or all bytes and each wave of work
    items; then the merges. Fitted to measurements after a launch that fills the GPU."""
    s, rows, target = grouped_sizes(node), node.dim("rows"), node.target
    length = min(node.dim("MP") * s.page, TYPICAL)
    chunks = max(1, (length + size.tokens // 2) // size.tokens)
    merges = 3e-6 * ((chunks > 1) + (chunks > FAN))
    latency = 8e-6 + 2.3e-6 * length / (16 * chunks * size.warps)
    read = 2 * rows * length * s.kv_heads * token_bytes(s) / (0.9 * target.bandwidth)
    resident = target.sms * (RESIDENT // size.warps if target.large_shared else 1)
    return max(latency, read + 5.5e-6 * max(1.0, rows * s.kv_heads * chunks / resident)) + merges
