"""Times sampling at the served vocabulary and the router of one 35B layer, by graph replay.

Logits (and router weights) rotate over copies larger than the cache. Prints rows, settings,
microseconds and how often the logits could have been read in that time. Run as
`python -m benchmarks.sampling` where a GPU is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import graphs
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Tactic, Target
from spark_engine.op import Attrs
from spark_engine.plugins.drafts import draft_token
from spark_engine.plugins.moe import moe_router
from spark_engine.plugins.sampling import sample
from spark_engine.tensors import Array, DType, TensorSpec

WIDTH, VOCAB, TOP, BIASES = 248_320, 248_077, 20, 32
REPLAYS = 5


@dataclass(frozen=True)
class Rule:
    """One setting of all rows, or of every other one (`half`; the rest are greedy)."""

    name: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    half: bool = False


RULES = (
    Rule("greedy", 0.0),
    Rule("greedy, presence 1.5", 0.0, presence=1.5),
    Rule("top_k 20, top_p 0.95", 0.8, 0.95, 20),
    Rule("top_k 20, top_p 0.95, presence 1.5", 0.8, 0.95, 20, presence=1.5),
    Rule("every other: top_k 20, top_p 0.95", 0.8, 0.95, 20, half=True),
    Rule("plain"),
    Rule("top_p 0.9", top_p=0.9),
    Rule("min_p 0.05", min_p=0.05),
    Rule("top_k 200", top_k=200),
)


class Timer:
    """A GPU, arrays uploaded once, and kernels compiled once."""

    def __init__(self, gpu: Gpu, target: Target, cache: Path) -> None:
        self.gpu, self.target, self._cache = gpu, target, cache

    def put(self, array: Array) -> int:
        """The address of a copy on the device; the caller frees it."""
        address = self.gpu.allocate(array.nbytes)
        self.gpu.upload(address, np.ascontiguousarray(array))
        self.gpu.wait()
        return address

    def seconds(
        self,
        tactic: Tactic,
        attrs: Attrs,
        specs: tuple[TensorSpec, ...],
        copies: Sequence[Sequence[int]],
        outputs: Sequence[int],
    ) -> float:
        """Seconds of one run among `copies` (operands' addresses) one after another in a graph."""
        gpu, plan = self.gpu, tactic.plan(attrs, specs, self.target)
        made = [gpu.allocate(n) for n in outputs]
        scratch = [gpu.allocate(s.nbytes) for s in plan.scratch]
        for address, need in zip(scratch, plan.scratch, strict=True):
            gpu.fill(address, 0, need.nbytes)
        functions = graphs.load(gpu, tactic.source, plan, self.target, self._cache)

        def queued() -> None:
            for operands in copies:
                places = {"input": operands, "output": made, "scratch": scratch}
                graphs.queue(gpu, plan.launches, functions, places)

        seconds = graphs.mean_seconds(gpu, queued, REPLAYS)
        for address in (*made, *scratch):
            gpu.free(address)
        return seconds / len(copies)


def tables(rows: int, rule: Rule) -> list[Array]:
    """sampling_f, sampling_i, the bias and no masks for `rows` slots and the scratch slot."""
    floats = np.zeros((rows + 1, 8), np.float32)
    floats[:, :6] = (rule.temperature, rule.top_p, rule.min_p, 1, rule.presence, 0)
    integers = np.zeros((rows + 1, 4), np.int32)
    integers[:, 0] = rule.top_k
    if rule.half:
        floats[::2, 0] = 0
    unused = np.full((rows + 1, BIASES), -1, np.int32)
    masks = np.zeros((rows + 1, -(-WIDTH // 32)), np.uint32)
    return [floats, integers, unused, np.zeros((rows + 1, BIASES), np.float32), unused, masks]


def sampling(timer: Timer, rows: int, rules: Sequence[Rule] = RULES) -> None:
    """Prints one line a rule for `rows` rows of broad logits, the worst case of top_p."""
    base = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32) * np.float32(2.5)
    logits = [timer.put(np.roll(base, i, 1)) for i in range(4 if rows > 8 else 16)]
    slots, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    rest = [slots, slots, ones, ones, np.zeros(rows + 1, np.int32)]
    token_counts = np.zeros((rows + 1, WIDTH), np.int32)
    at_counts, at_rest = timer.put(token_counts), [timer.put(a) for a in rest]
    outputs = [4 * rows, 4 * rows, 4 * TOP * rows, 4 * TOP * rows, 4 * rows]
    for rule in rules:
        given = tables(rows, rule)
        at_given = [timer.put(a) for a in given]
        arrays = (base, token_counts, *given, *rest)
        specs = tuple(TensorSpec(f"a{i}", DType.of(a.dtype), a.shape)
                      for i, a in enumerate(arrays))  # fmt: skip
        copies = [[at, at_counts, *at_given, *at_rest] for at in logits]
        seconds = timer.seconds(
            sample.OP.cuda.tactics[0], {"vocab": VOCAB, "top": TOP}, specs, copies,
            [*outputs, 4 * rows + 4],
        )  # fmt: skip
        reads = seconds * timer.target.bandwidth / base.nbytes
        print(f"sample {rows:4d} rows, {rule.name:36s} {seconds * 1e6:8.1f} us, {reads:5.2f} reads",
              flush=True)  # fmt: skip
        for address in at_given:
            timer.gpu.free(address)
    for address in (*logits, at_counts, *at_rest):
        timer.gpu.free(address)


def drafting(timer: Timer, rows: int, short: int = 0) -> None:
    """Prints one line of `draft_token` over `rows` rows of all ids, or of a shortlist."""
    wide = short or WIDTH
    base = np.random.default_rng(0).standard_normal((rows, wide), np.float32)
    logits = [timer.put(np.roll(base, i, 1)) for i in range(4 if rows > 8 else 64)]
    slots, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    shortlist = [np.arange(wide, dtype=np.int32)] if short else []
    rest = [*shortlist, np.zeros((rows + 1, 3), np.int32), slots, slots, ones]
    specs = tuple(TensorSpec(f"a{i}", DType.of(a.dtype), a.shape)
                  for i, a in enumerate((base, *rest)))  # fmt: skip
    at_rest = [timer.put(a) for a in rest]
    copies = [[at, *at_rest] for at in logits]
    attrs = {"index": 0, "shortlist": int(bool(short)), "vocab": VOCAB}
    outputs = [4 * rows, 4 * rows, 12 * rows + 12]
    seconds = timer.seconds(draft_token.OP.cuda.tactics[0], attrs, specs, copies, outputs)
    reads = seconds * timer.target.bandwidth / base.nbytes
    print(f"draft  {rows:4d} rows of {wide:6d} {seconds * 1e6:8.1f} us, {reads:5.2f} reads",
          flush=True)  # fmt: skip
    for address in (*logits, *at_rest):
        timer.gpu.free(address)


def routing(timer: Timer, target: Target, tokens: int) -> dict[str, float]:
    """Microseconds of one `moe_router` of 256 experts with the shared gate, by tactic."""
    rng, bf16 = np.random.default_rng(0), DType.BF16.numpy
    x = rng.standard_normal((tokens, 2048)).astype(bf16)
    gate = rng.standard_normal((1, 2048)).astype(bf16)
    w = (rng.standard_normal((256, 2048)) * 0.05).astype(bf16)
    specs = tuple(TensorSpec(n, DType.BF16, a.shape) for n, a in (("x", x), ("w", w), ("g", gate)))
    at_x, at_gate = timer.put(x), timer.put(gate)
    copies = [[at_x, timer.put(w), at_gate] for _ in range(96)]
    made = {}
    for tactic in moe_router.OP.cuda.tactics:
        if tactic.refuse({"top_k": 8}, specs, target) is None:
            seconds = timer.seconds(tactic, {"top_k": 8}, specs, copies, [36 * tokens] * 2)
            made[tactic.name] = round(seconds * 1e6, 1)
    for address in {a for copy in copies for a in copy}:
        timer.gpu.free(address)
    return made


def main() -> None:
    """Prints every case."""
    target = graphs.target_here()
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(Gpu(), target, Path(folder))
        for tokens in (1, 32, 128, 256, 1024, 2048, 4096, 8192):
            print(f"router {tokens:5d} tokens, us: {routing(timer, target, tokens)}", flush=True)
        for rows in (1, 8, 32, 128):
            drafting(timer, rows)
            drafting(timer, rows, 65_536)
        for rows in (1, 32, 128):
            sampling(timer, rows)


if __name__ == "__main__":
    main()
