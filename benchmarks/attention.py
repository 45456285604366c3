"""Times paged attention by graph replays over caches larger than the L2 cache.

Usage: python -m benchmarks.attention decode|fused|prefill|round TOKENS|rounds
Decode and fused (with the gate and FP8 copies, as a step has it) print microseconds and the share
of the byte floor by tactic; round the same for one token a row and for TOKENS; rounds the best
tactic of one to four tokens and what they cost beside one; prefill microseconds
of the attention alone and TFLOP/s of its causal products, by tactic. Caches of decode hold zeros:
only time is read. Prefill's hold random values: products of zeros run at a higher clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.prepared import Prepared, specs_of, timed
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import H200
from spark_engine.op import Attrs, Op
from spark_engine.plugins.attention import attention_decode
from spark_engine.plugins.attention.paged_attention import OP
from spark_engine.tensors import Array, DType

MODELS = {"27B": (24, 4), "35B": (16, 2)}
DIM, HALF, PAGE = 256, 32, 64
POOL = 1 << 30  # bytes of caches that launches rotate through, so that none is found in L2
LAUNCHES = (4, 64)  # of a graph, at least and at most
DECODE = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (32, 1024), (32, 8192), (128, 1024))
FUSED = ((1, 1024), (8, 1060), (32, 1060), (128, 1024), (128, 1060))
ROUND = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 32768), (8, 32768), (1, 131072))
LONG = 16384  # tokens of a row from which on it is not read by each query anew
ROUNDS = ((1, 1024), (8, 1024), (1, 32768), (8, 32768), (1, 131072), (8, 131072))
PREFILL = (  # sequences, tokens before, tokens of each
    (1, 0, 256),
    (1, 0, 1024),
    (8, 0, 1024),
    (1, 0, 8192),
    (1, 12288, 4096),
    (1, 61440, 4096),
    (1, 122880, 8192),
)


def operands(
    tile: int, model: str, kv: DType, slots: int, context: int, steps: tuple[Array, Array, Array]
) -> tuple[Attrs, tuple[Array, ...]]:
    """A pool of `slots` sequences of `context` tokens each, and the rows of one launch."""
    heads, kv_heads = MODELS[model]
    rows, pages = len(steps[0]), -(-context // PAGE)
    attrs: Attrs = {
        "tile": tile,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": DIM,
        "eps": 1e-6,
        "kv_dtype": kv.value,
    }
    storage = DType.U8 if kv is DType.F8E4M3 else kv
    table = np.random.default_rng(0).permutation(slots * pages).astype(np.int32)
    width = 2 * (heads + kv_heads) * DIM
    floats = (np.ones(DIM), np.ones(DIM), 1e6 ** (-np.arange(HALF) / HALF), np.ones(2))
    shape = (slots * pages + 1, kv_heads, PAGE, DIM)
    cache = np.broadcast_to(np.zeros((), storage.numpy), shape)
    table = np.concatenate([table.reshape(slots, pages), np.full((1, pages), -1, np.int32)])
    qkv = np.ones((rows * tile, width), DType.BF16.numpy)
    return attrs, (qkv, *(f.astype(np.float32) for f in floats), cache, cache, table, *steps)


def decode(
    gpu: Gpu, model: str, rows: int, context: int, kv: DType, fused: bool = False, tile: int = 1
) -> None:
    """One line: every tactic's time beside the floor."""
    op, floor, times = tactics(gpu, model, rows, context, kv, fused, tile)
    line = (
        f"{op.name} {model} {kv.value} B={rows} T={tile} ctx={context} floor {floor * 1e6:.1f} us:"
    )
    for name, seconds in times.items():
        line += f"  {name} {seconds * 1e6:.1f} ({floor / seconds:.0%})"
    print(line, flush=True)


def rounds(gpu: Gpu, model: str, rows: int, context: int) -> None:
    """One line: the best tactic of one to four tokens, and its time beside one token's."""
    line, one = f"rounds {model} f8e4m3 B={rows} ctx={context}", 0.0
    for tile in (1, 2, 3, 4):
        _, floor, times = tactics(gpu, model, rows, context, DType.F8E4M3, True, tile)
        name, seconds = min(times.items(), key=lambda pair: pair[1])
        if tile == 1:
            line, one = f"{line} floor {floor * 1e6:.1f} us:", seconds
        line += f"  T={tile} {seconds * 1e6:.1f} ({seconds / one:.2f}x, {name})"
    print(line, flush=True)


def tactics(
    gpu: Gpu, model: str, rows: int, context: int, kv: DType, fused: bool, tile: int
) -> tuple[Op, float, dict[str, float]]:
    """The op, the floor of its bytes, and seconds by tactic."""
    _, kv_heads = MODELS[model]
    token = 2 * kv_heads * DIM * (1 if kv is DType.F8E4M3 else 2)  # bytes, keys and values
    launches = int(np.clip(POOL // (rows * context * token), *LAUNCHES))
    slots = rows * launches
    order = np.arange(slots, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    steps = (order[:rows], ones * (context - tile), ones * tile)
    attrs, arrays = operands(tile, model, kv, slots, context, steps)
    op: Op = OP
    if fused:
        op, arrays = attention_decode.OP, (*arrays, np.full(1, 0.01, np.float32))
        sizes = {name: attrs[name] for name in attention_decode.SIZES}
        attrs = {**sizes, "tile": tile, "keep": 0, "quant": "fp8", "n": 1}
    times = {}
    for tactic in op.cuda.tactics:
        alone = tile > 1 and context >= LONG and tactic.name.endswith("_by_1")
        if alone or tactic.refuse(attrs, specs_of(op, arrays), H200):
            continue
        node = Prepared(gpu, op, tactic, attrs, arrays)
        times[tactic.name] = timed(gpu, list(rotating(node, order, launches)))
        node.free()
    return op, rows * context * token / H200.bandwidth, times


def rotating(node: Prepared, order: Array, launches: int) -> Iterator[Callable[[], None]]:
    """Launches over different slots."""
    for slots in np.split(order, launches):
        address = node.put(slots)
        yield lambda a=address: node.launch({("input", 8): a})


def prefill(gpu: Gpu, model: str, sequences: int, start: int, length: int, kv: DType) -> None:
    """`length` tokens of each of `sequences` prompts behind `start` others, in one launch."""
    rows = [
        (s, start + t, min(64, length - t)) for s in range(sequences) for t in range(0, length, 64)
    ]
    slots, starts, counts = (np.asarray(x, np.int32) for x in zip(*rows, strict=True))
    attrs, arrays = operands(64, model, kv, sequences, start + length, (slots, starts, counts))
    arrays = noisy(arrays)
    flops = 4 * DIM * MODELS[model][0] * sequences * length * (start + (length + 1) / 2)
    line = f"prefill {model} {kv.value} {sequences} x {length} behind {start}:"
    for tactic in OP.cuda.tactics:
        if tactic.refuse(attrs, specs_of(OP, arrays), H200):
            continue
        node = Prepared(gpu, OP, tactic, attrs, arrays)
        node.launch()
        _, (_, attend) = node.alone()
        seconds = timed(gpu, [attend] * 4)
        line += f"  {tactic.name} {seconds * 1e6:.0f} us, {flops / seconds / 1e12:.0f} TFLOP/s;"
        node.free()
    print(line, flush=True)


def noisy(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands with random activations and pages; e4m3 codes are finite ones."""
    rng = np.random.default_rng(0)

    def like(array: Array) -> Array:
        one = rng.standard_normal((1, *array.shape[1:]), np.float32)
        if array.dtype == np.uint8:
            made: Array = rng.integers(0, 256, one.shape, np.uint8) & np.uint8(0xBF)
        else:
            made = one.astype(array.dtype)
        return np.repeat(made, len(array), 0)

    return (like(arrays[0]), *arrays[1:5], like(arrays[5]), like(arrays[6]), *arrays[7:])


def main(what: str, *tokens: str) -> None:
    gpu = Gpu()
    if what == "decode":
        for model in MODELS:
            for rows, context in DECODE:
                decode(gpu, model, rows, context, DType.F8E4M3)
        decode(gpu, "35B", 128, 1024, DType.BF16)
    elif what == "fused":
        for model in MODELS:
            for rows, context in FUSED:
                decode(gpu, model, rows, context, DType.F8E4M3, fused=True)
    elif what == "rounds":
        for model in MODELS:
            for rows, context in ROUNDS:
                rounds(gpu, model, rows, context)
    elif what == "round":
        for model in MODELS:
            for rows, context in ROUND:
                for tile in (1, *map(int, tokens)):
                    decode(gpu, model, rows, context, DType.F8E4M3, fused=True, tile=tile)
    else:
        for model in MODELS:
            for kv in (DType.F8E4M3, DType.BF16):
                for shape in PREFILL:
                    prefill(gpu, model, *shape, kv)


if __name__ == "__main__":
    main(*sys.argv[1:])
