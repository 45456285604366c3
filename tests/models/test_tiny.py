"""The embedded tiny model: quantiser rules, checkpoint file, tokenizer, template, generator."""

import itertools
import json
import random
from typing import Any

import jinja2
import jinja2.sandbox
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.repository import ROOT
from training import quantize
from training.chatgen import Chat, Exchange, chat, draw_sum, is_held_out, think_sum
from training.corpus import UNTRAINED, encode, pack, render
from training.grammar import phrasings
from training.shape import TINY, head_tensors, module_table, stored_tensors
from training.storyteller import PLOTS, set_scene, tell

FOLDER = ROOT / "models" / "tiny"
CHECKPOINT = FOLDER / "checkpoint"
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return quantize.read_weights(CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def fp4(value: float) -> float:
    """Nearest E2M1 value by search over the grid; of two equally near, the even code."""
    near = sorted(range(8), key=lambda code: (abs(GRID[code] - abs(value)), code % 2))
    return float(np.copysign(GRID[near[0]], value))


def expected_nvfp4(weight: np.ndarray, scale_2: float) -> np.ndarray:
    """The dequantised weight by the written rules, element by element, in float64."""
    out = np.zeros(weight.shape)
    for row, start in itertools.product(range(weight.shape[0]), range(0, weight.shape[1], 16)):
        block = weight[row, start : start + 16].astype(np.float64)
        amax = np.abs(block).max()
        wanted = 1.0 if amax == 0 else min(max(amax / (6 * scale_2), 2.0**-9), 448.0)
        scale = float(np.float64(wanted).astype(ml_dtypes.float8_e4m3fn))
        out[row, start : start + 16] = [fp4(x / (scale * scale_2)) * scale * scale_2 for x in block]
    return out


def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 9.0], np.float32)
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    assert [GRID[code] for code in quantize.to_e2m1(ties)] == wanted
    assert [GRID[code & 7] for code in quantize.to_e2m1(-ties)] == wanted
    assert all(code & 8 for code in quantize.to_e2m1(-ties))


def test_nvfp4_equals_the_rules_in_float64() -> None:
    rng = np.random.default_rng(3)
    weight = (rng.normal(size=(6, 64)) * np.exp(rng.normal(size=(6, 1)))).astype(np.float32)
    weight[2, 16:32] = 0
    weight[3, :16] *= 1e-6
    scale_2 = quantize.largest_scale([weight], 2688)
    packed, scale = quantize.quantize_nvfp4(weight, scale_2)
    assert packed.shape == (6, 32) and scale.shape == (6, 4)
    assert float(scale[2, 1]) == 1.0  # a zero block
    assert float(np.max(scale.astype(np.float32))) == 448.0  # the block with the largest value
    back = quantize.dequantize_nvfp4(packed, scale, scale_2)
    np.testing.assert_allclose(back, expected_nvfp4(weight, float(scale_2)), rtol=1e-6, atol=0)


def test_nvfp4_packs_the_earlier_element_low() -> None:
    weight = np.zeros((1, 16), np.float32)
    weight[0, 0], weight[0, 1] = 6.0, -3.0
    packed, scale = quantize.quantize_nvfp4(weight, np.float32(1 / 448))
    assert float(scale[0, 0]) == 448.0
    assert packed[0, 0] == 7 | (13 << 4)


def test_fp8_saturates_and_rounds_to_even() -> None:
    got = quantize.to_e4m3(np.array([500, -1e9, 448, 1.0625, 1.1875], np.float32))
    assert got.astype(np.float32).tolist() == [448, -448, 448, 1.0, 1.25]


def test_gate_and_up_share_the_global_scale(stored: dict[str, Any]) -> None:
    roots = {name.rpartition(".")[0] for name in module_table(TINY) if name.endswith("gate_proj")}
    assert len(roots) == TINY.layers * (TINY.experts + 1)
    for root in roots:
        gate, up = (stored[f"{root}.{leaf}.weight_scale_2"] for leaf in ("gate_proj", "up_proj"))
        assert gate == up


def test_the_file_holds_exactly_the_expected_tensors(stored: dict[str, Any]) -> None:
    kinds = {str(dtype): name for name, dtype in quantize.STORED.items()}
    found = {name: (tensor.shape, kinds[str(tensor.dtype)]) for name, tensor in stored.items()}
    assert found == {**stored_tensors(TINY), **head_tensors(TINY)}
    assert all(np.isfinite(tensor.astype(np.float32)).all() for tensor in stored.values())
    scales = [tensor for name, tensor in stored.items() if name.endswith(("scale_2", "put_scale"))]
    assert all(float(scale) > 0 for scale in scales)


def test_the_whole_model_is_small() -> None:
    files = [*CHECKPOINT.iterdir(), FOLDER / "NOTICE"]
    assert sum(path.stat().st_size for path in files) <= 18_000_000


def test_quantization_tables_agree() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    outer = json.loads((CHECKPOINT / "hf_quant_config.json").read_text())
    inner = config["quantization_config"]
    assert inner["quantized_layers"] == outer["quantization"]["quantized_layers"]
    assert inner["quant_algo"] == outer["quantization"]["quant_algo"] == "MIXED_PRECISION"
    layers = inner["quantized_layers"]
    assert layers["lm_head"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    targets = [name for group in inner["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(layers)
    assert len(config["layer_types"]) == config["num_hidden_layers"] == TINY.layers


def test_special_ids_agree_everywhere(tokenizer: Tokenizer) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    end, stop = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    assert generation["eos_token_id"] == [end, stop]
    assert config["eos_token_id"] == end and generation["pad_token_id"] == stop
    text = "<think>\nx\n</think>\n\nhello<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    "text", ["Once upon a time.\n\nThe  end", "naïve 北京 🦊 ½", "  12+345=\t", "\r\n don't"]
)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stay_single(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("1234567890").ids) == 10


def template(**variables: Any) -> str:
    """Render as servers do: blocks trimmed, tojson without HTML escapes."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    space = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    space.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    space.globals["raise_exception"] = refuse
    source = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
    return space.from_string(source).render(**variables)


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_template_thinking_on_and_off() -> None:
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    asked = [says("user", " Hi ")]
    on = template(messages=asked, add_generation_prompt=True)
    off = template(messages=asked, add_generation_prompt=True, enable_thinking=False)
    assert on == turn + "<think>\n"
    assert off == turn + "<think>\n\n</think>\n\n"
    assert template(messages=asked) == "<|im_start|>user\nHi<|im_end|>\n"
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert template(messages=[says("user", parts)], add_generation_prompt=True) == on


def test_template_forgets_old_thoughts() -> None:
    history = [
        says("system", "Be kind."),
        says("user", "A"),
        says("assistant", "<think>\nold\n</think>\n\nB"),
        says("user", "C"),
        says("assistant", "D", reasoning_content="new"),
    ]
    text = template(messages=history)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert "<|im_start|>assistant\nB<|im_end|>" in text and "old" not in text
    assert "<|im_start|>assistant\n<think>\nnew\n</think>\n\nD<|im_end|>\n" in text
    kept = template(messages=history, preserve_thinking=True)
    assert "<think>\nold\n</think>\n\nB" in kept


def test_template_tools() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = {"function": {"name": "weather", "arguments": {"town": "Bern", "days": 2}}}
    history = [
        says("user", "Weather?"),
        says("assistant", "", tool_calls=[call]),
        says("tool", "sunny"),
        says("tool", "dry"),
    ]
    text = template(messages=history, tools=[tool], add_generation_prompt=True)
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    assert (
        "<tool_call>\n<function=weather>\n<parameter=town>\nBern\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n" in text
    )
    results = "\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
    assert f"<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n<think>\n" in text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [says("system", "only")],
        [says("user", "a"), says("system", "late")],
        [says("user", "a"), says("developer", "b")],
        [says("user", [{"type": "image", "image": "x"}])],
    ],
)
def test_template_refuses(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(jinja2.TemplateError):
        template(messages=messages)


@pytest.mark.parametrize("thinking", [True, False])
def test_training_text_has_the_form_of_the_template(thinking: bool) -> None:
    turns = (Exchange("Hi", "Hello!"), Exchange("2 + 3 =", "2 + 3 = 5.", "Easy."))
    text = "".join(text for text, _ in render(Chat("short", "Be kind.", turns), thinking))
    history = [
        says("system", "Be kind."),
        says("user", "Hi"),
        says("assistant", "Hello!"),
        says("user", "2 + 3 ="),
        says("assistant", "2 + 3 = 5.", reasoning_content="Easy." if thinking else ""),
    ]
    # An empty thought is "<think>\n\n</think>" in both; the template writes it for no reasoning.
    assert text == template(messages=history)


def test_rows_flag_what_the_user_says(tokenizer: Tokenizer) -> None:
    ids = encode([("ask", False), ("answer", True)], tokenizer)
    flagged = (ids & UNTRAINED) > 0
    assert flagged[0] and not flagged[-1]
    rows = pack([ids] * 2000)
    assert rows.shape[1] == 1025 and (rows[:, 0] == ids[0]).all()


def test_the_generator_is_wide_and_fixed_by_its_seed() -> None:
    assert len({plot.name for plot in PLOTS}) == len(PLOTS) >= 60
    assert tell(random.Random(5)) == tell(random.Random(5)) != tell(random.Random(6))
    assert chat(random.Random(5)) == chat(random.Random(5))
    words = {w.strip('.,!?":') for i in range(1500) for w in tell(random.Random(i)).text.split()}
    assert len(words) > 2000


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_every_plot_is_well_formed(plot: Any) -> None:
    scene = set_scene(plot, random.Random(1))
    counts = [phrasings(beat, scene.slots) for beat in ("{open} " + plot.beats[0], *plot.beats[1:])]
    assert sum(count >= 8 for count in counts) >= 3 and min(counts) >= 3
    for seed in range(10):
        story = tell(random.Random(seed), plot)
        parts = [story.text, story.summary, *itertools.chain(*story.asks)]
        assert not any(mark in part for part in parts for mark in "[]{}|")
        assert 60 < len(story.text.split()) < 260


def test_held_out_sums_never_reach_training() -> None:
    rng = random.Random(2)
    assert not any(is_held_out(*draw_sum(rng)[:3]) for _ in range(2000))
    assert all(is_held_out(*draw_sum(rng, held_out=True)[:3]) for _ in range(50))
    share = np.mean([is_held_out(a, "+", b) for a in range(10, 100) for b in range(10, 100)])
    assert 0.07 < share < 0.13
    assert all(
        is_held_out(a, "+", b) == is_held_out(b, "+", a) for a in range(40) for b in range(40)
    )


@pytest.mark.parametrize(
    ("a", "op", "b", "end"), [(47, "+", 38, "So 85."), (85, "-", 47, "So 38.")]
)
def test_the_working_of_a_sum_ends_in_its_result(a: int, op: str, b: int, end: str) -> None:
    assert think_sum(a, op, b).endswith(end)
