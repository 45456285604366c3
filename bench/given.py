"""What the options of `spark-bench` mean: the server, its GPUs, vocabulary, and numbers.

Knows options and engine folders; measures nothing.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from spark_engine.bench.load import Json
from spark_engine.bench.prompts import Ids
from spark_engine.device.choice import choose, visible
from spark_engine.engine_file import TOKENIZER, read_manifest
from spark_engine.errors import OptionError
from spark_engine.hints import extra
from spark_engine.runtime.text.tokenizer import Tokenizer

VOCAB = 1000  # ids below it are in every vocabulary


def needing_aiohttp(name: str) -> ModuleType:
    """A module of this package; aiohttp is an extra, and --help must work without it. Raises
    OptionError."""
    try:
        return importlib.import_module(f"spark_engine.bench.{name}")
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise OptionError(f"aiohttp is not installed: {extra('bench')}") from error


def read_target(where: str, more: tuple[str, ...]) -> tuple[str, Path | None]:
    """(URL without /v1, None), or ("", engine folder). Raises EngineError if it is neither."""
    if where.startswith(("http://", "https://")):
        if more:
            raise OptionError(f"{' '.join(more)} is for a server that is started here, not {where}")
        return where.rstrip("/").removesuffix("/v1"), None
    read_manifest(Path(where))
    return "", Path(where)


def cards_of(
    more: Sequence[str], engine: Path | None, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The server's GPUs as nvidia-smi names them: the one that its options name, or else the first
    visible ones, one for each rank on this host. Raises OptionError for a missing GPU."""
    for i, word in enumerate(more):
        name, given, value = word.partition("=")
        value = value if given else "".join(more[i + 1 : i + 2])
        if name == "--device" and value.isdecimal():
            return (choose(dict(environ), int(value)) or value,)
    here = not any(word.partition("=")[0] == "--hosts" for word in more)
    ranks = read_manifest(engine).ranks if engine is not None and here else 1
    return tuple((visible(environ) or list(map(str, range(ranks))))[:ranks])


def ids_of(engine: Path | None, options: Json) -> Ids:
    """The vocabulary that prompts are drawn from."""
    folder: Path | None = options["tokenizer"]
    if folder is None and engine and (engine / TOKENIZER / "tokenizer.json").exists():
        folder = engine / TOKENIZER
    tokenizer = None if folder is None else Tokenizer.load(folder)
    most = read_manifest(engine).limits.vocab if engine else VOCAB
    if tokenizer is not None:
        most = len(tokenizer) if engine is None else min(most, len(tokenizer))
    return Ids(options["vocab"] or most, tokenizer)


def body_of(text: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"--body is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise OptionError(f"--body is {text!r}; it must be an object")
    return found


def numbers(option: str, options: Json, least: int) -> tuple[int, ...]:
    text = str(options[option.removeprefix("--")])
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise OptionError(f"{option} is {text!r}; it must be like 0,4096 and at least {least}")
    return tuple(dict.fromkeys(map(int, words)))
