"""Adds an engine's residual stream to the outputs of a compiled bucket, and changes nothing else.

Knows the payload of the `ort` executor. Engines of other executors have these outputs if they were
built with `--debug`.
"""

import re
from collections.abc import Collection
from dataclasses import replace

import onnx

from spark_engine.engine_file import EngineFile
from spark_engine.manifest import Manifest
from spark_engine.segments import Collective, Segment, Segments
from spark_engine.tensors import DType, TensorSpec

LAYER_OUTPUTS = re.compile(r"^layers\.\d+\.(mixed|out)$")  # after the mixer, after the MLP


def expose_layers(file: EngineFile, manifest: Manifest) -> EngineFile:
    """The bucket with `layers.{i}.mixed` and `layers.{i}.out` [tokens, H] as outputs too."""
    if file.header.executor != "ort":
        return file
    tokens = file.header.rows * file.header.tile
    shape = (tokens, manifest.model.hidden)
    added = _LayerOutputs(manifest.dtypes.activation, shape, {s.name for s in file.header.outputs})
    if manifest.ranks == 1:
        payload = added.of(file.payload)
    else:
        payload = _between(Segments.decode(file.payload), added).encode()
    header = replace(file.header, outputs=(*file.header.outputs, *added.specs))
    return EngineFile(header, payload)


class _LayerOutputs:
    """The outputs added to the models so far, without those that the bucket has already."""

    def __init__(self, dtype: DType, shape: tuple[int, int], shown: Collection[str]) -> None:
        self._dtype, self._shape, self._shown = dtype, shape, shown
        self.specs: list[TensorSpec] = []

    def of(self, payload: bytes) -> bytes:
        """The model with the residual stream among its outputs."""
        model = onnx.load_from_string(payload)
        known = {value.name for value in model.graph.output}
        for name in (name for node in model.graph.node for name in node.output):
            if not LAYER_OUTPUTS.match(name) or name in self._shown:
                continue
            spec = TensorSpec(name, self._dtype, self._shape)
            self.specs.append(spec)
            if name not in known:
                value = onnx.helper.make_tensor_value_info(name, spec.dtype.onnx, spec.dims)
                model.graph.output.append(value)
        return bytes(model.SerializeToString())

    @property
    def names(self) -> list[str]:
        """Names of all added outputs."""
        return [spec.name for spec in self.specs]


def _between(segments: Segments, added: _LayerOutputs) -> Segments:
    """Added values that pass from step to step become outputs of the bucket."""
    steps: list[Segment | Collective] = []
    for step in segments.steps:
        if isinstance(step, Segment):
            before = len(added.specs)
            model = added.of(step.model)
            more = [name for name in added.names[before:] if name not in step.outputs]
            step = replace(step, model=model, outputs=(*step.outputs, *more))
        steps.append(step)
    values = tuple(spec for spec in segments.values if spec.name not in added.names)
    return Segments(tuple(steps), values)
