"""What lies in an engine folder beside the engine: its description, tokenizer and chat template.

Knows file names. Opens no engine file.
"""

from __future__ import annotations

from pathlib import Path

from spark_engine.engine_file import TOKENIZER, read_manifest
from spark_engine.runtime.server.ipc import EngineInfo
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer


def read_info(folder: Path) -> EngineInfo:
    """What the HTTP process must know of the engine in `folder`. Raises EngineError."""
    manifest = read_manifest(folder)
    return EngineInfo(
        name=manifest.name,
        limits=manifest.limits,
        eos_token_ids=manifest.eos_token_ids,
        generation=dict(manifest.generation),
    )


def read_text(folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template of an engine folder, None where it has none."""
    path = folder / TOKENIZER
    if not (path / "tokenizer.json").exists():
        return None, None
    return Tokenizer.load(path), ChatTemplate.load(path)
