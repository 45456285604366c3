"""`--rope-scaling`: its forms, what it does to an engine, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.builder.plan.rope_scaling import EXAMPLE, parse_rope_scaling
from spark_engine.errors import OptionError
from spark_engine.models.open_model import open_model, read_description
from tests.checkpoints import text_config, write_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("yarn:4", YARN),
        ("yarn:2.5", YARN | {"factor": 2.5}),
        (EXAMPLE, YARN | {"original_max_position_embeddings": 262144}),
        ('{"type": "yarn", "factor": 2}', {"type": "yarn", "factor": 2}),
        ("default", {"rope_type": "default"}),
    ],
)
def test_forms(text: str, want: dict[str, Any]) -> None:
    assert parse_rope_scaling(text) == want


@pytest.mark.parametrize(
    "text",
    [
        *("", "4", "yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:-1", "yarn:nan", "linear:4"),
        *("{", "[1]", '{"rope_type": "llama3", "factor": 4}', '{"rope_type": "yarn"}'),
        *('{"rope_type": "yarn", "factor": 4, "hidden_size": 3}', "{" * 9000, "yarn:1e999"),
    ],
)
def test_what_is_no_rope_scaling_is_named(text: str) -> None:
    with pytest.raises(OptionError, match="--rope-scaling .*write yarn:4, or as in") as caught:
        parse_rope_scaling(text)
    assert len(str(caught.value)) <= 300


def test_an_engine_of_a_longer_context(tmp_path: Path) -> None:
    """The same weights as a file has that declares it, and the context that it allows."""
    rope = text_config(False)["rope_parameters"]
    more = YARN | {"original_max_position_embeddings": 4096}
    write_checkpoint(tmp_path / "plain")
    write_checkpoint(tmp_path / "yarn", {"rope_parameters": rope | more})
    assert read_description(tmp_path / "plain").config.max_position == 4096
    ours, declared = open_model(tmp_path / "plain", YARN), open_model(tmp_path / "yarn")
    assert ours.config == declared.config and ours.config.max_position == 16384
    wide = Options(rope_scaling=YARN | {"factor": 1e30}, max_context=10**20)
    with pytest.raises(OptionError, match="allow 1 to 67108864"):
        build(tmp_path / "plain", tmp_path / "engine", wide, lambda text: None)
    back = open_model(tmp_path / "yarn", {"rope_type": "default"})
    assert back.config == open_model(tmp_path / "plain").config
    options = Options(decode=(1,), prefill=(64,), max_seqs=1, max_context=16384, kv_tokens=16384)
    with pytest.raises(OptionError, match="allow 1 to 4096; --rope-scaling yarn:N makes"):
        build(tmp_path / "plain", tmp_path / "engine", options, lambda text: None)
    long = Options(**{**vars(options), "rope_scaling": YARN})
    made = build(tmp_path / "plain", tmp_path / "engine", long, lambda text: None).manifest
    assert made.rope == "yarn, factor 4 over 4096 positions" and made.limits.max_context == 16384
    freqs = ours.config.rope.inv_freq() / open_model(tmp_path / "plain").config.rope.inv_freq()
    assert np.isclose(freqs.min(), 0.25)
    again = build(tmp_path / "plain", tmp_path / "engine", long, lambda text: None)
    assert not again.built
    other = Options(**{**vars(long), "rope_scaling": YARN | {"factor": 8.0}})
    assert build(tmp_path / "plain", tmp_path / "engine", other, lambda text: None).built
