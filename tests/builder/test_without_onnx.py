"""From a packed graph to launches and cubins without ONNX: no module of it is even imported.

The graph itself is graphsurgeon's by design, made by `builder/graph` and `builder/rules`; here a
stand-in of the same fields is read.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

EMIT = """
import sys
from pathlib import Path
from types import SimpleNamespace as Thing

for name in ("onnx", "onnx_graphsurgeon", "onnxruntime"):
    sys.modules[name] = None  # an import of it fails
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.native import gpu_timer, nvrtc
from spark_engine.builder.native.backend import NativeBackend
from spark_engine.builder.plan.options import ModelFacts, Options, resolve
from spark_engine.interface import families
from spark_engine.plugins.registry import REGISTRY
from spark_engine.progress import ignore
from spark_engine.tensors import DType

def tensor(name, dtype, *shape):
    return Thing(name=name, dtype=dtype.numpy, shape=shape, inputs=[], outputs=[])

def graph():
    x, w = tensor("x", DType.BF16, "tokens", 128), tensor("w", DType.F32, 128)
    y = tensor("y", DType.BF16, "tokens", 128)
    node = Thing(op="rms_norm", name="y", domain="spark", attrs={"eps": 1e-6})
    node.inputs, node.outputs, y.inputs = [x, w], [y], [node]
    return Thing(nodes=[node], inputs=[x, w], outputs=[y])

facts = ModelFacts(64, 5, 1, None, None)
sizes = {"decode": (1,), "prefill": (64,), "max_seqs": 1, "max_context": 64}
plan = resolve(Options(target="sm_90a", timing=False, **sizes), facts)
backend = NativeBackend(plan, REGISTRY, Path(sys.argv[1]))
graphs = [FamilyGraph(family, graph(), {}, ()) for family in families(0)]
backend.choose(graphs)
backend._workers = 1  # this text is no file that a second process could import
backend.compile(ignore)
header, payload, memory, seconds = backend.emit(graphs[0], plan.buckets.decode[0], {})
assert backend.tactics[0]["op"] == "rms_norm" and b"\\x7fELF" in payload
assert (header.executor, header.rows) == ("native", 1) and seconds > 0
"""


def test_launches_are_emitted_where_no_onnx_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EMIT, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
