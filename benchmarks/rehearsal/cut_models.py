"""The published models, cut to one layer of each kind, every other size as it is.

For looking at each layer's results, which a CPU must compute too: a vocabulary of a few thousand
ids, no draft head. Weights are drawn (`models/synthetic.py`).
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.result_files import CONFIGS

KEPT = (0, 3)  # the first layer of each kind: a recurrence, then full attention
VOCAB = 4096
_LAYER = re.compile(r"\.layers\.(\d+)\.")
Json = Any


def cut(model: str, folder: Path) -> Path:
    """A checkpoint folder of the model's layers `KEPT`, in `folder`."""
    source = CONFIGS / model
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    text["layer_types"] = [text["layer_types"][i] for i in KEPT]
    text |= {"num_hidden_layers": len(KEPT), "vocab_size": VOCAB, "mtp_num_hidden_layers": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    quantised = json.loads((source / "hf_quant_config.json").read_text())
    given = quantised["quantization"]["quantized_layers"]
    quantised["quantization"]["quantized_layers"] = {
        name: how for old, how in given.items() if (name := _renamed(old)) is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config.json", config), ("hf_quant_config.json", quantised)):
        (folder / name).write_text(json.dumps(value))
    (folder / "synthetic.json").write_text((source / "synthetic.json").read_text())
    return folder


def _renamed(module: str) -> str | None:
    """The module's name among the kept layers; None where its layer is cut off."""
    found = _LAYER.search(module)
    if found is None:
        return module
    number = int(found[1])
    if number not in KEPT or module.startswith("mtp"):
        return None
    return module.replace(found[0], f".layers.{KEPT.index(number)}.")
