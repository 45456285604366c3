"""The embedded model's draft head: what the checkpoint holds, that training chains it as it is
served, and how many of its drafts an engine keeps.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams
from tests.repository import ROOT
from training import quantize
from training.shape import DRAFT_PREFIX, TINY, head_tensors, stored_tensors
from training.storyteller import tell

CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return quantize.read_weights(CHECKPOINT)


def test_the_checkpoint_says_that_it_has_a_head(stored: dict[str, Any]) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    outer = json.loads((CHECKPOINT / "hf_quant_config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1 and not config["mtp_use_dedicated_embeddings"]
    assert "mtp*" in outer["quantization"]["exclude_modules"]
    assert "mtp*" in config["quantization_config"]["ignore"]
    assert not any("mtp" in name for name in config["quantization_config"]["quantized_layers"])
    assert len([name for name in stored if name.startswith(DRAFT_PREFIX)]) == 19


def test_adding_a_head_leaves_the_model_bit_for_bit(tmp_path: Path, stored: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    model = {name: stored[name] for name in stored_tensors(TINY)}
    quantize.write_checkpoint(model, TINY, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    before = quantize.read_weights(tmp_path)
    head = {
        name: np.full(size, 0.5).astype(quantize.BF16)
        for name, (size, _) in head_tensors(TINY).items()
    }
    quantize.write_checkpoint({**model, **head}, TINY, tmp_path)
    after = quantize.read_weights(tmp_path)
    assert set(after) == set(before) | set(head)
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)
    assert json.loads((tmp_path / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    head.popitem()
    with pytest.raises(ValueError, match="not as the table says"):
        quantize.write_checkpoint({**model, **head}, TINY, tmp_path)


def test_training_chains_the_head_as_it_is_served(stored: dict[str, Any]) -> None:
    """Three drafts from each position, token by token in numpy with a separate cache, equal what
    the training computes for all positions at once."""
    torch = pytest.importorskip("torch")
    from training.draft_head import DraftHead
    from training.measure_draft import Cache, NumpyHead

    rng, length, steps = np.random.default_rng(7), 9, 3
    numbers = NumpyHead(stored, TINY)
    head = DraftHead(TINY)
    head.load_state_dict({name: torch.from_numpy(one) for name, one in numbers.own.items()})
    hidden = (rng.normal(size=(length, TINY.hidden)) * 2).astype(np.float32)
    tokens = rng.integers(0, TINY.vocab, length)  # row t: token t + 1
    with torch.no_grad():
        states, _ = head(
            torch.from_numpy(numbers.embed[tokens])[None], torch.from_numpy(hidden)[None], steps
        )
    cache = Cache()
    for start in range(length - steps + 1):
        y = numbers.step(cache, start, hidden[start], tokens[start])
        for i in range(steps):
            if i:
                y = numbers.step(cache, start + i, y, tokens[start + i])
            np.testing.assert_allclose(states[i][0, start + i].numpy(), y, rtol=2e-3, atol=2e-3)


def test_an_engine_keeps_six_of_ten_first_drafts_and_says_the_same(tmp_path: Path) -> None:
    """Held-out stories, gone on with greedily in rounds of three drafts on the CPU: as good as the
    checkpoint's README says, and the text of an engine without drafts."""
    tokenizer, rng = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")), random.Random(930_000)
    prompts = [tuple(tokenizer.encode(tell(rng).text).ids[:24]) for _ in range(3)]
    said: dict[int, list[list[int | None]]] = {}
    for drafts in (0, 3):
        options = Options(
            decode=(1,), prefill=(64,), max_context=128, max_seqs=1, kv_tokens=256, drafts=drafts
        )
        folder = tmp_path / str(drafts)
        build(CHECKPOINT, folder, options, lambda text: None)
        engine = Engine(load(folder, threads=1))
        said[drafts] = []
        for prompt in prompts:
            engine.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=64)))
            said[drafts].append([])
            while not engine.idle:
                said[drafts][-1] += [event.token for event in engine.step()]
    assert said[3] == said[0]
    stats = engine.stats()
    tried, kept = (np.array(stats[f"{name}_by_position"], float) for name in ("drafts", "accepted"))
    assert tried[0] >= 40
    assert kept[0] >= 0.6 * tried[0]
    assert kept[1] >= 0.4 * tried[1]  # a chain that took another hidden state keeps half as many
    assert kept[2] >= 0.25 * tried[2]
