"""What the Python API returns: whole answers, and their parts while they are generated."""

from dataclasses import dataclass
from typing import Any

from spark_engine.errors import SparkError


@dataclass(frozen=True)
class TokenLogprob:
    """Of one token of an answer: its log-probability, and the likeliest (id, log-probability)
    pairs, descending. Both are of the raw logits, before temperature and penalties."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenUsage:
    """Counts of tokens. `cached_tokens`: of the prompt, from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: the answer; of a chat without the reasoning. Empty for an engine without tokenizer.
        token_ids: all that were generated, reasoning and the end id included.
        finish_reason: "stop", "length" (max_tokens or the context), "tool_calls", or "error".
        logprobs: one entry for each token, where they were asked for.
        message: of a chat, the assistant's message in OpenAI's form, to append to the messages:
            `content`, and where there are any `reasoning_content` and `tool_calls`.
        error: why there is no answer, in a list of answers; None where there is one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: TokenUsage
    logprobs: tuple[TokenLogprob, ...] | None = None
    message: dict[str, Any] | None = None
    error: SparkError | None = None

    @classmethod
    def failed(cls, error: SparkError) -> "Completion":
        return cls("", (), "error", TokenUsage(), error=error)

    @property
    def reasoning(self) -> str:
        """The reasoning before a chat's answer; empty without."""
        return str((self.message or {}).get("reasoning_content") or "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of a chat's answer in OpenAI's form; their arguments are JSON."""
        return list((self.message or {}).get("tool_calls") or ())


@dataclass(frozen=True)
class CompletionChunk:
    """A part of an answer. `text` may lag behind `token_ids`; `completion` is the whole answer, in
    the last part only. Tool calls are in its `message`."""

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
