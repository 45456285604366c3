"""Lets an engine show its residual stream: more outputs on a compiled bucket, nothing else changed.

Knows how the `ort` executor's bytes are made. Engines of other executors show it when they were
built with `--debug`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import onnx

from spark_engine.engine_file import EngineFile
from spark_engine.manifest import Manifest
from spark_engine.tensors import TensorSpec

MARKS = re.compile(r"^layers\.\d+\.(mixed|out)$")  # after the mixer, after the MLP


def mark(file: EngineFile, manifest: Manifest) -> EngineFile:
    """The bucket with `layers.{i}.mixed` and `layers.{i}.out` [tokens, H] as outputs too."""
    if file.header.executor != "ort":
        return file
    model = onnx.load_from_string(file.payload)
    known = {value.name for value in model.graph.output}
    made = [name for node in model.graph.node for name in node.output]
    tokens = file.header.rows * file.header.tile
    specs = tuple(
        TensorSpec(name, manifest.dtypes.activation, (tokens, manifest.model.hidden))
        for name in made
        if MARKS.match(name) and name not in known
    )
    for spec in specs:
        value = onnx.helper.make_tensor_value_info(spec.name, spec.dtype.onnx, spec.dims)
        model.graph.output.append(value)
    header = replace(file.header, outputs=(*file.header.outputs, *specs))
    return EngineFile(header, model.SerializeToString())
