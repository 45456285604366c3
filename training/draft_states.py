"""Read generated rows with the quantised model and keep its hidden states: what a draft head learns
from.

Knows the parts and the files; knows nothing of the head. The parts are generated, so that no
collection of texts is needed, with seeds apart from those of training. Each part gives
PART.npy (ids as corpus.py writes them, uint16 [rows, 1025]) and PART.hidden.npy (bf16 as uint16
[rows, 1024, H], after the last norm).
  python -m training.draft_states --out DIR
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.corpus import ROW, Ids, Piece, chat_document, generate, story_document
from training.evaluate import CHECKPOINT, Subject, from_checkpoint

BATCH = 8
# part -> (share of the training rows, what makes a document, seed); held-out parts have no share
PARTS: dict[str, tuple[float, Callable[[random.Random], list[Piece]], int]] = {
    "stories": (0.4, story_document, 50_000),
    "chat": (0.35, partial(chat_document, short_share=0.0), 51_000),
    "short": (0.25, partial(chat_document, short_share=1.0), 52_000),
    "heldout_stories": (0.0, story_document, 900_000),
    "heldout_chat": (0.0, partial(chat_document, short_share=0.4), 910_000),
}
HELD_OUT_ROWS = 16


def draw(name: str, rows: int) -> Ids:
    """Rows of one part; held-out parts are the first rows of those that corpus.py writes."""
    _, make, seed = PARTS[name]
    drawn = generate((seed, (rows + 4) * ROW * 5 // 4), make)
    return drawn[:rows]


@torch.no_grad()
def read_states(subject: Subject, rows: Ids, path: Path) -> None:
    """Write the hidden states of the rows to `path`, a batch at a time."""
    shape = (len(rows), ROW - 1, subject.network.shape.hidden)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=shape)
    for at in range(0, len(rows), BATCH):
        ids = torch.from_numpy(rows[at : at + BATCH].astype(np.int64))[:, :-1] & 0x7FFF
        hidden, _ = subject.network(ids, subject.dtype, subject.linear)
        out[at : at + BATCH] = hidden.bfloat16().view(torch.int16).numpy().view(np.uint16)
    out.flush()


def load_states(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """(rows int64 [n, 1025], hidden bf16 [n, 1024, H]) of one part."""
    rows = torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int64))
    hidden = torch.from_numpy(np.load(folder / f"{name}.hidden.npy").view(np.int16))
    return rows, hidden.view(torch.bfloat16)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=384, help="rows of 1,024 tokens to train on")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    subject = from_checkpoint(arguments.checkpoint, torch.device("cpu"), torch.bfloat16)
    for name, (share, _, _) in PARTS.items():
        start = time.monotonic()
        rows = draw(name, round(share * arguments.rows) or HELD_OUT_ROWS)
        np.save(arguments.out / f"{name}.npy", rows)
        read_states(subject, rows, arguments.out / f"{name}.hidden.npy")
        print(f"{name}: {len(rows)} rows, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
