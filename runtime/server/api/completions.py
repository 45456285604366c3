"""The bodies of /v1/completions, with prompts of text or token ids, /tokenize and /detokenize."""

from typing import Any

import msgspec

from spark_engine.runtime.server.api.common import Body, limit_of
from spark_engine.runtime.server.api.fields import BadField, is_id, short

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat generates as much as fits


class CompletionBody(Body, kw_only=True):
    """/v1/completions. `prompt` is checked by `prompts`."""

    prompt: str | list[str | int | list[int]]  # refuses most invalid values while decoding
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def most_tokens(self) -> int | None:
        """The maximum of tokens; `min_tokens` may raise the default."""
        if self.max_tokens is not None:
            return limit_of(self.max_tokens)
        return max(COMPLETION_TOKENS, self.min_tokens or 0)

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def scores_prompt(self) -> bool:
        """An echo with log-probabilities includes the prompt's. An echo without an answer is run as
        one too, since the engine must generate a token."""
        echo = bool(self.echo and (self.logprobs is not None or self.max_tokens == 0))
        return super().scores_prompt() or echo

    def check_own(self) -> None:
        if self.suffix:
            raise BadField("suffix is not supported: the model does not fill in text", "suffix")


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]


def prompts(value: Any) -> list[str | list[int]]:
    """The four forms of `prompt` as a list. Raises BadField."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(is_id(v) for v in value):
            return [value]
        if all(isinstance(v, str) for v in value):
            return list(value)
        if all(isinstance(v, list) and v and all(is_id(i) for i in v) for v in value):
            return list(value)
    words = "a string, a list of strings, a list of token ids or a list of such lists, none empty"
    raise BadField(f"prompt is {short(value)}; it must be {words}", "prompt")
