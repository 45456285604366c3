"""TensorRT-RTX compiles the vision tower, for every GPU of the target and without one."""

from pathlib import Path

import onnx
import pytest

from spark_engine.builder.assemble import weight_specs
from spark_engine.builder.build import emit_weights, planned
from spark_engine.builder.clock import StageClock
from spark_engine.builder.graph.lower import lower
from spark_engine.builder.plan.options import CAPABILITIES, RTX, Options
from spark_engine.device.shared_memory import HostBudget
from spark_engine.device.trt_payload import TrtPayload
from spark_engine.manifest import weights_name
from spark_engine.plugins.registry import REGISTRY
from spark_engine.vision import IMAGE_ROWS, VISION
from spark_engine.weights_file import plan_weights
from tests.oracles.test_parity_vision import write


def test_the_whole_tower_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the extra `trt`")
    from spark_engine.builder.executors.trt import TrtBackend

    assert {"SM89", "SM120", "SM121"} == {*CAPABILITIES}
    write(tmp_path, "dense")
    model, plan = planned(tmp_path, Options(target=RTX, max_image_pixels=36 * 1024))
    graph = lower(model, plan, VISION)
    layout = plan_weights(weight_specs([graph]))
    clock = StageClock(lambda stage: None, lambda done, total: None)
    clock.start("write", "the weights")
    emit_weights(model, {VISION: graph}, layout, tmp_path, 1, HostBudget(None, 0, False), clock)
    backend = TrtBackend(plan, REGISTRY, tmp_path)
    backend.weights = tmp_path / weights_name(0, 1)
    (size,) = plan.buckets.vision
    made = backend.emit(graph, size, layout.entries)
    payload = TrtPayload.decode(made.payload)
    assert len(payload.engine) > layout.total, "an engine contains its weights"
    behind = onnx.ModelProto.FromString(payload.behind).graph
    assert [node.op_type.split("_")[0] for node in behind.node] == ["store"], "all else is inside"
    assert [value.name for value in behind.output] == [f"{IMAGE_ROWS}.out"]
    assert made.header.aliases == {f"{IMAGE_ROWS}.out": IMAGE_ROWS}
