"""The tactic `small n` of `linear` (up to 256 weight rows): latency, not bytes. Imports no CUDA."""

from spark_engine.kernel import Early, Plan
from spark_engine.plugins.formats.linear_layout import M16, PANEL
from spark_engine.plugins.kernels.gemm.stream_k.stream_k_gemm import Problem
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

SPLITS = 64  # parts of k: 8 blocks of a cluster, 8 warps of each
STEP = 16  # elements of k in a matrix step
MOST_STEPS = 6  # a lane holds the weights of these in registers
BLOCK_M = 8  # tokens of a cluster
CLUSTER = 8
KERNEL = Kernel("linear_small_n", "x w y m n k", early=Early(begins=True, lets=True, late=True))


def _steps(k: int) -> int:
    return -(-k // (SPLITS * STEP))


def refuse(node: Node) -> str | None:
    """Refuses all but bf16, over 256 rows of weights, k that no warp holds, a lack of clusters."""
    if not node.target.clusters:
        return f"clusters of {node.target.name} are not relied on"
    for spec in node.specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    n, k = node.shape("N", "K")
    if n > PANEL:
        return f"{n} rows of weights; up to {PANEL} are served"
    if k % STEP or k > SPLITS * STEP * MOST_STEPS:
        return f"k = {k}; multiples of {STEP} up to {SPLITS * STEP * MOST_STEPS} are served"
    return None


def plan(node: Node) -> Plan:
    """One launch of clusters of eight."""
    m, n, k = node.shape("tokens", "N", "K")
    grid = (CLUSTER, -(-n // M16), -(-m // BLOCK_M))
    macros = {"STEPS": _steps(k), "OUT_BF16": node.text("dtype") == "bf16"}
    return node.plan(KERNEL.launch(node, grid, 256, macros, cluster=CLUSTER, m=m, n=n, k=k))


def cost(node: Node) -> float:
    """Its latency, and the rounds of blocks, as measured on an H200."""
    m, n = node.shape("tokens", "N")
    blocks = CLUSTER * -(-n // M16) * -(-m // BLOCK_M)
    return 2.5e-6 + 0.86e-6 * blocks / node.target.sms


SMALL_N = Candidate(
    "small n", "gemm/linear_small_n_cluster_sm90.cu", plan, cost, refuse, recorded=Problem.recorded
)
