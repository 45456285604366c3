"""The state of a chat on the terminal: messages, settings, token counts; saved and loaded.

Knows messages and settings. Knows no terminal, no engine and no template.
"""

import base64
import json
import mimetypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_engine.command import system_words
from spark_engine.errors import OptionError, RequestError
from spark_engine.runtime.cli.terminal.session import Answer
from spark_engine.runtime.text.reply_parts import Kind

MOST_IMAGE = 24 << 20  # bytes of a file that are read: more than the decoder accepts
ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


@dataclass
class Totals:
    """Sums over the answers of a run. Seconds are of decoding, after the first token of each."""

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    decoded: int = 0  # tokens after the first of each answer
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.tokens += len(answer.events)
        self.prompt_tokens += len(answer.prompt)
        self.cached += answer.cached
        if answer.rate is not None:
            self.decoded += len(answer.events) - 1
            self.seconds += answer.total_s - answer.first_s
        drafted, accepted = answer.drafts or (0, 0)
        self.drafted += drafted
        self.accepted += accepted


@dataclass
class ChatHistory:
    """One chat.

    Attributes:
        settings: fields of a request's body that are set, e.g. {"temperature": 0.7}.
        messages: without the system message, in their order.
    """

    model: str  # the engine's name
    context: int  # the engine's tokens of one sequence
    system: str | None = None
    thinking: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    used: int = 0  # tokens of the prompt and the answer at the last turn
    file: Path | None = None  # the last file that it was saved to or loaded from
    attached: list[str] = field(default_factory=list)  # texts of files for the next message
    images: list[Path] = field(default_factory=list)  # files for the next message

    def prompt(self) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages]

    def ask(self, text: str) -> None:
        """Adds the user's turn, with the attached files. Raises OptionError."""
        content = with_images(self.images, "\n\n".join([*self.attached, text]))
        self.messages.append({"role": "user", "content": content})
        self.attached, self.images = [], []

    def attach(self, name: str, text: str) -> None:
        """Attaches a text file to the next message, quoted by more backticks than it contains."""
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        self.attached.append(f"{name}:\n{fence}\n{text.rstrip()}\n{fence}")

    def reply(self, parts: Mapping[Kind, str]) -> None:
        message = {"role": "assistant", "content": parts.get(Kind.CONTENT, "")}
        if thought := parts.get(Kind.REASONING):
            message["reasoning_content"] = thought
        self.messages.append(message)

    def take_back_answer(self) -> None:
        """Removes the last answer, so that it can be generated again. Raises RequestError."""
        if not self.messages:
            raise RequestError("no message was sent yet: send one first")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()

    def take_back_question(self) -> None:
        """Removes the last message, which could not be answered."""
        self.messages.pop()

    def clear(self) -> None:
        """Starts again; the system message and the settings stay."""
        self.messages.clear()
        self.attached.clear()
        self.images.clear()
        self.used = 0

    def save(self, path: Path) -> None:
        """Writes the chat as a body of /v1/chat/completions. Raises OptionError.

        It replaces no file except the one that this chat was last saved to or loaded from.
        """
        if path.exists() and path != self.file:
            raise OptionError(f"{path} exists already: name another file")
        row = {"model": self.model, "messages": self.prompt(), **self.settings}
        row["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        try:
            path.write_text(json.dumps(row, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(system_words(error)) from None
        self.file = path

    def load(self, path: Path, settings: frozenset[str]) -> None:
        """Replaces this chat by a saved one; of its fields, `settings` are settings.

        Raises OptionError naming what is wrong; then nothing is changed.
        """
        row = _read(path)
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            words = "must be a list of objects with a role (system, user, assistant) and content"
            raise OptionError(f"{path}: messages {words}")
        options = row.get("chat_template_kwargs")
        thinking = options.get("enable_thinking", True) if isinstance(options, dict) else True
        first = [m["content"] for m in messages[:1] if m["role"] == "system"]
        rest = messages[len(first) :]
        if any(m["role"] == "system" for m in rest):
            raise OptionError(f"{path}: a system message may only be the first")
        self.system = first[0] if first else None
        self.messages, self.thinking, self.file = rest, bool(thinking), path
        self.settings = {k: v for k, v in row.items() if k in settings and v is not None}
        self.used = 0


def with_images(paths: Iterable[Path], text: str) -> str | list[dict[str, Any]]:
    """A message's content: the text, behind images if there are any. Raises OptionError."""
    parts: list[dict[str, Any]] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                data = file.read(MOST_IMAGE)
        except OSError as error:
            raise OptionError(system_words(error)) from None
        kind = mimetypes.guess_type(path)[0] or "image/png"
        url = {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}
        parts.append({"type": "image_url", "image_url": url})
    return [*parts, {"type": "text", "text": text}] if parts else text


def _read(path: Path) -> dict[str, Any]:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(system_words(error)) from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is no saved chat: it is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise OptionError(f"{path} is no saved chat: it must hold an object with messages")
    return row


def _is_message(row: Any) -> bool:
    if not isinstance(row, dict) or row.get("role") not in ROLES:
        return False
    thought = row.get("reasoning_content", "")
    parts = row.get("content")
    text = isinstance(parts, str)
    text = text or isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    return text and isinstance(thought, str)
