"""The embedded model's draft head: what the checkpoint holds, and that training chains it as it is
served.
"""

import json
import sys
from typing import Any

import numpy as np
import pytest

from tests.house import ROOT

sys.path.append(str(ROOT))  # training is not installed

from training import quantize  # noqa: E402
from training.shape import DRAFT_PREFIX, TINY, head_tensors, stored_tensors  # noqa: E402

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


def test_adding_a_head_leaves_the_model_bit_for_bit(tmp_path: Any, stored: dict[str, Any]) -> None:
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
    """Three drafts from each position, token by token in numpy with a cache of its own, are what
    the training computes for all positions at once.
    """
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
