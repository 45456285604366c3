"""Checks a checkpoint's files for text: the tokenizer, its configuration, the chat template.

They are copied into the engine unchanged, so a damaged one would otherwise be found only by the
server. Knows their formats as far as needed; reads no weight.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.files import refuse_pointer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
TEXT_FILES = (
    *(TOKENIZER, SETTINGS, TEMPLATE, GENERATION),
    *("vocab.json", "merges.txt", "special_tokens_map.json"),
)
AGAIN = "fetch the checkpoint's file again"
# Fields that requests also have, with their least and greatest values; None is no bound.
RANGES: dict[str, tuple[float, float | None]] = {
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "top_k": (0.0, None),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, None),
}


def text_notes(checkpoint: Path) -> tuple[str, ...]:
    """A note for each kind of text that the engine cannot process for lack of a file.

    Raises CheckpointError for a file that was not fetched or is invalid.
    """
    for name in TEXT_FILES:
        if (path := checkpoint / name).is_file():
            refuse_pointer(path, path.read_bytes()[:64])
    settings = _json(checkpoint / SETTINGS)
    _check_generation(checkpoint / GENERATION)
    templates = _check_templates(checkpoint / TEMPLATE, settings.get("chat_template"))
    if not (checkpoint / TOKENIZER).is_file():
        return (
            f"{checkpoint} has no {TOKENIZER}, so the engine takes and gives token ids only; put "
            "the model's there and build again for text",
        )
    _check_tokenizer(checkpoint / TOKENIZER)
    if templates:
        return ()
    return (
        f"{checkpoint} has no {TEMPLATE}, so the engine answers no chats; put the model's there "
        "and build again for them",
    )


def text_bytes(checkpoint: Path) -> int:
    found = (checkpoint / name for name in TEXT_FILES)
    return sum(path.stat().st_size for path in found if path.is_file())


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, or no JSON
        raise CheckpointError(f"{path} is not valid JSON ({error}): {AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object: {AGAIN}")
    return value


def _check_tokenizer(path: Path) -> None:
    _json(path)
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is no tokenizer ({error}): {AGAIN}") from None


def _check_templates(path: Path, named: Any) -> bool:
    environment = ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols"], optimized=False
    )
    found = [(path, path.read_text(encoding="utf-8", errors="replace"))] if path.is_file() else []
    several = (
        [named]
        if isinstance(named, str)
        else [one.get("template") for one in named or () if isinstance(one, dict)]
    )
    found += [(path.with_name(SETTINGS), text) for text in several if isinstance(text, str)]
    for place, source in found:
        try:
            environment.parse(source)
        except TemplateSyntaxError as error:
            words = f"the chat template does not compile ({error.message}, line {error.lineno})"
            raise CheckpointError(f"{place}: {words}: {AGAIN}") from None
    return bool(found)


def _check_generation(path: Path) -> None:
    for name, value in _json(path).items():
        if name not in RANGES or value is None:
            continue
        least, most = RANGES[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value < least or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise CheckpointError(
                f"{path}: {name} is {value!r}; it must be a number {bounds}: correct it there, or "
                "take the line out"
            )
