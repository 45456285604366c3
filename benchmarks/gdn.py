"""Times the gated delta net's kernels by graph replays over states larger than the L2 cache.

Usage: python -m benchmarks.gdn decode|rings|rounds|prefill|saves|conv|accuracy
Prints microseconds beside the byte floor, or errors. The floor reads and writes all of the state,
as vLLM's row does; a replay ring's own (one part in L written, and the records) stands beside it.
`rounds`: of four tokens behind a ring of 8, with no accepted token's fold left to make and with
three. `saves`: prefills that save their state every so many tokens.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.prepared import Prepared, specs_of, timed
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import H200, Tactic
from spark_engine.op import Op
from spark_engine.plugins.gdn import (
    causal_conv,
    gated_delta,
    gated_delta_cases,
    gdn_decode,
)
from spark_engine.plugins.gdn import gdn_decode_cases as fused_cases
from spark_engine.plugins.gdn.replay_ring import ring_bytes
from spark_engine.tensors import Array, DType

MODELS = {"27B": (16, 48), "35B": (16, 32)}
START = 999  # position: rings are full
SLOTS = 256  # of the states: 0.8 GB and more
ITERATIONS = 24


def rotating(gpu: Gpu, node: Prepared, index: int, rows: int) -> list[Callable[[], None]]:
    """Launches over different slots, each list of slots on the device."""
    order = np.random.default_rng(1).permutation(SLOTS).astype(np.int32)
    made = []
    for i in range(ITERATIONS):
        pick = np.roll(order, -i * rows)[:rows].copy()
        address = node.put(pick)
        made.append(lambda a=address: node.launch({("input", index): a}))
    return made


def decode(
    gpu: Gpu,
    op: Op,
    model: str,
    rows: int,
    state: DType,
    tactics: Sequence[Tactic],
    ring: int = 0,
    tile: int = 1,
    drafts: int = 0,
    behind: bool = False,
) -> None:
    """Times decode rows at position START, all tokens since then in the ring if there is one.

    A round finds its own header from the launch before, which leaves nothing to fold; `behind`: it
    does not, and folds as many accepted tokens as there can be.
    """
    keys, values = MODELS[model]
    launch = gated_delta_cases.Launch(
        tile, (0,) * rows, (START,) * rows, (tile,) * rows, keys, values, 128, 128, DType.BF16,
        state, units=1, ring=ring, drafts=drafts,
    )  # fmt: skip
    if op is gated_delta.STEP:
        attrs, arrays = launch.attrs, list(launch.inputs(np.random.default_rng(0)))
    else:
        made = fused_cases.Launch(launch, "fp8", keep=0)
        attrs, arrays = made.attrs, list(made.inputs(np.random.default_rng(0)))
    names = op.names(attrs, len(arrays))
    for i in op.aliases(attrs).values():
        arrays[i] = np.broadcast_to(arrays[i].dtype.type(0), (SLOTS + 1, *arrays[i].shape[1:]))
    stored = rows * values * 128 * 128 * state.itemsize
    floor = 2 * stored / H200.bandwidth
    line = f"{op.name:17s} {model} B={rows:<3d} {state.value:4s} floor {floor * 1e6:6.1f}"
    line += f", {tile} tokens{' behind' if behind else ''}" if drafts else ""
    if ring:
        own = stored * (1 + 1 / ring) + rows * ring_bytes(ring, keys, values, 128, 128)
        line += f", ring of {ring:2d} {own / H200.bandwidth * 1e6:6.1f}"
    line += " us:"
    for tactic in tactics:
        refused = tactic.refuse(attrs, specs_of(op, arrays), H200)
        if refused:
            continue
        node = Prepared(gpu, op, tactic, attrs, arrays)
        if behind:
            ring_out = [r.updates for r in op.made(attrs)].index("gdn_ring")
            node.outputs[ring_out] = node.put(arrays[names.index("gdn_ring")])
        seconds = timed(gpu, rotating(gpu, node, names.index("slots"), rows))
        line += f"  {tactic.name} {seconds * 1e6:.1f} ({floor / seconds:.0%})"
        node.free()
    print(line, flush=True)


def prefill(
    gpu: Gpu, op: Op, model: str, lengths: tuple[int, ...], ring: int = 0, every: int = 0
) -> None:
    """`every`: tokens after which a sequence's state is saved."""
    keys, values = MODELS[model]
    rows = [(s, t, min(64, n - t)) for s, n in enumerate(lengths) for t in range(0, n, 64)]
    slots, starts, counts = zip(*rows, strict=True)
    ended = [every > 0 and (t + n) % every == 0 for t, n in zip(starts, counts, strict=True)]
    saves = np.where(ended, len(lengths) - 1 + np.cumsum(ended), -1).astype(np.int32)
    units = len(lengths) + sum(ended)
    one = gated_delta_cases.Launch(
        64, (0,), (0,), (64,), keys, values, 128, 128, DType.BF16, units=units
    )
    c, ba, *weights = one.inputs(np.random.default_rng(0))
    c, ba = (np.resize(a, (len(rows) * 64, a.shape[1])) for a in (c, ba))
    steps = [np.asarray(a, np.int32) for a in (slots, starts, counts, slots)]
    steps.append(saves)
    arrays: tuple[Array, ...] = (c, ba, *weights[:3], *steps)
    attrs = one.attrs
    if op is causal_conv.OP:
        channels = 2 * keys * 128 + values * 128
        x = np.zeros((len(rows) * 64, channels + values * 128), DType.BF16.numpy)
        x[:, :channels] = arrays[0]
        history = np.zeros((units + 1, 3, channels), DType.BF16.numpy)
        arrays = (x, np.ones((channels, 4), np.float32), history, *arrays[5:])
        attrs = {"tile": 64}
    if ring:
        made = replace(one, ring=ring)
        attrs, rings = made.attrs, (units + 1, ring, made.layout.width)
        arrays = (*arrays[:5], np.zeros(rings, np.float32), *arrays[5:])
    for tactic in op.cuda.tactics:
        node = Prepared(gpu, op, tactic, attrs, arrays)
        seconds = timed(gpu, [node.launch] * 5)
        label = f"{op.name} {model} {len(lengths)} x {lengths[0]}, {sum(ended)} saves"
        parts = [f"{name} {timed(gpu, [run] * 5) * 1e6:.0f}" for name, run in node.alone()]
        print(f"{label} {tactic.name}: {seconds * 1e6:.0f} us", *parts, flush=True)
        node.free()


def accuracy(gpu: Gpu) -> None:
    """Relative L2 error of each output of the chunk's cases, activations in bf16."""
    op = gated_delta.CHUNK
    for case in op.cases:
        made = case.inputs(np.random.default_rng(zlib.crc32(case.label.encode())))
        arrays = (*(a.astype(DType.BF16.numpy) for a in made[:2]), *made[2:])
        node = Prepared(gpu, op, op.cuda.tactics[0], case.attrs, arrays)
        slots = arrays[op.names(case.attrs, len(arrays)).index("slots")]
        node.launch()
        got, want = node.fetch(), op.reference(case.attrs, arrays)
        node.free()
        for outputs in (got, want):
            case.ignore(outputs)  # type: ignore[misc]
        live = np.unique(slots[slots >= 0])
        o, state = far(got[0], want[0]), far(got[1][live], want[1][live])
        print(f"{case.label}: o {o:.1e}, state {state:.1e}")


def rings(gpu: Gpu, ring: int) -> None:
    """The decode step over rings of one length."""
    op, tactics = gdn_decode.OP, gdn_decode.OP.cuda.tactics
    for model in MODELS:
        for rows in (1, 8, 32, 64, 128):
            decode(gpu, op, model, rows, DType.F32, tactics, ring)
    for rows in (1, 32, 128):
        decode(gpu, op, "27B", rows, DType.BF16, tactics, ring)


def rounds(gpu: Gpu, all_rows: tuple[int, ...] = (1, 32, 128)) -> None:
    """Rounds of four tokens."""
    op = gdn_decode.OP
    for model in MODELS:
        for behind in (False, True):
            for rows in all_rows:
                decode(gpu, op, model, rows, DType.F32, op.cuda.tactics, 8, 4, 3, behind)


def saving(gpu: Gpu) -> None:
    """Prefills of 8,192 tokens that save twice, eight times and not at all."""
    for model in MODELS:
        for every in (0, 4096, 1024):
            prefill(gpu, gated_delta.CHUNK, model, (8192,), 8, every)
            prefill(gpu, causal_conv.OP, model, (8192,), 0, every)


def far(got: Array, want: Array) -> float:
    """‖got − want‖ / ‖want‖."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def main(what: str) -> None:
    gpu = Gpu()
    if what == "accuracy":
        return accuracy(gpu)
    if what == "decode":
        tactics = list(gdn_decode.OP.cuda.tactics)
        for model, rows in (("27B", 1), ("27B", 2), ("27B", 8), ("27B", 32), ("27B", 128),
                            ("35B", 1), ("35B", 32), ("35B", 128)):  # fmt: skip
            decode(gpu, gdn_decode.OP, model, rows, DType.F32, tactics)
        for rows in (1, 32, 128):
            decode(gpu, gdn_decode.OP, "27B", rows, DType.BF16, tactics)
        decode(gpu, gated_delta.STEP, "27B", 128, DType.F32, tactics)
    elif what == "rings":
        for ring in (8, 16):
            rings(gpu, ring)
    elif what == "rounds":
        rounds(gpu)
    elif what == "saves":
        saving(gpu)
    elif what == "prefill":
        for model in MODELS:
            for ring in (0, 8):
                prefill(gpu, gated_delta.CHUNK, model, (8192,), ring)
                prefill(gpu, gated_delta.CHUNK, model, (1024,) * 8, ring)
    else:
        prefill(gpu, causal_conv.OP, "27B", (8192,))


if __name__ == "__main__":
    main(sys.argv[1])
