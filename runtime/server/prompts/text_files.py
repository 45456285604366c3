"""The text files of an engine folder: tokenizer and chat template, and what is made from them."""

from pathlib import Path

from spark_engine.engine_file import TOKENIZER, has_text
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.chat import ChatTemplate, read_source
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer


def read_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder / TOKENIZER) if has_text(folder) else None


def read_text(folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    path = folder / TOKENIZER
    if not has_text(folder):
        return None, None
    return Tokenizer.load(path), ChatTemplate.load(path)


def read_formats(folder: Path, chat: ChatOptions) -> Formats:
    """The formats of thoughts and calls in an engine folder's answers. The chat template is read
    and not compiled. Raises OptionError for an unknown format."""
    source = read_source(folder / TOKENIZER)[0] if has_text(folder) else None
    return Formats.of(source, chat.reasoning, chat.tools)


def grammars_of(tokenizer: Tokenizer | None, info: EngineInfo) -> Grammars | None:
    """Compiles grammars for an engine's answers; None where it has no tokenizer."""
    if tokenizer is None:
        return None
    return Grammars(lambda: tokenizer, info.limits.vocab, info.eos_token_ids)
