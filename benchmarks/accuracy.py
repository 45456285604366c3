"""What every choice that rounds costs in answers: docs/results/accuracy.md.

    python -m benchmarks.accuracy                  100,000 tokens of each row: a day on two cores
    python -m benchmarks.accuracy --tokens 2048 --contexts 1024,16384

Engines of the CPU round as those of a GPU do, but for the order of f32 sums. Of a random model of
the published architecture (`RANDOM`) two engines read the same random tokens; the logits of the
last LAST of each sequence, decoded one by one, are compared with those of an engine that rounds
nothing but its bf16 weights. The embedded model reads held-out stories and chat, and drafts. The
states' own error is that of `state_error`. Measured rows stay in the results, unless they are of
fewer tokens, so an interrupted run goes on where it was.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from tokenizers import Tokenizer

from benchmarks.result_files import RESULTS, ROOT, commit_here, read, write
from benchmarks.state_error import state_errors
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import CPU, Options
from spark_engine.check.engines.prompts import CheckLaunch, CheckSession, default_tables
from spark_engine.check.engines.runner import SessionRunner, feed
from spark_engine.engine_file import open_folder
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE, Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import EXECUTORS, Loaded
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.tensors import DType
from tests import checkpoint_files, checkpoints
from training import chatgen, corpus, quantize
from training.shape import TINY

TINY_FILES = ROOT / "models/tiny/checkpoint"
FILE = RESULTS / "accuracy.json"
LAST = 1024  # tokens of a sequence that are judged
CHUNK = 8 * PREFILL_TILE  # of a prefill launch
ROWS = 32  # sequences side by side
MEMORY = 1 << 17  # tokens that they have together
SEED = 940_000  # of held-out texts
TEXTS, MADE, DRAFTS = 4, 160, 3  # of each kind, tokens of each, drafts of a round
RANDOM: Mapping[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2,
    "num_key_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
}  # fmt: skip
MARKS = (1_000, 10_000)  # tokens at which the states' error is shown, and at the end
AMAX = 64.0  # of all activations, as calibration would find: none is cut off
Values = dict[str, NDArray[np.float32]]
Logits = NDArray[np.float32]
Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """An engine: how its weights are stored, and what it rounds. `beside`: the choice to which it
    adds one rounding; "" for none, and then it is compared with the first."""

    name: str
    weights: str = "bf16"
    activation: str = "f32"
    kv: str = "f32"
    state: str = "f32"
    beside: str = ""

    @property
    def options(self) -> dict[str, str]:
        return {"activation": self.activation, "kv_dtype": self.kv, "state_dtype": self.state}


NVFP4, GPU = "NVFP4 weights", "NVFP4 weights, bf16 activations, FP8 KV"
SERVED = {"activation": "bf16", "kv": "fp8"}  # of a GPU's engine of a published NVFP4 file
CHOICES = (
    Choice("bf16 weights, the rest f32"),
    Choice("FP8 weights and inputs, by row and token", "ct_fp8_channel"),
    Choice(NVFP4, "ct_nvfp4"),
    Choice("int4 weights, groups of 128", "ct_int4_g128"),
    Choice("bf16 activations", activation="bf16"),
    Choice("FP8 inputs of the MLP (W4A8)", "ct_mlp_a8", beside=NVFP4),
    Choice("NVFP4 inputs of the MLP (W4A4)", "ct_mlp_a4", beside=NVFP4),
    Choice("bf16 KV", kv="bf16"),
    Choice("FP8 KV", kv="fp8"),
    Choice("bf16 states", state="bf16"),
    Choice("f16 states", state="f16"),
    Choice(GPU, "ct_nvfp4", **SERVED, beside=NVFP4),
    Choice("the same with bf16 states", "ct_nvfp4", **SERVED, state="bf16", beside=GPU),
    Choice("the same with f16 states", "ct_nvfp4", **SERVED, state="f16", beside=GPU),
)
OWN = "the file as it is (NVFP4 and FP8)"
EMBEDDED = (
    Choice("the file's values as bf16, the rest f32"),
    *(c for c in CHOICES[1:] if not c.kv == "fp8" or c.weights == "bf16"),
    Choice(OWN, "file"),
    Choice(f"{OWN}, bf16 activations, FP8 KV", "file", **SERVED),
    Choice("the same with bf16 states", "file", **SERVED, state="bf16"),
    Choice("the same with f16 states", "file", **SERVED, state="f16"),
)


# ---- Checkpoints and engines ---------------------------------------------------------------------


def random_weights(work: Path) -> tuple[Row, Values]:
    """(config, values) of the random model, whose projections have a gain of one."""
    made = checkpoints.write_checkpoint(work / "random", RANDOM)
    for name, w in made.values.items():
        if ".layers." in name and w.ndim == 2:  # drawn with a standard deviation of 0.15
            w *= w.shape[1] ** -0.5 / 0.15
    return made.config, made.values


def embedded_weights() -> tuple[Row, Values]:
    """(config, the values that the embedded model's file encodes)."""
    config = json.loads((TINY_FILES / "config.json").read_text())
    config.pop("quantization_config", None)
    stored = quantize.read_weights(TINY_FILES)
    named = quantize.dequantize(stored, TINY)
    values = {n if n in stored else f"{n}.weight": w for n, w in named.items()}
    return config, values | {
        n: a.astype(np.float32) for n, a in stored.items() if n.startswith("mtp.")
    }


def save(folder: Path, config: Row, values: Values, format: str) -> Path:
    """A checkpoint of the values in a format; the draft head is bf16."""
    heads = {n: w for n, w in values.items() if n.startswith("mtp.")}
    body = {n: w for n, w in values.items() if n not in heads}
    stored = checkpoints.store(body, format, amax=AMAX)[0] | checkpoints.store(heads, "bf16")[0]
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint_files.write_configs(folder, config, format, "model.", None, sorted(body))
    checkpoint_files.write_shards(folder, stored, 1)
    return folder


def engine(work: Path, checkpoint: Path, choice: Choice, rows: int, **options: Any) -> Path:
    """An engine of the choice for `rows` sequences."""
    shutil.rmtree(work / "engine", ignore_errors=True)
    context = options["max_context"]
    given = Options(
        CPU, decode=(rows,), prefill=(CHUNK,), max_seqs=rows, kv_tokens=rows * context,
        cache_gib=0, vision=False, **choice.options, **options,
    )  # fmt: skip
    build(checkpoint, work / "engine", given, lambda said: None)
    return work / "engine"


# ---- Runs ----------------------------------------------------------------------------------------


def opened(path: Path) -> Loaded:
    """The engine, also one of bf16 activations, for which onnxruntime lacks sums."""
    folder = open_folder(path, CPU)
    m = folder.manifest
    executors = {}
    for bucket in m.buckets:
        file = folder.engine(bucket)
        payload = file.payload if m.dtypes.activation is DType.F32 else with_wide_sums(file.payload)
        executor = EXECUTORS["ort"](file.header, payload, folder.path, 1)
        executors[bucket.family, bucket.rows] = executor
    return Loaded(m.limits, m.eos_token_ids, m.states, m.tables, executors, folder)


def with_wide_sums(payload: bytes) -> bytes:
    """The model with the graph's own sums of bf16 made in f32 and rounded."""
    model, kinds = onnx.load_from_string(payload), onnx.TensorProto
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Add" or node.domain:
            nodes.append(node)
            continue
        (made,) = node.output
        wide = [f"{made}.wide.{name}" for name in node.input]
        pairs = zip(node.input, wide, strict=True)
        nodes += [helper.make_node("Cast", [a], [b], to=kinds.FLOAT) for a, b in pairs]
        nodes.append(helper.make_node("Add", wide, [f"{made}.wide"]))
        nodes.append(helper.make_node("Cast", [f"{made}.wide"], [made], to=kinds.BFLOAT16))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def launches(ids: NDArray[np.int32], prefilled: int) -> Iterator[CheckLaunch]:
    """What reads sequences [rows, tokens]: `prefilled` tokens of each in large launches, then one
    of each."""
    rows, length = ids.shape
    for row in range(rows):
        for at in range(0, prefilled, CHUNK):
            starts = np.arange(at, at + CHUNK, PREFILL_TILE, dtype=np.int32)
            after = ids[row, starts + PREFILL_TILE]
            same = [np.full_like(starts, n) for n in (row, PREFILL_TILE, 0)]
            slots, counts, emit = same
            part = ids[row, at : at + CHUNK]
            yield CheckLaunch(PREFILL, len(starts), part, slots, starts, counts, emit, after)
    one, slots = np.ones(rows, np.int32), np.arange(rows, dtype=np.int32)
    for at in range(prefilled, length):
        after = ids[:, min(at + 1, length - 1)]
        yield CheckLaunch(DECODE, rows, ids[:, at], slots, one * at, one, one, after)


def logits(folder: Path, ids: NDArray[np.int32], judged: int) -> Iterator[Logits]:
    """[rows, V] after each of the last `judged` tokens of sequences [rows, tokens]."""
    loaded = opened(folder)
    tables = default_tables(loaded.limits)
    pages = -(-ids.shape[1] // Limits.page_size)
    own = np.arange(len(ids) * pages, dtype=np.int32).reshape(len(ids), pages)
    tables["page_table"][: len(ids), :pages] = own
    session = CheckSession("", (), tables, ())
    with SessionRunner("", loaded) as runner:
        for launch in launches(ids, ids.shape[1] - judged):
            shown = runner.launch(feed(session, launch, 0))
            if launch.family == DECODE:
                yield shown["logits"].copy()


def groups(tokens: int, context: int) -> Iterator[int]:
    """Sequences of the groups that together have so many judged tokens."""
    left, most = -(-tokens // min(LAST, context)), max(1, min(ROWS, MEMORY // context))
    for done in range(0, left, most):
        yield min(most, left - done)


class Saved:
    """The measured rows; each is written as soon as it is there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[Row] = read(file) if file.is_file() else []

    def has(self, kind: str, name: str, tokens: int, context: int = 0) -> bool:
        """True if the row is there, of as many tokens."""
        same = [r for r in self.rows if _key(r) == (kind, name, context)]
        return any(r["asked"] >= tokens for r in same)

    def add(self, kind: str, choice: str, row: Row) -> None:
        """Saves a row in place of one of fewer tokens."""
        row = {"kind": kind, "choice": choice, **row, "commit": commit_here()}
        self.rows = [r for r in self.rows if _key(r) != _key(row)] + [row]
        write(self.file, self.rows)
        click.echo(json.dumps(row))


def _key(row: Row) -> tuple[str, str, int]:
    return row["kind"], row["choice"], row.get("context", 0)


def compare(work: Path, context: int, tokens: int, saved: Saved) -> None:
    """The random model's rows at a context: divergence from the first choice, and from `beside`."""
    wanted = [c for c in CHOICES if not saved.has("random", c.name, tokens, context)]
    bases = {CHOICES[0].name, *(c.beside for c in wanted)}
    config, values = random_weights(work)
    rng = np.random.default_rng(context)
    texts = [
        rng.integers(0, config["vocab_size"], (rows, context)).astype(np.int32)
        for rows in groups(tokens, context)
    ]
    known: dict[str, list[Logits]] = {}
    for choice in (c for c in CHOICES if c in wanted or wanted and c.name in bases):
        checkpoint = save(work / "checkpoint", config, values, choice.weights)
        found = []
        for ids in texts:
            folder = engine(work, checkpoint, choice, len(ids), drafts=0, max_context=context)
            found.append(np.stack([*logits(folder, ids, min(LAST, context))]))
        if choice.name in bases:
            known[choice.name] = found
        if choice in wanted:
            names = CHOICES[0].name, choice.beside or CHOICES[0].name
            first, base = (compared(known[name], found) for name in names)
            figures = first | {"added": base["kl"], "context": context}
            saved.add("random", choice.name, {"asked": tokens, **figures})


def compared(first: Sequence[Logits], other: Sequence[Logits]) -> Row:
    """Tokens, their mean KL(first || other) in nats, and the share of them whose likeliest id is
    the same."""
    n, kl, same = 0, 0.0, 0
    for given, found in zip(first, other, strict=True):
        p, q = log_softmax(given), log_softmax(found)
        n += given[..., 0].size
        kl += float((np.exp(p) * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    return {"tokens": n, "kl": kl / n, "top1": same / n}


def log_softmax(x: Logits) -> NDArray[np.float64]:
    """In float64, over the last axis."""
    wide = x.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return found


# ---- The embedded model --------------------------------------------------------------------------


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
    told = [corpus.story_document(rng)[0][0] for _ in range(TEXTS)]
    chats = [chatgen.story_told(rng) for _ in range(TEXTS)]
    asked = [corpus.render(chat, False)[0][0] for chat in chats]
    begun = [tokenizer.encode(text).ids[:24] for text in told]
    return [tuple(ids) for ids in (*begun, *(tokenizer.encode(text).ids for text in asked))]


def measure_embedded(work: Path, tokens: int, saved: Saved) -> None:
    """The embedded model's rows: perplexity of stories and of chat, and the drafts kept."""
    tokenizer = Tokenizer.from_file(str(TINY_FILES / "tokenizer.json"))
    rows = min(ROWS, -(-tokens // LAST // 2) * 2)
    texts = held_out(tokenizer, -(-tokens // (rows * LAST)) * rows)
    config, values = embedded_weights()
    for choice in EMBEDDED:
        if saved.has("embedded", choice.name, tokens):
            continue
        checkpoint = TINY_FILES
        if choice.weights != "file":
            checkpoint = save(work / "checkpoint", config, values, choice.weights)
            for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copy(TINY_FILES / file, checkpoint)
        folder = engine(work, checkpoint, choice, rows, drafts=0, max_context=LAST)
        sums = np.zeros((2, 2))  # of stories and of chat: losses, tokens
        for part in range(0, len(texts) // 2, rows // 2):
            both = texts.reshape(2, -1, corpus.ROW)[:, part : part + rows // 2].reshape(rows, -1)
            ids, targets = both[:, :-1] % corpus.UNTRAINED, both[:, 1:]
            for at, found in enumerate(logits(folder, ids.astype(np.int32), LAST)):
                told = targets[:, at] < corpus.UNTRAINED
                loss = -log_softmax(found)[np.arange(rows), targets[:, at] % corpus.UNTRAINED] * told
                sums += np.stack((loss, told)).reshape(2, 2, -1).sum(-1).T
        perplexity = np.exp(sums[:, 0] / sums[:, 1]).tolist()
        row = {"asked": tokens, "tokens": int(sums[:, 1].sum()), "perplexity": perplexity}
        folder = engine(work, checkpoint, choice, TEXTS, drafts=DRAFTS, max_context=LAST)
        saved.add("embedded", choice.name, row | kept_drafts(folder, prompts(tokenizer)))


def kept_drafts(folder: Path, asked: Sequence[tuple[int, ...]]) -> Row:
    """Of greedy answers in rounds of DRAFTS: rounds, and the share of them that kept the first, the
    first two, … drafts."""
    options = EngineOptions(fixed_drafts=True, swap_bytes=0, cache_bytes=0)
    running = Engine(opened(folder), options)
    for ids in asked:
        running.submit(Request(ids, SamplingParams(temperature=0.0, max_tokens=MADE)))
    while not running.idle:
        running.step()
    counts: Mapping[str, Any] = running.stats()
    running.close()
    rounds, kept = counts["drafts_by_position"][0], counts["accepted_by_position"]
    return {"rounds": rounds, "kept": [n / rounds for n in kept]}


@click.command(help=str(__doc__).split("\n\n")[0])
@click.option("--tokens", default=100_000, show_default=True, help="judged, of each row at least")
@click.option("--contexts", default="1024,16384,65536", show_default=True)
@click.option("--only", type=click.Choice(("states", "random", "embedded")), help="one table")
@click.option("--file", type=click.Path(path_type=Path), default=FILE, show_default=True)
def main(tokens: int, contexts: str, only: str | None, file: Path) -> None:
    """The command."""
    saved, lengths = Saved(file), [int(n) for n in contexts.split(",")]
    if odd := [n for n in lengths if n <= 0 or n % CHUNK]:
        raise click.BadParameter(f"{odd} are no multiples of {CHUNK}", param_hint="--contexts")
    with tempfile.TemporaryDirectory() as name:
        if only in (None, "states") and not saved.has("states", "", tokens):
            rows = state_errors([n for n in MARKS if n < tokens] + [tokens])
            saved.add("states", "", {"asked": tokens, "rows": rows})
        if only in (None, "embedded"):
            measure_embedded(Path(name), tokens, saved)
        for context in lengths if only in (None, "random") else ():
            compare(Path(name), context, tokens, saved)


if __name__ == "__main__":
    main()
