"""The build record: md5 sums of what every bucket generates, greedily, from fixed prompts.

    python -m spark_engine.check.build_record ENGINE [least]     prints the record as JSON

With `least` only the smallest buckets of a CPU engine: opening a bucket takes longer than running
it. The builder runs this file as a process (builder/record_process.py), and the record level of
spark-check compares with its result.

Buckets are launched one by one, without the scheduler, so that the tokens do not depend on
measured times. Knows the step inputs of docs/graph.md; imports no other file of `check`.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from spark_engine.engine_file import read_manifest
from spark_engine.interface import DECODE, PREFILL, SAMPLING_F, drafts_of, tile_of
from spark_engine.manifest import NATIVE, Greedy
from spark_engine.runtime.engine.detect import runnable_targets
from spark_engine.runtime.engine.load import HOST_TARGETS, Loaded, load
from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.executors.memory import BucketKey, EngineMemory
from spark_engine.tensors import Array
from spark_engine.vision import VISION

SHORT, GENERATED = 21, 8  # tokens of a prompt before decode; tokens generated after each prompt
FROM_STATE = SAMPLED = INERT = -1  # of docs/graph.md: a token id, a next id, a slot
NOT_FINITE = -1  # in place of a token
LEAST = "least"
CPU_INFO = Path("/proc/cpuinfo")
Rows = Sequence[tuple[int, int, Sequence[int]]]  # slot, start and token ids of each live row
Texts = dict[int, list[int]]  # by slot


def greedy(loaded: Loaded) -> Greedy:
    """The record of an idle open engine; overwrites its states."""
    run = _GreedyRun(loaded)
    keys = sorted(key for key in loaded.executors if key[0] != VISION)
    record = {name_of(key): _md5(run.generate(*key)) for key in keys}
    return Greedy(machine(loaded), record)


def name_of(key: BucketKey) -> str:
    """The name of a bucket's file, without its suffix."""
    family, rows = key
    if family == PREFILL:
        return f"prefill_t{rows * tile_of(family)}"
    drafts = drafts_of(family)
    return f"verify_b{rows}_k{drafts}" if drafts else f"decode_b{rows}"


def machine(loaded: Loaded) -> str:
    """The machine on which rounding depends: the GPU, or the processor and the library."""
    if loaded.folder is not None and loaded.folder.manifest.executor == NATIVE:
        from spark_engine.device.gpu import name_and_driver  # needs the extra `cuda`

        return name_and_driver()[0]
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")
    try:
        return f"{model}, onnxruntime {version('onnxruntime')}"
    except PackageNotFoundError:
        return model


class _GreedyRun:
    """One run over all buckets; every text has its own slot and pages."""

    def __init__(self, loaded: Loaded) -> None:
        self._limits, self._executors = loaded.limits, loaded.executors
        specs = {key: executor.specs for key, executor in loaded.executors.items()}
        own = (loaded.device_states, loaded.table_writer)
        self._memory = EngineMemory(loaded.states, loaded.tables, specs, 1, *own)
        self._decode, self._prefill = loaded.rows(DECODE), loaded.rows(PREFILL)
        for column in ("top_p", "repetition"):  # the temperature is 0
            self._memory.tables["sampling_f"][:, SAMPLING_F.index(column)] = 1
        # the last round may reach beyond the last token that counts
        self._capacity = capacity(self._limits) - GENERATED - self._limits.drafts - 1

    def generate(self, family: str, rows: int) -> Texts:
        """The tokens of this bucket's texts; none if the context is too short.

        A prefill bucket gets texts that fill it, of two tiles or more, which a decode bucket
        continues; any other bucket gets as many texts as it has rows, with short prompts.
        """
        if self._capacity < 1:
            return {}
        if family != PREFILL:
            lengths = [min(SHORT, self._capacity)] * min(rows, self._limits.max_seqs)
            lengths = lengths[: self._place(lengths)]
            tiles = next((n for n in self._prefill if n >= len(lengths)), self._prefill[-1])
            return self._continue(family, rows, self._prefilled(tiles, lengths), lengths)
        texts = min(max(rows // 2, 1), self._decode[-1])
        shares = [rows * (i + 1) // texts - rows * i // texts for i in range(texts)]
        tile = tile_of(PREFILL)
        lengths = [min(n * tile - 11 * i % 60, self._capacity) for i, n in enumerate(shares)]
        lengths = lengths[: self._place(lengths)]
        least = next(n for n in self._decode if n >= len(lengths))
        return self._continue(DECODE, least, self._prefilled(rows, lengths), lengths)

    def _prefilled(self, rows: int, lengths: Sequence[int]) -> Texts:
        """The first token after prompts of these lengths, in launches of this bucket."""
        tiles, last, texts = [], {}, {}
        for slot, length in enumerate(lengths):
            for at in range(0, length, tile_of(PREFILL)):
                ends = min(at + tile_of(PREFILL), length)
                tiles.append((slot, at, [self._id(slot, i) for i in range(at, ends)]))
            last[len(tiles) - 1] = slot
        for at in range(0, len(tiles), rows):
            emits = [i - at for i in last if at <= i < at + rows]
            tokens = _tokens(self._launch(PREFILL, rows, tiles[at : at + rows], emits))
            texts.update({last[at + i]: [int(tokens[i])] for i in emits})
        return texts

    def _continue(self, family: str, rows: int, texts: Texts, lengths: Sequence[int]) -> Texts:
        """Continues the texts from the states until each has GENERATED tokens."""
        tile = tile_of(family)
        first = True  # the first round has no drafts: the round before it makes them
        while going := [slot for slot, text in texts.items() if len(text) < GENERATED]:
            ids = [FROM_STATE] * (1 if first else tile)
            live = [(slot, lengths[slot] + len(texts[slot]) - 1, ids) for slot in going]
            out = self._launch(family, rows, live)
            tokens = _tokens(out).reshape(rows, tile)
            for row, slot in enumerate(going):
                kept = int(out["accepted"][row]) if tile > 1 else 1
                texts[slot] += tokens[row, :kept].tolist()
            first = False
        return {slot: text[:GENERATED] for slot, text in texts.items()}

    def _place(self, lengths: Sequence[int]) -> int:
        """Assigns pages to texts, in order; returns how many texts fit."""
        limits, table, taken = self._limits, self._memory.tables["page_table"], 0
        table[:] = -1
        for slot, length in enumerate(lengths):
            need = -(-(length + capacity(limits) - self._capacity) // limits.page_size)
            need = min(need, limits.pages_per_seq)
            if slot == limits.max_seqs or taken + need > limits.pages:
                return slot
            table[slot, :need] = range(taken, taken + need)
            self._memory.tables["prompt_lens"][slot] = length
            self._memory.mark(slot)
            taken += need
        return len(lengths)

    def _id(self, slot: int, at: int) -> int:
        """A token of a prompt: a fixed function of slot and position."""
        return (slot * 104_729 + at * 7_919 + 13) % self._limits.vocab

    def _launch(
        self, family: str, rows: int, live: Rows, emits: Sequence[int] | None = None
    ) -> Mapping[str, Array]:
        """The outputs of one launch; a token is sampled after each row, or after those named."""
        buffers = self._memory.buffers(family, rows, 0)
        for name, rest in (("slots", INERT), ("starts", 0), ("counts", 0), ("token_ids", 0)):
            buffers[name][:] = rest
        for name, rest in (("emit", 0), ("next_ids", 0), ("sources", INERT), ("saves", INERT)):
            if name in buffers:
                buffers[name][:] = rest
        ids = buffers["token_ids"].reshape(rows, -1)
        for row, (slot, start, tokens) in enumerate(live):
            emit = emits is None or row in emits
            ids[row, : len(tokens)] = tokens
            following = SAMPLED if emit else live[row + 1][2][0]
            wanted = (slot, start, len(tokens), emit, following, slot)
            names = ("slots", "starts", "counts", "emit", "next_ids", "sources")
            for name, value in zip(names, wanted, strict=True):
                if name in buffers:
                    buffers[name][row] = value
        self._memory.flush()
        self._executors[family, rows].launch(buffers)()
        return buffers


def _tokens(out: Mapping[str, Array]) -> Array:
    """The sampled tokens, by row, or by token in a verify bucket."""
    found: Array = np.where(out["ok"] == 1, out["next_tokens"], NOT_FINITE)
    return found


def _md5(texts: Texts) -> str:
    flat = [token for slot in sorted(texts) for token in texts[slot]]
    return hashlib.md5(np.array(flat, "<i4").tobytes()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the record of an engine folder; an empty one if its target cannot run here."""
    given = sys.argv[1:] if arguments is None else arguments
    folder, least = Path(given[0]), LEAST in given[1:]
    record = Greedy()
    if read_manifest(folder).target in runnable_targets(HOST_TARGETS):
        with closing(load(folder, threads=1, cache_bytes=0, least=least)) as loaded:
            record = greedy(loaded)
    print(json.dumps(asdict(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
