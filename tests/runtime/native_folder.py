"""A native engine's folder written by hand, for tests of opening one: nothing is compiled.

The kernels of two decode buckets touch every byte that their launches name, so that a GPU of
numpy sees an access beyond an allocation.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.device.buffers import Buffers
from spark_engine.engine_file import WEIGHTS, EngineHeader, digest_file, encode_engine
from spark_engine.interface import Limits, Precision, common_states, outputs, steps, tables
from spark_engine.manifest import Bucket, Fingerprint, Manifest, Memory, ModelInfo, StateInfo
from spark_engine.tensors import DType, TensorSpec
from spark_engine.weights_file import plan_weights
from tests.runtime.fake_gpu import FakeGpu
from tests.spark_engine.written_weights import write_weights

TARGET, ROWS, ARENA = "sm_90a", (2, 4), 1024
LIMITS = Limits(max_seqs=3, max_context=128, pages=3, vocab=2048, bias_slots=4)
STATES = (
    *(StateInfo(s, "slot") for s in common_states(LIMITS)),
    StateInfo(TensorSpec("layers.0.k_pages", DType.BF16, (4, 2, 8)), "page"),
    StateInfo(TensorSpec("layers.1.gdn_state", DType.F32, (4, 1 << 16)), "sequence"),
)
W = TensorSpec("w", DType.F32, (40,))


def touch(gpu: FakeGpu, *operands: int) -> None:
    """Address and bytes in turn."""
    for address, nbytes in zip(operands[::2], operands[1::2], strict=True):
        gpu.at(address, nbytes).fill(0)


KERNELS: dict[str, Callable[..., None]] = {"touch": touch, "meet": touch}


def header(rows: int) -> EngineHeader:
    """The bucket of so many rows."""
    names = {"rows": rows, "tokens": rows}
    inputs = (*(s.bind(names) for s in steps()), *tables(LIMITS))
    outs = tuple(s.bind(names) for s in outputs(LIMITS))
    states = tuple(i.spec for i in STATES)
    return EngineHeader("native", TARGET, "decode", rows, 1, inputs, states, outs, {})


def body(rows: int) -> dict[str, Any]:
    specs = {s.name: s.nbytes for s in (*header(rows).inputs, *header(rows).outputs)}
    args: list[list[Any]] = [["weight", "w"], ["i32", W.nbytes], ["arena", 256, 768], ["i32", 768]]
    args += [["zeroed", 0, 512 if rows == 4 else 256], ["i64", 256]]
    for kind, name in (("input", "slots"), ("input", "page_table"), ("output", "logits")):
        args += [[kind, name], ["i32", specs[name]]]
    args += [["state", "token_counts"], ["i32", STATES[1].spec.nbytes]]
    shape = {"block": [128, 1, 1], "cluster": [1, 1, 1], "shared": 0, "pdl": True}
    return tabled({
        "arena_bytes": ARENA,
        "zeroed_bytes": 512 if rows == 4 else 256,
        "cubins": [5],
        "kernels": [{"cubin": 0, "symbol": s, "shared": 64} for s in KERNELS],
        "launches": [
            {"node": "first", "kernel": 0, "grid": [500, 1, 1], "resident": False, **shape,
             "args": args},
            {"node": "fix-up", "kernel": 1, "grid": [131, 1, 1], "resident": True, **shape,
             "args": [["weight", "w"], ["i32", 8]]},
        ],
    })  # fmt: skip


def tabled(row: Mapping[str, Any]) -> dict[str, Any]:
    """A payload's body, where launches have operands for the numbers of a file."""
    known: dict[str, int] = {}
    launches = [
        {**launch, "args": [known.setdefault(json.dumps(a), len(known)) for a in launch["args"]]}
        for launch in row["launches"]
    ]
    return {**row, "launches": launches, "operands": [json.loads(text) for text in known]}


def encode(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row).encode()
    return len(text).to_bytes(8, "little") + text + b"cubin"


def write(
    path: Path,
    bodies: Callable[[int], Mapping[str, Any]] = body,
    headers: Callable[[int], EngineHeader] = header,
) -> Manifest:
    """Writes the folder; the manifest's digests are right whatever the buckets hold."""
    path.mkdir(exist_ok=True)
    write_weights(path / WEIGHTS, plan_weights([W]), [np.arange(W.dims[0], dtype=np.float32)])
    buckets = []
    for rows in ROWS:
        file, wanted = f"decode_b{rows}.engine", Buffers.of(header(rows), names_of_tables())
        (path / file).write_bytes(encode_engine(headers(rows), encode(bodies(rows))))
        zeroed = body(rows)["zeroed_bytes"]
        sizes = (ARENA, zeroed, wanted.own_bytes, wanted.wide.nbytes)
        buckets.append(Bucket("decode", rows, 1, file, *sizes))
    files = {p.name: digest_file(p) for p in sorted(path.iterdir()) if p.name != "manifest.json"}
    manifest = Manifest(
        name="toy",
        producer={"numpy": "2.0"},
        target=TARGET,
        card="h200",
        executor="native",
        model=ModelInfo("qwen3_5_text", 1, 64, LIMITS.vocab, 12345),
        limits=LIMITS,
        dtypes=Precision(DType.BF16, DType.BF16, DType.F32),
        states=STATES,
        tables=tables(LIMITS),
        buckets=tuple(buckets),
        memory=Memory.of(files[WEIGHTS].bytes, STATES, tables(LIMITS), buckets),
        quantisation=(),
        fusions={"decode": {"norm_quant": 3}},
        refusals=(),
        tactics=({"op": "linear"},),
        ignored={"vision": 3},
        generation={"temperature": 0.6},
        eos_token_ids=(7, 8),
        fingerprint=Fingerprint("a", "b", "c", "d", "e"),
        files=files,
    )
    (path / "manifest.json").write_bytes(manifest.encode())
    return manifest


def names_of_tables() -> list[str]:
    """What the engine keeps of a bucket's inputs."""
    return [spec.name for spec in tables(LIMITS)]
