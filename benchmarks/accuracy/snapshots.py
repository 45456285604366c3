"""What a conversation loses that continues from snapshots stored as int8.

The embedded model (its file's values in f32) reads held-out stories and chat: the first half of
each text is prefilled, the rest is decoded. In other runs the states of the delta rule are rounded,
once behind the prefill or again at every turn of 64 tokens, and logits compared; next to them is
the same text read with NVFP4 weights. Knows the scales; knows no file of the cache.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.accuracy import engines
from benchmarks.accuracy.choices import EMBEDDED, NVFP4
from benchmarks.accuracy.measure import LAST, Saved, compared, held_out, log_softmax
from spark_engine.check.engines.prompts import CheckSession, default_tables
from spark_engine.check.engines.runner import SessionRunner, feed
from spark_engine.interface import DECODE, Limits
from training import corpus

F32 = NDArray[np.float32]
Rounding = Callable[[F32], F32]
ROWS, TURN = 16, 64  # texts side by side; tokens between two snapshots of a conversation
GREEDY = 32  # tokens from a snapshot on that are compared


def int8(axes: tuple[int, ...]) -> Rounding:
    """States [rows,Hv,Dv,Dk] as int8, with a scale that these axes share."""

    def rounded(state: F32) -> F32:
        scale = np.abs(state).max(axis=axes, keepdims=True) / np.float32(127)
        scale = np.where(scale == 0, np.float32(1), scale)
        return np.rint(state / scale) * scale

    return rounded


def as_f16(state: F32) -> F32:
    """As f16 states are stored."""
    return state.astype(np.float16).astype(np.float32)


# name: how a state is rounded, and whether at every turn
CASES: dict[str, tuple[Rounding, bool]] = {
    "f16": (as_f16, False),
    "int8, a scale a row": (int8((3,)), False),
    "int8, a scale a head": (int8((2, 3)), False),
    "f16, every turn": (as_f16, True),
    "int8, a scale a row, every turn": (int8((3,)), True),
    "int8, a scale a head, every turn": (int8((2, 3)), True),
}


def read(
    folder: Path, ids: NDArray[np.int32], rounding: Rounding | None, turns: bool
) -> engines.Logits:
    """[judged, rows, V] after each token of the second half."""
    loaded = engines.opened(folder)
    tables = default_tables(loaded.limits)
    pages = -(-ids.shape[1] // Limits.page_size)
    tables["page_table"][: len(ids), :pages] = np.arange(len(ids) * pages).reshape(-1, pages)
    session, found = CheckSession("", (), tables, ()), list[engines.Logits]()
    with SessionRunner("", loaded) as runner:
        for launch in engines.launches(ids, engines.CHUNK):
            if launch.family == DECODE and rounding is not None:
                behind = int(launch.starts[0]) - engines.CHUNK
                if behind == 0 or turns and behind % TURN == 0:
                    for name, state in runner._states.items():
                        if name.endswith("gdn_state"):
                            state[: len(ids)] = rounding(state[: len(ids)])
            shown = runner.launch(feed(session, launch, 0))
            if launch.family == DECODE:
                found.append(shown["logits"].copy())
    return np.stack(found)


def measure_snapshots(work: Path, tokens: int, saved: Saved) -> None:
    """A row for each case, and for NVFP4 weights: KL from the unrounded run, the share of equal
    likeliest tokens, the share of texts in which the first GREEDY are all equal, perplexity."""
    rows = min(ROWS, -(-tokens // (LAST - engines.CHUNK) // 2) * 2)
    texts = held_out(Tokenizer.from_file(str(engines.TINY_FILES / "tokenizer.json")), rows)
    ids = (texts[:, :-1] % corpus.UNTRAINED).astype(np.int32)
    targets = texts[:, 1 + engines.CHUNK :].T
    config, values = engines.embedded_weights()
    first: engines.Logits | None = None
    for choice in (c for c in EMBEDDED if c.name in (EMBEDDED[0].name, NVFP4)):
        checkpoint = engines.save(work / "checkpoint", config, values, choice.weights)
        folder = engines.engine(work, checkpoint, choice, rows, drafts=0, max_context=LAST)
        found = read(folder, ids, None, False)
        runs = [(NVFP4, found)] if choice.name == NVFP4 else []
        if first is None:
            first = found
            runs += [(name, read(folder, ids, *case)) for name, case in CASES.items()]
        for name, logits in runs:
            same = (logits[:GREEDY].argmax(-1) == first[:GREEDY].argmax(-1)).all(0)
            row = compared([first], [logits]) | {
                "asked": tokens,
                "texts": float(same.mean()),
                "first": compared([first[:GREEDY]], [logits[:GREEDY]])["kl"],
                "perplexity": _perplexity(logits, targets),
            }
            saved.add("snapshots", name, row)


def _perplexity(logits: engines.Logits, targets: NDArray[np.int32]) -> float:
    scored = targets < corpus.UNTRAINED
    picked = np.take_along_axis(log_softmax(logits), targets[..., None] % corpus.UNTRAINED, -1)
    return float(np.exp(-(picked[..., 0] * scored).sum() / scored.sum()))
