"""The CUDA side of `moe_router`: one launch.

`cluster`: eight blocks that exchange logits through their shared memory. `last`: any number of
blocks; the one that arrives last at its tokens chooses for them. `wide_96`: a block has that many
tokens and all experts, for prefill. `wgmma`: two blocks of a cluster have 128 tokens, all experts
and half of k each.
"""

from spark_engine.kernel import DECLARED, Early, Plan, Scratch
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

ROWS, TOKENS = 16, 8  # of a block
HELD = 8  # k-slabs of 64 k that a warp holds
NARROW = 2048  # columns of x of which registers hold a cluster's weights for twice the tokens
ONE_WAVE = 64  # tokens; their clusters of 8 tokens are all resident on an H200
WIDE_EXPERTS = {True: 320, False: 288}  # of a block, the gate among them, by large shared memory
WIDE_TOKENS = 96  # of a block
WGMMA_TOKENS, WGMMA_STAGES = 128, 4  # of a cluster; of its blocks
NOT_EARLY = Early()
CLUSTER = 8  # blocks that share tokens, each with one or two times ROWS experts


def _kernel(symbol: str, node: Node, more: str = "", early: Early = NOT_EARLY) -> Kernel:
    """A gate that is not there is never read."""
    gate = "gate" if "gate" in node else "w"
    return Kernel(symbol, f"x w {gate} ids weights {more} tokens", early=early)


def _macros(node: Node, **more: int) -> dict[str, int]:
    return {
        "HIDDEN": node.dim("H"),
        "EXPERTS": node.dim("E"),
        "TOP_K": node.number("top_k"),
        "GATE": "gate" in node,
        **more,
    }


def refuse(node: Node) -> str | None:
    """Refuses anything but bf16, and rows that do not fit in registers."""
    if reason := _refuse_dtype(node):
        return reason
    hidden, experts = node.shape("H", "E")
    if hidden % 8 or hidden > 8 * 64 * HELD:
        return f"H = {hidden}; multiples of 8 up to {8 * 64 * HELD} are served"
    if experts > 1024:
        return f"{experts} experts; up to 1024 are served"
    return None


def _refuse_dtype(node: Node) -> str | None:
    for spec in node.specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    return None


def _refuse_lanes(node: Node) -> str | None:
    if node.dim("k") > 32:
        top_k = node.number("top_k")
        return f"{top_k} experts a token; a lane each is served, 32 with the gate"
    return None


def refuse_cluster(node: Node) -> str | None:
    """Refuses what does not fit in a cluster, and targets that have none of eight blocks."""
    if reason := refuse(node):
        return reason
    if not node.target.clusters:
        return f"clusters of {node.target.name} are not relied on"
    hidden, experts = node.shape("H", "E")
    if hidden % 64 or experts % ROWS or experts > 2 * ROWS * CLUSTER:
        return (
            f"H = {hidden}, {experts} experts; multiples of 64 and of {ROWS} "
            f"up to {2 * ROWS * CLUSTER} are served"
        )
    return _refuse_lanes(node)


def plan_cluster(node: Node) -> Plan:
    """One launch, a cluster for eight tokens or twice as many."""
    tokens, m16_tiles = node.dim("tokens"), -(-node.dim("E") // (ROWS * CLUSTER))
    columns = 1 if tokens <= ONE_WAVE or node.dim("H") > NARROW else 2
    launch = _kernel("moe_router_cluster", node, early=Early(begins=True)).launch(
        node,
        -(-tokens // (TOKENS * columns)) * CLUSTER,
        256 * m16_tiles,
        _macros(node, BLOCK_TILES=m16_tiles, COLUMNS=columns),
        cluster=CLUSTER,
        tokens=tokens,
    )
    return node.plan(launch)


def cost_cluster(node: Node) -> float:
    """The latency; a wave for every 128 tokens."""
    tokens = node.dim("tokens")
    waves, read = -(-tokens // 128), node["w"].nbytes / node.target.bandwidth
    return read + (0.5 + 2.5 * waves) * 1e-6 + 1e-8 * tokens


def plan(node: Node) -> Plan:
    tokens, experts = node.shape("tokens", "E")
    rows, groups = -(-(experts + ("gate" in node)) // ROWS), -(-tokens // TOKENS)
    arrived = Scratch(4 * groups, zeroed=True)
    node = node.with_scratch(logits=4 * groups * TOKENS * rows * ROWS, arrived=arrived)
    kernel = _kernel("moe_router", node, "logits arrived")
    return node.plan(kernel.launch(node, (rows, groups), 256, _macros(node), tokens=tokens))


def cost(node: Node) -> float:
    """The weights once from memory, then from cache for every eight tokens; the latency."""
    groups = -(-node.dim("tokens") // TOKENS)
    return node["w"].nbytes * (1 + 0.3 * (groups - 1)) / node.target.bandwidth + 4e-6


def refuse_wide(node: Node) -> str | None:
    """Refuses fewer tokens than a block has, and more experts than its registers hold."""
    given, hidden, experts = node.shape("tokens", "H", "E")
    if reason := _refuse_dtype(node):
        return reason
    if given < WIDE_TOKENS:
        return f"{given} tokens; a block of {WIDE_TOKENS} is for more"
    if hidden % 8 or experts + ("gate" in node) > (most := WIDE_EXPERTS[node.target.large_shared]):
        return f"H = {hidden}, {experts} experts; multiples of 8, up to {most} experts"
    return _refuse_lanes(node)


def plan_wide(node: Node) -> Plan:
    """One launch, a block for every 96 tokens."""
    given = node.dim("tokens")
    macros = _macros(node, TOKENS=WIDE_TOKENS, SHARED_LIMIT=node.target.shared_bytes)
    kernel = _kernel("moe_router_wide", node)
    launch = kernel.launch(node, -(-given // WIDE_TOKENS), 256, macros, DECLARED, tokens=given)
    return node.plan(launch)


def cost_wide(node: Node) -> float:
    """A wave of blocks multiplies at about a third of the card's rate."""
    given, hidden = node.shape("tokens", "H")
    target = node.target
    waves = -(-given // (WIDE_TOKENS * target.sms))
    width = -(-(node.dim("E") + ("gate" in node)) // 32)  # n8 tiles of a warp
    each = 2.0 * WIDE_TOKENS * hidden * 32 * width
    return waves * each * target.sms / (0.33 * target.bf16_flops) + 8e-6


def refuse_wgmma(node: Node) -> str | None:
    """Refuses targets without the instruction, few tokens, and experts that are no N of it."""
    target = node.target
    if reason := _refuse_dtype(node):
        return reason
    if not (target.wgmma and target.clusters):
        return f"{target.name} has no wgmma, or no clusters that are relied on"
    given, hidden, experts = node.shape("tokens", "H", "E")
    if given < WGMMA_TOKENS:
        return f"{given} tokens; a cluster of {WGMMA_TOKENS} is for more"
    if hidden % 8 or 2 * given * hidden >= 1 << 32:
        return f"H = {hidden}; multiples of 8 are served, and x below 4 GiB"
    if experts != 256 and (experts % 8 or experts > 128):
        return f"{experts} experts; 256 or multiples of 8 up to 128 are served"
    return _refuse_lanes(node)


def plan_wgmma(node: Node) -> Plan:
    """One launch, a cluster of two blocks for every 128 tokens."""
    given = node.dim("tokens")
    launch = _kernel("moe_router_wgmma", node).launch(
        node,
        -(-given // WGMMA_TOKENS) * 2,
        256,
        _macros(node, STAGES=WGMMA_STAGES),
        DECLARED,
        cluster=2,
        tokens=given,
    )
    return node.plan(launch)


def cost_wgmma(node: Node) -> float:
    """A wave of clusters brings its slabs through L2 at 42 GB/s for each multiprocessor; then 64
    tokens a block are chosen for, 0.1 us each: 28.5 us, measured 29 to 31 (H200).
    """
    given, hidden = node.shape("tokens", "H")
    waves = -(-given // WGMMA_TOKENS) * 2 / node.target.sms
    stage = (node.dim("E") + 8 * ("gate" in node) + WGMMA_TOKENS) * 128  # bytes
    each = stage * -(-hidden // 128) / 42e9
    return max(1, -(-waves // 1)) * (each + 6.4e-6) + 3e-6


CANDIDATES = (
    Candidate("cluster", "moe/router/router_cluster_sm90.cu",
              plan_cluster, cost_cluster, refuse_cluster),
    Candidate("wgmma", "moe/router/router_wgmma_sm90.cu",
              plan_wgmma, cost_wgmma, refuse_wgmma, lambda node: "halves"),  # of k
    Candidate(f"wide_{WIDE_TOKENS}", "moe/router/router_wide_mma.cu",
              plan_wide, cost_wide, refuse_wide,
              why="prefill without wgmma, rehearsed: benchmarks/log/moe/router.md"),
    Candidate("last", "moe/router/router_last_mma.cu", plan, cost, refuse,
              why="decode without clusters, and sizes that the others refuse"),
)  # fmt: skip
