"""The bytes of a CPU bucket of an engine of several ranks: what runs between the collectives.

8 bytes little-endian length, a JSON head of that length, then one ONNX model for each segment. The
head's `steps` are `{"run": {"bytes", "inputs", "outputs"}}` and `{"collective": {"op", "input",
"output", "rows"}}`, in the order of execution; its `values` are the tensors that pass from step to
step and are neither inputs, states nor outputs of the bucket. The same bytes serve every rank:
models name the weights of rank 0, and `of_rank` those of another. The builder writes them, the
runtime reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from spark_engine.errors import EngineError
from spark_engine.manifest import weights_name
from spark_engine.tensors import TensorSpec

COLLECTIVES = ("all_reduce", "gather_logits", "gather_rows")


@dataclass(frozen=True)
class Segment:
    """An ONNX model over the values named; weights are none of its inputs."""

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def of_rank(self, rank: int) -> bytes:
        """The model with the weights of that rank; the file's name is as long as rank 0's."""
        return self.model.replace(weights_name(0).encode(), weights_name(rank).encode())


@dataclass(frozen=True)
class Collective:
    """What ranks do together: "all_reduce" adds their `input` in f32 in the order of ranks, rounded
    once; "gather_logits" puts them side by side along the last axis, and "gather_rows" those rows
    alone where the value `rows` (i32, the same on all) is not 0."""

    op: str
    input: str
    output: str
    rows: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input, self.rows) if self.rows else (self.input,)


@dataclass(frozen=True)
class Segments:
    """One bucket: its steps in order, and the specs of what passes between them."""

    steps: tuple[Segment | Collective, ...]
    values: tuple[TensorSpec, ...]

    def encode(self) -> bytes:
        steps = [_row(step) for step in self.steps]
        head = {"steps": steps, "values": [spec.to_json() for spec in self.values]}
        text = json.dumps(head, sort_keys=True).encode()
        models = [step.model for step in self.steps if isinstance(step, Segment)]
        return len(text).to_bytes(8, "little") + text + b"".join(models)

    @classmethod
    def decode(cls, data: bytes) -> Segments:
        """Raises EngineError for bytes of another form."""
        at = 8 + int.from_bytes(data[:8], "little")
        try:
            head = json.loads(data[8:at])
            steps: list[Segment | Collective] = []
            for row in head["steps"]:
                steps.append(_step(row, data, at))
                at += row["run"]["bytes"] if "run" in row else 0
            if at != len(data):
                raise ValueError(f"{at} bytes are named, {len(data)} are there")
            values = tuple(TensorSpec.from_json(row) for row in head["values"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"the bucket is not one of several ranks ({error}); rebuild the engine with "
                "spark-build"
            ) from None
        return cls(tuple(steps), values)


def _row(step: Segment | Collective) -> dict[str, Any]:
    if isinstance(step, Collective):
        return {"collective": asdict(step)}
    names = {"inputs": step.inputs, "outputs": step.outputs}
    return {"run": {"bytes": len(step.model), **names}}


def _step(row: dict[str, Any], data: bytes, at: int) -> Segment | Collective:
    if "run" not in row:
        made = Collective(**row["collective"])
        if made.op not in COLLECTIVES:
            raise ValueError(f"no collective is named {made.op!r}")
        return made
    run = row["run"]
    model = data[at : at + run["bytes"]]
    if not 0 < run["bytes"] == len(model):
        raise ValueError(f"a segment of {run['bytes']} bytes")
    return Segment(model, tuple(run["inputs"]), tuple(run["outputs"]))
