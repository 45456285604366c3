"""Junk at any place in the JSON files raises a CheckpointError."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.open_model import describe
from tests.checkpoint_files import FORMATS, quantisation_configs
from tests.checkpoints import text_config

Json = dict[str, Any]
JUNK: tuple[Any, ...] = (None, True, -1, 0, 3, 0.5, 1e400, "", "x", "re:[", [], [1], ["re:("], {})
JUNK += ({"a": 1}, [None], [{}])


def _places(row: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON tree, containers included."""
    items = (
        row.items() if isinstance(row, dict) else enumerate(row) if isinstance(row, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _put(row: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        row = row[key]
    row[path[-1]] = value


def _pair(format: str, moe: bool) -> tuple[Json, Json]:
    names = ["layers.0.mlp.up_proj", "layers.0.linear_attn.in_proj_qkv", "lm_head"]
    spelled = [f"model.language_model.{n}" if n != "lm_head" else n for n in names]
    quant, hf = quantisation_configs(format, spelled)
    kind = "qwen3_5_moe" if moe else "qwen3_5"
    text = text_config(moe, {"num_experts": 2} if moe else {})
    text["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}
    config: Json = {"model_type": kind, "text_config": text, "vision_config": {"depth": 2}}
    return config | ({"quantization_config": quant} if quant else {}), hf


@pytest.mark.parametrize("format", FORMATS)
def test_junk_is_refused_or_harmless(format: str) -> None:
    pair = _pair(format, moe=format.endswith("4"))
    describe(*pair)
    draw = random.Random(format)
    places = list(_places(list(pair)))
    refused = 0
    for _ in range(400):
        spoiled = copy.deepcopy(list(pair))
        _put(spoiled, draw.choice(places), copy.deepcopy(draw.choice(JUNK)))
        try:
            if isinstance(spoiled[0], dict) and isinstance(spoiled[1], dict):
                describe(*spoiled)
        except CheckpointError:
            refused += 1
    assert refused > 50
