"""Checkpoints and engines of the choices, and the logits of texts that they read.

Knows how the random model's weights are drawn and what the embedded model's file encodes; compares
nothing.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from benchmarks.accuracy.choices import Choice
from benchmarks.result_files import ROOT
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import CPU, Options
from spark_engine.check.engines.prompts import CheckLaunch, CheckSession, default_tables
from spark_engine.check.engines.runner import SessionRunner, feed
from spark_engine.engine_file import open_folder
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE, Limits
from spark_engine.runtime.engine.load import EXECUTORS, Loaded
from spark_engine.tensors import DType
from tests import checkpoint_files, checkpoints
from training import quantize
from training.shape import TINY

TINY_FILES = ROOT / "models/tiny/checkpoint"
CHUNK = 8 * PREFILL_TILE  # tokens of a prefill launch
RANDOM: Mapping[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2,
    "num_key_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
}  # fmt: skip
AMAX = 64.0  # of all activations, as calibration would find: none is cut off
Values = dict[str, NDArray[np.float32]]
Logits = NDArray[np.float32]
Row = dict[str, Any]


def random_weights(work: Path) -> tuple[Row, Values]:
    """(config, values) of the random model; its projections have a gain of one."""
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
