"""Launches that start early equal those that wait, bit for bit, on one real GPU and on two."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.native import backend
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from tests.checkpoints import write_checkpoint
from tests.device.on_gpu import HERE, on_gpu
from tests.runtime.random_engines import heard
from tests.runtime.ranks.test_ranks_gpu import CONFIG, TWO, crowd, serve

pytestmark = on_gpu(300)
LAYERS = ["linear_attention", "full_attention"] * 4


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=TWO)])
@pytest.mark.parametrize("moe", [False, True])
def test_early_launches_say_what_waiting_ones_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moe: bool, tp: int
) -> None:
    """One request alone, where launches are shortest, and many at once; on one rank with rounds of
    drafts."""
    config = CONFIG | {
        "num_hidden_layers": 8,
        "layer_types": LAYERS,
        "mtp_num_hidden_layers": tp % 2,
    }
    write_checkpoint(tmp_path / "checkpoint", config, "nvfp4", moe=moe)
    sizes = {"decode": (1, 16, 64), "prefill": (256,), "max_seqs": 64, "max_context": 384}
    wishes: dict[str, Any] = {"timing": False, "invariant": True, **sizes}
    options = Options(target=HERE, tp=tp, kv_tokens=64 * 384, **wishes)
    asked, said = crowd(), {}
    monkeypatch.setattr(backend, "untimed", lambda size, target: True)
    for name in ("early", "waiting"):
        if name == "waiting":
            monkeypatch.setattr(backend, "begin_early", lambda bucket, *_, **deep: bucket)
        build(tmp_path / "checkpoint", tmp_path / name, options, print)
        with closing(Engine.open(tmp_path / name, EngineOptions(seed=1))) as engine:
            alone = [serve(engine, [one])[0] for one in asked[:8]]
            said[name] = [heard(events) for events in (*alone, *serve(engine, asked))]
    assert said["early"] == said["waiting"]
