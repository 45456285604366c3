"""Rotary frequencies: the definition, yarn's limits, and transformers where it is installed."""

import importlib.util
import math
from typing import Any

import numpy as np
import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.config.rope import Rope, rescaled, rope_from_hf

BASE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
TEXT = {"head_dim": 256, "max_position_embeddings": 262144}
YARN = BASE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


def _rope(row: dict[str, Any], **text: object) -> Any:
    return rope_from_hf(TEXT | {"rope_parameters": row} | text)


def test_default_is_the_definition() -> None:
    want = [1e7 ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(_rope(BASE).inv_freq(), want, rtol=1e-6)
    legacy = rope_from_hf(TEXT | BASE | {"rope_scaling": {"type": "mrope"}})
    assert legacy == _rope(BASE)


# 1 / f32(1e7^(2i/64)), each power rounded from 60 decimal digits.
EXACT = """
3f800000 3f1ab32b 3ebaf81b 3e61f835 3e088d77 3da50956 3d47763f 3cf11177
3c91ad39 3c301052 3bd4ca15 3b80967d 3b1b690d 3abbd3ed 3a6301e2 3a092e02
39a5cb60 394860c1 38f22ce2 3892587e 3830df52 37d5c441 37812dab 371c1fc4
36bcb0c1 36640cc6 3609cf4a 35a68e4c 35494c57 34f3499d 3493048e 3431af44
"""


def test_frequencies_are_the_same_on_every_processor() -> None:
    got = _rope(BASE).inv_freq()
    assert got.dtype == np.float32
    assert [f"{word:08x}" for word in got.view(np.uint32).tolist()] == EXACT.split()


def test_yarn_keeps_the_fast_and_stretches_the_slow() -> None:
    plain, yarn = _rope(BASE).inv_freq(), _rope(YARN)
    ratio = yarn.inv_freq() / plain
    turns = 262144 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 64], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.5], 0.25, rtol=1e-6)
    assert np.all(np.diff(ratio) <= 1e-6)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"factor": 2.0, "beta_fast": 16, "beta_slow": 2},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 0.3},
        {"truncate": False},
        {"factor": 1.0},
        {"original_max_position_embeddings": 4096, "factor": 8.0},
    ],
    ids=str,
)
def test_yarn_is_transformers(more: dict[str, Any]) -> None:
    if importlib.util.find_spec("transformers") is None or not importlib.util.find_spec("torch"):
        pytest.skip("the oracle extra is not installed")
    from transformers import Qwen3_5TextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    row = YARN | more
    config = Qwen3_5TextConfig(head_dim=256, max_position_embeddings=262144, rope_parameters=row)
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = _rope(row)
    np.testing.assert_allclose(ours.inv_freq(), want.numpy(), rtol=2e-6)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_an_older_spelling_of_yarn_is_yarn() -> None:
    row = {k: v for k, v in YARN.items() if k not in ("rope_type", *BASE)} | {"type": "yarn"}
    assert rope_from_hf(TEXT | BASE | {"rope_scaling": row}) == _rope(YARN)


def test_mscale_counts_together_with_mscale_all_dim_only() -> None:
    default = _rope(YARN).attention_factor
    for one in ({"mscale": 0.7}, {"mscale_all_dim": 0.7}):
        assert _rope(YARN | one).attention_factor == default
    both = _rope(YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}).attention_factor
    assert both == pytest.approx((0.07 * math.log(4) + 1) / (0.03 * math.log(4) + 1))


@pytest.mark.parametrize(("head_dim", "part"), [(6, 0.5), (2, 0.5), (8, 1.25)])
def test_rotary_dimensions_are_even_and_within_the_head(head_dim: int, part: float) -> None:
    with pytest.raises(CheckpointError, match="rotary dimensions; they must be even"):
        _rope(BASE | {"partial_rotary_factor": part}, head_dim=head_dim)


def test_bad_factors() -> None:
    with pytest.raises(CheckpointError, match="yarn factor is 0.5"):
        _rope(YARN | {"factor": 0.5})
    with pytest.raises(CheckpointError, match="rope_theta is 'x'"):
        _rope({"rope_theta": "x"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0, True, "2"], ids=str)
@pytest.mark.parametrize(
    "key", ["rope_theta", "factor", "beta_fast", "beta_slow", "attention_factor"]
)
def test_a_number_that_is_none_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is {value!r}: expected a positive number"):
        _rope(YARN | {key: value})
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is -1"):
        _rope(YARN | {"original_max_position_embeddings": -1})
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is below 1"):
        _rope(YARN | {"original_max_position_embeddings": 0.5})
    with pytest.raises(CheckpointError, match="rope_theta is 1.0; with yarn"):
        _rope(YARN | {"rope_theta": 1})


PLAIN = BASE | {"rope_type": "default", "mrope_section": [11, 11, 10]}
LEGACY = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (PLAIN, LEGACY),
        (YARN, LEGACY | {"factor": 2.0}),
        (YARN, {"type": "mrope", "mrope_section": [11, 11, 10]}),
        (PLAIN, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_two_declarations_that_differ_are_refused(
    parameters: dict[str, Any], scaling: dict[str, Any]
) -> None:
    words = "programs disagree on which counts; keep one, or build with --rope-scaling"
    with pytest.raises(CheckpointError, match=f"rope_scaling gives .*{words}") as caught:
        _rope(parameters, rope_scaling=scaling)
    assert len(str(caught.value)) <= 300
    with pytest.raises(CheckpointError, match="outside text_config: rope_scaling gives"):
        rope_from_hf(TEXT | {"rope_parameters": parameters}, {"rope_scaling": scaling})
    with pytest.raises(CheckpointError, match="outside text_config: rope_parameters gives"):
        rope_from_hf(TEXT | BASE | {"rope_scaling": scaling}, {"rope_parameters": parameters})


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (YARN, LEGACY),
        (PLAIN, {"type": "mrope", "mrope_section": [11, 11, 10]}),
        (PLAIN, {"rope_type": "default"}),
        (PLAIN, None),
        (None, LEGACY),
    ],
)
def test_equal_declarations_are_one(parameters: Any, scaling: Any) -> None:
    text = TEXT | BASE | {"rope_parameters": parameters, "rope_scaling": scaling}
    want = _rope(YARN if scaling and scaling.get("factor") else PLAIN)
    assert rope_from_hf(text) == rope_from_hf(text, text) == want


def test_two_bases_that_differ_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_theta is 10000, and 10000000.0 in rope_para"):
        _rope(BASE, rope_theta=10000)


@pytest.mark.parametrize("nested", [False, True])
def test_a_scaling_replaces_the_files(nested: bool) -> None:
    text = TEXT | {"rope_parameters": PLAIN, "rope_scaling": LEGACY | {"factor": 2.0}}
    config: dict[str, Any] = {"text_config": text, "rope_scaling": LEGACY} if nested else text

    def read(scaling: dict[str, Any]) -> Rope:
        found = rescaled(config, scaling)
        return rope_from_hf(found["text_config"] if nested else found, found)

    assert read({"rope_type": "yarn", "factor": 4.0}) == _rope(YARN)
    assert read({"type": "yarn", "factor": 2.0, "rope_theta": 1e6}).theta == 1e6
    assert read({"rope_type": "default"}) == _rope(PLAIN)
    assert config["rope_scaling"]["type"] == "yarn", "the file's own object is unchanged"
    assert _rope(YARN).positions == 4 * 262144 and _rope(PLAIN).positions == 0
    assert str(_rope(YARN)) == "yarn, factor 4 over 262144 positions"


def test_sections_are_those_of_height_and_width() -> None:
    assert _rope(BASE).sections == (11, 10)
    for row in (BASE, YARN):
        assert _rope(row | {"mrope_section": [3, 3, 2]}).sections == (3, 2)


@pytest.mark.parametrize("given", [[11, 11], [1, 2, -1], [1, 2, True], "11", {"a": 1}])
def test_sections_are_three_whole_numbers(given: object) -> None:
    with pytest.raises(CheckpointError, match="mrope_section is .* expected three whole numbers"):
        _rope(BASE | {"mrope_section": given})
