"""Launches with blocks that wait for one another say so: only a whole device can run them.

Item 5 of the hazards. What waits is found by reading the sources; where a launch's work is cut, by
doing its sum again. Compiles nothing.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from itertools import product

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Attrs, Launch, Scalar, Target  # noqa: E402
from spark_engine.plugins import registry  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.repository import ROOT, files  # noqa: E402

# The one function that waits for another block, and its source.
WAITS, WRITTEN = "wait_until_equal(", "common/ptx.cuh"
# Sleeps once and looks at nothing: its warps begin apart.
ONCE = {
    "moe/experts/experts_tiles.cuh": "__nanosleep(Item<UP>::warp() / (WARPS / 2) * HALF_STAGE);"
}
# How else a kernel could look again and again at what another block writes.
SPINS = re.compile(
    r"ld\.(?:acquire|relaxed|volatile)[\w.]*\.global|ld\.acquire\.(?:gpu|sys)|nanosleep|"
    r"\batom(?:ic)?(?:\.\w+)*\.?(?:cas|CAS)\b|\bvolatile\s+(?:const\s+)?\w+\s*\*|"
    r"\b__ldcv\b|cooperative_groups|"
    r"while\s*\([^;{]*(?:atomicAdd|atomicOr|__ldcg|count_up)\s*\("
)


def code(text: str) -> str:
    """A source without comments."""
    return re.sub(r"//[^\n]*", "", text)


def waits(source: str, macros: Mapping[str, str]) -> bool:
    """Whether a kernel of this source, compiled with these macros, waits for other blocks."""
    texts, waiting = {}, [source]
    while waiting:
        name = waiting.pop()
        texts[name] = _taken((nvrtc.SOURCES / name).read_text(), macros)
        waiting += [n for n in re.findall(r'#include "([^"]+)"', texts[name]) if n not in texts]
    return any(WAITS in code(text) for name, text in texts.items() if name != WRITTEN)


def _taken(text: str, macros: Mapping[str, str]) -> str:
    """The branch of `#ifdef SKINNY … #else … #endif`, or of BLOCK_TILES, that is compiled."""
    found = re.search(
        r"^#ifdef (SKINNY|BLOCK_TILES)$(.*?)^#else$(.*?)^#endif$", text, re.MULTILINE | re.DOTALL
    )
    return text if found is None else found[2 if found[1] in macros else 3]


def is_cut(launch: Launch) -> bool:
    """Whether a piece of the launch's work begins inside a tile, as `Problem::begin` cuts it."""
    numbers = (a for a in launch.args if isinstance(a, Scalar) and a.kind == "i32")
    m, n, k = (int(a.value) for a in numbers)
    macros = {name: int(value) for name, value in launch.defines}
    if macros.get("BAND"):
        return False  # blocks take whole tiles in turn
    unit = {"linear": 64, "fp8_linear": 128, "fp8_block_linear": 128, "nvfp4_linear": 64}
    unit |= {"nvfp4_linear_a4": 128, "int4_linear": 64, "linear_bias": 64}  # bytes, elements
    of_tile = -(-k // unit[launch.symbol]) // macros["CUT"]
    line = -(-n // macros["BLOCK_N"]) * -(-m // macros["BLOCK_M"]) * of_tile
    blocks = launch.grid[0]
    return any(line * block // blocks % of_tile for block in range(blocks))


def test_the_reader_sees_what_waits() -> None:
    for text in ("ld.acquire.gpu.global.u32 a, [b];", "while (atomicAdd(p, 0) != n) { }",
                 "while (__ldcg(flag) == 0);", "volatile int* flag", "atomicCAS(p, 0, 1)",
                 "ld.volatile.global.u32", "__nanosleep(20)", "atom.global.cas.b32"):  # fmt: skip
        assert SPINS.search(text), text
    for text in ("atomicAdd(p, 1);", 'asm volatile("x")', "while (bits) f();", "ld.global.nc.b32"):
        assert not SPINS.search(text), text


def test_blocks_wait_for_others_by_one_function_only() -> None:
    """A source that waits by other means is listed here, and its launches must say so."""
    found = set()
    for path in files("plugins/*.cu", "plugins/*.cuh"):
        name, text = path.relative_to("plugins/kernels").as_posix(), code((ROOT / path).read_text())
        if name in ONCE:
            assert text.count(ONCE[name]) == 1
        if SPINS.search(text.replace(ONCE.get(name, " "), " ")):
            found.add(name)
    # Blocks of peers.cuh and pushed.cuh wait for the same block of other GPUs, never for one of
    # the same launch; launches over several ranks are resident all the same (test_ranks.py).
    assert found == {WRITTEN, "ranks/peer_ptx.cuh", "ranks/peers.cuh"}
    (body,) = re.findall(r"wait_until_equal\(.*?^}", (nvrtc.SOURCES / WRITTEN).read_text(),
                         re.MULTILINE | re.DOTALL)  # fmt: skip
    assert len(SPINS.findall(body)) == len(
        SPINS.findall(code((nvrtc.SOURCES / WRITTEN).read_text()))
    )


# Of each source that waits, a node's operands after packing: x [m, k] and weights of n rows.
OPERANDS = {
    "linear": lambda m, n, k: [(DType.BF16, m, k), (DType.BF16, n, k)],
    "linear_bias": lambda m, n, k: [(DType.BF16, m, k), (DType.BF16, n, k), (DType.F32, n)],
    "fp8_linear": lambda m, n, k: [
        (DType.U8, m, k), (DType.U8, n, k), (DType.F32,), (DType.F32, n)
    ],
    "fp8_block_linear": lambda m, n, k: [
        (DType.U8, m, k), (DType.F32, m, -(-k // 128)),
        (DType.U8, n, k), (DType.F32, -(-n // 128), -(-k // 128))
    ],
    "nvfp4_linear": lambda m, n, k: [
        (DType.BF16, m, k), (DType.U8, n, k // 2), (DType.U8, n, k // 16), (DType.F32, n)
    ],
    "int4_linear": lambda m, n, k: [
        (DType.BF16, m, k), (DType.U8, n, k // 2), (DType.U8, n, k // 16), (DType.F32, n)
    ],
    "nvfp4_linear_a4": lambda m, n, k: [
        (DType.U8, m, k // 2), (DType.F8E4M3, m, k // 16), (DType.U8, n, k // 2),
        (DType.F8E4M3, n, k // 16), (DType.F32, n)
    ],
}  # fmt: skip
SERVED = ((5120, 5120), (5120, 17408), (34816, 5120), (96, 5120), (256, 2048), (64, 512))


def test_the_sources_that_wait_are_tried_below() -> None:
    every = [p.relative_to("plugins/kernels").as_posix() for p in files("plugins/*.cu")]
    streamed = (t for op in OPERANDS for t in registry.get(op).cuda.tactics)
    sources = {tactic.source for tactic in streamed if tactic.name == "stream-k"}
    assert {name for name in every if waits(name, {})} == sources


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("name", OPERANDS)
def test_every_launch_that_waits_is_planned_as_such(name: str, target: Target) -> None:
    seen = Counter[tuple[str, bool, bool]]()
    attrs: Attrs = {"gelu": ""} if name == "linear_bias" else {"dtype": "bf16"}
    for (n, k), m in product(SERVED, (1, 8, 33, 128, 300, 2048)):
        shapes = OPERANDS[name](m, n, k)
        specs = tuple(TensorSpec(f"s{i}", d, tuple(dims)) for i, (d, *dims) in enumerate(shapes))
        for tactic in registry.get(name).cuda.tactics:
            if tactic.refuse(attrs, specs, target) is not None:
                continue
            (launch,) = tactic.plan(attrs, specs, target).launches
            if not waits(launch.source or tactic.source, dict(launch.defines)):
                assert not launch.resident, launch
                continue
            cut = is_cut(launch)
            seen[tactic.name, launch.resident, cut] += 1
            assert launch.resident or not cut, (tactic.name, launch)
            assert not launch.resident or math.prod(launch.grid) <= target.sms, launch
    kinds = {(tactic, resident) for tactic, resident, _ in seen}
    assert {("stream-k", True), ("whole tiles", False)} <= kinds, seen
    assert sum(count for (_, _, cut), count in seen.items() if cut) > 5, seen


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("name", ["linear", "fp8_linear"])
def test_the_largest_products_have_a_tactic_of_one_order(name: str, target: Target) -> None:
    """Tiles in bands number none of a line's k-slabs, so a long line does not refuse them."""
    shapes = OPERANDS[name](8192, 34816, 5120)
    specs = tuple(TensorSpec(f"s{i}", d, tuple(dims)) for i, (d, *dims) in enumerate(shapes))
    takes = {
        tactic.name: tactic.reduction_key({"dtype": "bf16"}, specs, target)
        for tactic in registry.get(name).cuda.tactics
        if tactic.refuse({"dtype": "bf16"}, specs, target) is None
    }
    assert takes.get("whole tiles"), takes
