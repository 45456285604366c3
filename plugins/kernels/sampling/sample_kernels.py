"""Planner of `sample`: one pass that summarises the logits, then a block a row."""

from spark_engine.kernel import NULL, Plan
from spark_engine.plugins.kernels.ranks.collectives_kernels import VECTOR, symmetric_bytes
from spark_engine.plugins.launch import PEERS, RANK, Candidate, Kernel, Node

CELL = 256
WARPS = 8  # of a block of the first kernel
THREADS = 512  # of a block of the second kernel
SMALL, FEW, MAX_HELD, BINS = 64, 1024, 4096, 2048
STATIC = 2048  # bytes of shared memory in addition to `RowMemory`
MAIL = 2048  # vectors of 16 bytes that a block publishes at a time
_SLOT = "token_counts sampling_f sampling_i bias_ids bias_values bias_until allow"
OPERANDS = f"logits {_SLOT} slots starts counts ids?"
SUMMARIES = "raw_keys keys sums weights"  # scratch memory of the first kernel: a value a cell
RESULTS = "next_tokens logprobs top_ids top_logprobs ok"
CELLS = Kernel(
    "sample_cells", f"{OPERANDS} {SUMMARIES} rank", source="sampling/sample_cells_fma.cu"
)
_EMIT = "emit? last_tokens_out?"
ROWS = Kernel(
    "sample_rows", f"{OPERANDS} {SUMMARIES} {RESULTS} {_EMIT} rows syncs whole_rows? peers rank"
)


def _cells(width: int) -> int:
    return -(-width // CELL)


def _per(node: Node) -> int:
    """Cells of a warp: one, if the rows are too few to fill the GPU otherwise."""
    rows, share = node["logits"].dims
    return 4 if rows * -(-_cells(share) // WARPS) >= 16 * node.target.sms else 1


def _ranks(node: Node) -> int:
    return max(1, node.number("ranks"))


def _shared(node: Node) -> int:
    """A bound of the second kernel's `RowMemory` (sample_work.cuh)."""
    cells, biases = _cells(_ranks(node) * node["logits"].dims[1]), node.dim("NB")
    fixed = 8 * (MAX_HELD + 2 * FEW + BINS + SMALL) + 5 * THREADS + 256
    return -(-(20 * cells + 8 * biases + fixed) // 128) * 128


def refuse(node: Node) -> str | None:
    """Why the kernels do not take the node, or None."""
    (_, share), top, ranks = node["logits"].dims, node.number("top"), _ranks(node)
    if share % 4:
        return f"a row of {share} logits; pad the vocabulary to a multiple of 4"
    if top > min(SMALL, share):
        return f"top is {top}; up to {min(SMALL, share)} is served"
    if ranks > 1 and share < CELL:
        return f"a rank has {share} logits of a row; the least is {CELL}"
    if (needed := _shared(node)) > node.target.shared_bytes - STATIC:
        return f"{share * ranks} logits a row need {needed} bytes of shared memory"
    return None


def plan(node: Node) -> Plan:
    """sample_cells, then sample_rows; if ranks share the vocabulary, over symmetric memory."""
    ranks, sms = _ranks(node), node.target.sms
    rows, share = node["logits"].dims
    width, per = ranks * share, _per(node)
    row = {"WIDTH": width, "VOCAB": node.number("vocab"), "BIASES": node.dim("NB")}
    if node.number("drafts"):
        row["TILE"] = node.number("tile")
    if ranks > 1:
        row["RANKS"] = ranks
    blocks, first_pass = min(rows, sms), {**row, "PER": per}
    mail = max(MAIL, 1 + SMALL + SMALL // 4 + CELL // 2 + share // CELL + 2)
    shared = _shared(node)
    if ranks > 1:
        row["MAIL"] = mail
    second_pass = {**row, "TOP": node.number("top")}
    own = _cells(share) + (1 if share % CELL else 0)  # a share may begin and end within a cell
    node = node.with_scratch(**dict.fromkeys(SUMMARIES.split(), 4 * rows * _cells(width)))
    if ranks > 1:
        node = node.with_scratch(whole_rows=4 * blocks * width)
    grid = (-(-own // (WARPS * per)), rows)
    first = CELLS.launch(node, grid, 32 * WARPS, first_pass, rank=RANK)
    each = 1 + max(1, -(-share // (4 * mail)))  # syncs of a row at most
    second = ROWS.launch(
        node, blocks if ranks > 1 else rows, THREADS, second_pass, shared, resident=ranks > 1,
        rows=rows, syncs=-(-rows // blocks) * each | 1, peers=PEERS if ranks > 1 else NULL,
        rank=RANK,
    )  # fmt: skip
    symmetric = symmetric_bytes(blocks * mail * VECTOR) if ranks > 1 else 0
    return node.plan(first, second, symmetric=symmetric)


def cost(node: Node) -> float:
    """Seconds: the logits once, the latency of the second kernel, and of its exchange."""
    sync = 5e-6 if _ranks(node) > 1 else 0.0
    return 1.1 * node["logits"].nbytes / node.target.bandwidth + 12e-6 + sync


CANDIDATES = (Candidate("cells", "sampling/sample_rows_fma.cu", plan, cost, refuse),)
