"""Options of other servers' command lines, and what does the same here.

Knows names of options only: foreign_options.json, which `docs/start/other_servers.md` shows too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

# {option: what to use}, of vLLM, SGLang, llama.cpp and TensorRT-LLM
FOREIGN: Mapping[str, str] = MappingProxyType(
    json.loads(Path(__file__).resolve().with_suffix(".json").read_text(encoding="utf-8"))
)


def explain(option: str) -> str:
    """A sentence about what does the same here as `option` elsewhere; empty if it is unknown."""
    words = FOREIGN.get(option.partition("=")[0].replace("_", "-"), "")
    return f" Here: {words}." if words else ""
