"""Measures the rows: the random model's logits are compared with those of an engine that rounds
nothing but its bf16 weights; the embedded model reads held-out stories and chat, and drafts."""

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.accuracy import engines
from benchmarks.accuracy.choices import CHOICES, EMBEDDED
from benchmarks.result_files import RESULTS, commit_here, read, write
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from training import chatgen, corpus

FILE = RESULTS / "accuracy.json"
LAST = 1024  # tokens of a sequence that are judged
ROWS = 32  # sequences side by side
MEMORY = 1 << 17  # tokens that they have together
SEED = 940_000  # of held-out texts
TEXTS, MADE, DRAFTS = 4, 160, 3  # of each kind, tokens of each, drafts of a round


class Saved:
    """The measured rows; each is written as soon as it is there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[engines.Row] = read(file) if file.is_file() else []

    def has(self, kind: str, name: str, tokens: int, context: int = 0) -> bool:
        """True if the row is there, of as many tokens."""
        same = [r for r in self.rows if _key(r) == (kind, name, context)]
        return any(r["asked"] >= tokens for r in same)

    def add(self, kind: str, choice: str, row: engines.Row) -> None:
        """Saves a row in place of one of fewer tokens."""
        row = {"kind": kind, "choice": choice, **row, "commit": commit_here()}
        self.rows = [r for r in self.rows if _key(r) != _key(row)] + [row]
        write(self.file, self.rows)
        click.echo(json.dumps(row))


def _key(row: engines.Row) -> tuple[str, str, int]:
    return row["kind"], row["choice"], row.get("context", 0)


def compare(work: Path, context: int, tokens: int, saved: Saved) -> None:
    """The random model's rows at a context: divergence from the first choice, and from its base."""
    wanted = [c for c in CHOICES if not saved.has("random", c.name, tokens, context)]
    bases = {CHOICES[0].name, *(c.base for c in wanted)}
    config, values = engines.random_weights(work)
    rng = np.random.default_rng(context)
    texts = [
        rng.integers(0, config["vocab_size"], (rows, context)).astype(np.int32)
        for rows in groups(tokens, context)
    ]
    known: dict[str, list[engines.Logits]] = {}
    for choice in (c for c in CHOICES if c in wanted or wanted and c.name in bases):
        checkpoint = engines.save(work / "checkpoint", config, values, choice.weights)
        found = []
        for ids in texts:
            folder = engines.engine(
                work, checkpoint, choice, len(ids), drafts=0, max_context=context
            )
            found.append(np.stack([*engines.logits(folder, ids, min(LAST, context))]))
        if choice.name in bases:
            known[choice.name] = found
        if choice in wanted:
            names = CHOICES[0].name, choice.base or CHOICES[0].name
            first, base = (compared(known[name], found) for name in names)
            figures = first | {"added": base["kl"], "context": context}
            saved.add("random", choice.name, {"asked": tokens, **figures})


def compared(first: Sequence[engines.Logits], other: Sequence[engines.Logits]) -> engines.Row:
    """Tokens, their mean KL(first || other) in nats, and the share of them that have the same
    likeliest id."""
    n, kl, same = 0, 0.0, 0
    for given, found in zip(first, other, strict=True):
        p, q = log_softmax(given), log_softmax(found)
        n += given[..., 0].size
        kl += float((np.exp(p) * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return {"tokens": n, "kl": kl / n, "top1": same / n}


def log_softmax(x: engines.Logits) -> NDArray[np.float64]:
    """In float64, over the last axis."""
    wide = x.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return found


def groups(tokens: int, context: int) -> Iterator[int]:
    """Sequences of the groups that together have so many judged tokens."""
    left, most = -(-tokens // min(LAST, context)), max(1, min(ROWS, MEMORY // context))
    for done in range(0, left, most):
        yield min(most, left - done)


def held_out(tokenizer: Tokenizer, rows: int) -> NDArray[np.int32]:
    """[rows, 1025] ids of stories and chat, half of each; those that a user says are flagged."""
    rng = random.Random(SEED)
    made = (corpus.story_document, lambda r: corpus.chat_document(r, 0.45))
    kinds = [
        corpus.pack(corpus.encode(make(rng), tokenizer) for _ in range(12 * rows))[: -(-rows // 2)]
        for make in made
    ]
    return np.concatenate(kinds).astype(np.int32)


def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Beginnings of held-out stories, and stories asked for in chat."""
    rng = random.Random(SEED + 1)
    stories = [corpus.story_document(rng)[0][0] for _ in range(TEXTS)]
    chats = [chatgen.story_chat(rng) for _ in range(TEXTS)]
    asked = [corpus.render(chat, False)[0][0] for chat in chats]
    starts = [tokenizer.encode(text).ids[:24] for text in stories]
    return [tuple(ids) for ids in (*starts, *(tokenizer.encode(text).ids for text in asked))]


def measure_embedded(work: Path, tokens: int, saved: Saved) -> None:
    """The embedded model's rows: perplexity of stories and of chat, and the drafts kept."""
    tokenizer = Tokenizer.from_file(str(engines.TINY_FILES / "tokenizer.json"))
    rows = min(ROWS, -(-tokens // LAST // 2) * 2)
    texts = held_out(tokenizer, -(-tokens // (rows * LAST)) * rows)
    config, values = engines.embedded_weights()
    for choice in EMBEDDED:
        if saved.has("embedded", choice.name, tokens):
            continue
        checkpoint = engines.TINY_FILES
        if choice.weights != "file":
            checkpoint = engines.save(work / "checkpoint", config, values, choice.weights)
            for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copy(engines.TINY_FILES / file, checkpoint)
        folder = engines.engine(work, checkpoint, choice, rows, drafts=0, max_context=LAST)
        sums = np.zeros((2, 2))  # of stories and of chat: losses, tokens
        for part in range(0, len(texts) // 2, rows // 2):
            both = texts.reshape(2, -1, corpus.ROW)[:, part : part + rows // 2].reshape(rows, -1)
            ids, targets = both[:, :-1] % corpus.UNTRAINED, both[:, 1:]
            for at, found in enumerate(engines.logits(folder, ids.astype(np.int32), LAST)):
                scored = targets[:, at] < corpus.UNTRAINED
                loss = (
                    -log_softmax(found)[np.arange(rows), targets[:, at] % corpus.UNTRAINED] * scored
                )
                sums += np.stack((loss, scored)).reshape(2, 2, -1).sum(-1).T
        perplexity = np.exp(sums[:, 0] / sums[:, 1]).tolist()
        row = {"asked": tokens, "tokens": int(sums[:, 1].sum()), "perplexity": perplexity}
        folder = engines.engine(work, checkpoint, choice, TEXTS, drafts=DRAFTS, max_context=LAST)
        saved.add("embedded", choice.name, row | kept_drafts(folder, prompts(tokenizer)))


def kept_drafts(folder: Path, asked: Sequence[tuple[int, ...]]) -> engines.Row:
    """Of greedy answers in rounds of DRAFTS: rounds, and the share of them that kept the first, the
    first two, … drafts."""
    options = EngineOptions(fixed_drafts=True, swap_bytes=0, cache_bytes=0)
    running = Engine(engines.opened(folder), options)
    for ids in asked:
        running.submit(Request(ids, SamplingParams(temperature=0.0, max_tokens=MADE)))
    while not running.idle:
        running.step()
    counts: Mapping[str, Any] = running.stats()
    running.close()
    rounds, kept = counts["drafts_by_position"][0], counts["accepted_by_position"]
    return {"rounds": rounds, "kept": [n / rounds for n in kept]}
