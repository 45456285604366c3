"""The CUDA side of `moe_router`: one launch.

`cluster`: eight blocks that exchange logits through their shared memory. `last`: any number of
blocks; the one that arrives last at its tokens chooses for them. `wide_*`: a block has that many
tokens and all experts, for prefill. `wgmma`: two blocks of a cluster have 128 tokens, all experts
and half of k each.
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import (
    Attrs,
    Cuda,
    Early,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.tensors import DType

ROWS, TOKENS = 16, 8  # of a block
HELD = 4  # k-slabs of 64 k that a warp holds
ONE_WAVE = 64  # tokens whose clusters of 8 tokens are surely all resident on an H200
WIDE_EXPERTS = 320  # of a block, the gate among them
WIDE_STAGES = 4
WGMMA_TOKENS, WGMMA_STAGES = 128, 4  # of a cluster; of its blocks
CLUSTER = 8  # blocks that share tokens, each with one or two times ROWS experts


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses anything but bf16, and rows that do not fit in registers."""
    if reason := _refuse_dtype(specs):
        return reason
    hidden, experts = specs[0].dims[1], specs[1].dims[0]
    if hidden % 8 or hidden > 8 * 64 * HELD:
        return f"H = {hidden}; multiples of 8 up to {8 * 64 * HELD} are served"
    if experts > 1024:
        return f"{experts} experts; up to 1024 are served"
    return None


def _refuse_dtype(specs: Specs) -> str | None:
    for spec in specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    return None


def refuse_cluster(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what does not fit in a cluster, and targets that have none of eight blocks."""
    reason = refuse(attrs, specs, target)
    if reason:
        return reason
    if not target.clusters:
        return f"clusters of {target.name} are not relied on"
    hidden, experts = specs[0].dims[1], specs[1].dims[0]
    if hidden % 64 or experts % ROWS or experts > 2 * ROWS * CLUSTER:
        return (
            f"H = {hidden}, {experts} experts; multiples of 64 and of {ROWS} "
            f"up to {2 * ROWS * CLUSTER} are served"
        )
    gated = len(specs) == 3
    if int(attrs["top_k"]) + gated > 32:
        return f"{attrs['top_k']} experts a token; a lane each is served, 32 with the gate"
    return None


def plan_cluster(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch, a cluster for eight tokens or twice as many."""
    (tokens, hidden), experts = specs[0].dims, specs[1].dims[0]
    gated, m16_tiles = len(specs) == 3, -(-experts // (ROWS * CLUSTER))
    columns = 1 if tokens <= ONE_WAVE else 2
    sizes = {
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "TOP_K": int(attrs["top_k"]),
        "GATE": int(gated),
        "BLOCK_TILES": m16_tiles,
        "COLUMNS": columns,
    }
    launch = Launch(
        "moe_router_cluster",
        (-(-tokens // (TOKENS * columns)) * CLUSTER, 1, 1),
        (256 * m16_tiles, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 1, 2 if gated else 1)),
            *(Pointer("output", i) for i in range(2)),
            Scalar("i32", tokens),
        ),
        cluster=(CLUSTER, 1, 1),
        defines=tuple((name, str(value)) for name, value in sizes.items()),
        pdl=True,
        early=Early(begins=True),
    )
    return Plan((launch,))


def cost_cluster(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The latency; a wave for every 128 tokens."""
    tokens = specs[0].dims[0]
    waves = -(-tokens // 128)
    return specs[1].nbytes / target.bandwidth + (0.5 + 2.5 * waves) * 1e-6 + 1e-8 * tokens


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch."""
    (tokens, hidden), experts = specs[0].dims, specs[1].dims[0]
    gated = len(specs) == 3
    sizes = {
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "TOP_K": int(attrs["top_k"]),
        "GATE": int(gated),
    }
    rows, groups = -(-(experts + gated) // ROWS), -(-tokens // TOKENS)
    launch = Launch(
        "moe_router",
        (rows, groups, 1),
        (256, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 1, 2 if gated else 1)),
            *(Pointer("output", i) for i in range(2)),
            *(Pointer("scratch", i) for i in range(2)),
            Scalar("i32", tokens),
        ),
        defines=tuple((name, str(value)) for name, value in sizes.items()),
        pdl=True,
    )
    logits = Scratch(4 * groups * TOKENS * rows * ROWS)
    return Plan((launch,), (logits, Scratch(4 * groups, zeroed=True)))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The weights once from memory, then from cache for every eight tokens; the latency."""
    groups = -(-specs[0].dims[0] // TOKENS)
    return specs[1].nbytes * (1 + 0.3 * (groups - 1)) / target.bandwidth + 4e-6


def _wide(attrs: Attrs, specs: Specs, tokens: int, target: Target) -> tuple[int, int, int]:
    """(stages, bytes of shared memory, n8 tiles of a warp) of blocks of so many tokens."""
    experts = specs[1].dims[0] + len(specs) - 2
    width = -(-experts // 32)
    stage = (32 * width + tokens) * 128
    stages = min(WIDE_STAGES, target.shared_bytes // stage)
    return stages, stages * stage, width


def refuse_wide(attrs: Attrs, specs: Specs, target: Target, tokens: int) -> str | None:
    """Refuses fewer tokens than a block has, and more experts than its registers hold."""
    (given, hidden), experts = specs[0].dims, specs[1].dims[0]
    if reason := _refuse_dtype(specs):
        return reason
    if given < tokens:
        return f"{given} tokens; a block of {tokens} is for more"
    if hidden % 8 or experts + len(specs) - 2 > WIDE_EXPERTS:
        return f"H = {hidden}, {experts} experts; multiples of 8, up to {WIDE_EXPERTS} experts"
    if int(attrs["top_k"]) + len(specs) - 2 > 32:
        return f"{attrs['top_k']} experts a token; a lane each is served, 32 with the gate"
    if _wide(attrs, specs, tokens, target)[0] < 2:
        return f"two stages of {tokens} tokens do not fit the shared memory of {target.name}"
    return None


def plan_wide(attrs: Attrs, specs: Specs, target: Target, tokens: int) -> Plan:
    """One launch, a block for every `tokens` tokens."""
    (given, hidden), experts = specs[0].dims, specs[1].dims[0]
    gated = len(specs) == 3
    stages, shared, _ = _wide(attrs, specs, tokens, target)
    sizes = {
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "TOP_K": int(attrs["top_k"]),
        "GATE": int(gated),
        "TOKENS": tokens,
        "STAGES": stages,
    }
    launch = Launch(
        "moe_router_wide",
        (-(-given // tokens), 1, 1),
        (256, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 1, 2 if gated else 1)),
            *(Pointer("output", i) for i in range(2)),
            Scalar("i32", given),
        ),
        shared=shared,
        defines=tuple((name, str(value)) for name, value in sizes.items()),
        pdl=True,
    )
    return Plan((launch,))


def cost_wide(attrs: Attrs, specs: Specs, target: Target, tokens: int) -> float:
    """A wave of blocks multiplies at about a third of the card's rate."""
    given, hidden = specs[0].dims
    waves = -(-given // (tokens * target.sms))
    each = 2.0 * tokens * hidden * 32 * _wide(attrs, specs, tokens, target)[2]
    return waves * each * target.sms / (0.33 * target.bf16_flops) + 8e-6


def _wide_tactic(tokens: int) -> Tactic:
    refuse_ = partial(refuse_wide, tokens=tokens)
    plan_ = partial(plan_wide, tokens=tokens)
    cost_ = partial(cost_wide, tokens=tokens)
    return Tactic(f"wide_{tokens}", "moe/moe_router_wide.cu", refuse_, plan_, cost_, _wide_order)


def _wgmma_stage(specs: Specs) -> int:
    """Bytes of a stage; the gate is a tile of eight rows."""
    return (specs[1].dims[0] + 8 * (len(specs) == 3) + WGMMA_TOKENS) * 128


def refuse_wgmma(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses targets without the instruction, few tokens, and experts that are no N of it."""
    if reason := _refuse_dtype(specs):
        return reason
    if not (target.wgmma and target.clusters):
        return f"{target.name} has no wgmma, or no clusters that are relied on"
    (given, hidden), experts, gated = specs[0].dims, specs[1].dims[0], len(specs) == 3
    if given < WGMMA_TOKENS:
        return f"{given} tokens; a cluster of {WGMMA_TOKENS} is for more"
    if hidden % 8 or 2 * given * hidden >= 1 << 32:
        return f"H = {hidden}; multiples of 8 are served, and x below 4 GiB"
    if experts != 256 and (experts % 8 or experts > 128):
        return f"{experts} experts; 256 or multiples of 8 up to 128 are served"
    if int(attrs["top_k"]) + gated > 32:
        return f"{attrs['top_k']} experts a token; a lane each is served, 32 with the gate"
    if WGMMA_STAGES * _wgmma_stage(specs) > target.shared_bytes:
        return f"{WGMMA_STAGES} stages do not fit the shared memory of {target.name}"
    return None


def plan_wgmma(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch, a cluster of two blocks for every 128 tokens."""
    (given, hidden), gated = specs[0].dims, len(specs) == 3
    sizes = {
        "HIDDEN": hidden,
        "EXPERTS": specs[1].dims[0],
        "TOP_K": int(attrs["top_k"]),
        "GATE": int(gated),
        "STAGES": WGMMA_STAGES,
    }
    launch = Launch(
        "moe_router_wgmma",
        (-(-given // WGMMA_TOKENS) * 2, 1, 1),
        (256, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 1, 2 if gated else 1)),
            *(Pointer("output", i) for i in range(2)),
            Scalar("i32", given),
        ),
        shared=WGMMA_STAGES * _wgmma_stage(specs),
        cluster=(2, 1, 1),
        defines=tuple((name, str(value)) for name, value in sizes.items()),
        pdl=True,
    )
    return Plan((launch,))


def cost_wgmma(attrs: Attrs, specs: Specs, target: Target) -> float:
    """A wave of clusters brings its slabs through L2 at 42 GB/s for each multiprocessor; then 64
    tokens a block are chosen for, 0.1 us each: 28.5 us, measured 29 to 31 (H200).
    """
    given, hidden = specs[0].dims
    waves = -(-given // WGMMA_TOKENS) * 2 / target.sms
    each = _wgmma_stage(specs) * -(-hidden // 128) / 42e9
    return max(1, -(-waves // 1)) * (each + 6.4e-6) + 3e-6


def _wgmma_order(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """The sum of k's first half and that of its second, then both."""
    return "halves"


def _wide_order(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Sums run over k in order, whatever the block's tokens."""
    return "wide"


CUDA = Cuda(
    tactics=(
        Tactic("cluster", "moe/moe_router_cluster.cu", refuse_cluster, plan_cluster, cost_cluster),
        Tactic(
            "wgmma",
            "moe/moe_router_wgmma.cu",
            refuse_wgmma,
            plan_wgmma,
            cost_wgmma,
            _wgmma_order,
        ),
        _wide_tactic(96),
        _wide_tactic(64),
        _wide_tactic(32),
        Tactic("last", "moe/moe_router.cu", refuse, plan, cost),
    )
)
