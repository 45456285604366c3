"""Fields that would change an answer and that this server does not support.

Ignoring them would give a wrong answer, so each is refused with an alternative; a value without
effect is accepted. Knows names and values; supported fields are in the bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.structured.fields import StructuredFields

_SHOWN = 4096  # bytes; a longer value has an effect
_PENALTY = "use presence_penalty, frequency_penalty or repetition_penalty"
_SHAPE = "use temperature, top_p, top_k or min_p"
_GRAMMAR = "use response_format or structured_outputs"
VERBOSITIES = ("low", "medium", "high")  # OpenAI's; has no effect here
# name: (values without effect, the alternative); null never has an effect
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "use_beam_search": ((False,), "answers are sampled, one token at a time"),
        "logits_processors": (([],), "use logit_bias, response_format or structured_outputs"),
        "chat_template": ((), "the engine's own template is used: render it yourself and "
                              "send the text to /v1/completions"),
        "documents": (([],), "put their text into a message"),
        "logprob_token_ids": (([],), "use logprobs or top_logprobs"),
        "prompt_embeds": ((), "send text or token ids"),
        "kv_transfer_params": ((), "this server computes its prompts itself"),
        "audio": ((), "this server reads and writes text"),
        "modalities": ((["text"], []), "this server reads and writes text: say ['text']"),
        "web_search_options": ((), "this server searches nothing: offer a tool that does"),
        "verbosity": (VERBOSITIES, "say low, medium or high"),
        "typical_p": ((1, 0), _SHAPE),
        "tfs_z": ((1, 0), _SHAPE),
        "top_a": ((0,), _SHAPE),
        "top_n_sigma": ((-1, 0), _SHAPE),
        "xtc_probability": ((0,), _SHAPE),
        "mirostat": ((0,), _SHAPE),
        "dynatemp_range": ((0,), _SHAPE),
        "smoothing_factor": ((0,), _SHAPE),
        "repeat_penalty": ((1, 0), _PENALTY),
        "dry_multiplier": ((0,), _PENALTY),
        "no_repeat_ngram_size": ((0,), _PENALTY),
        "grammar": (("",), _GRAMMAR),
        "json_schema": ((), _GRAMMAR),
        "regex": (("",), _GRAMMAR),
        "ebnf": (("",), _GRAMMAR),
        "n_predict": ((-1,), "use max_tokens"),
        "num_predict": ((-1,), "use max_tokens"),
        "max_new_tokens": ((), "use max_tokens"),
        "stop_regex": (([], ""), "use stop"),
    }
)  # fmt: skip


if TYPE_CHECKING:
    _Refused = StructuredFields
else:
    _ABSENT = msgspec.field(default_factory=msgspec.Raw)
    _Refused = msgspec.defstruct(
        "_Refused",
        [(name, msgspec.Raw, _ABSENT) for name in UNSUPPORTED],
        bases=(StructuredFields,),
        kw_only=True,
    )


class UnsupportedFields(_Refused, kw_only=True):
    """The same names as fields, which are not built."""

    def check_supported(self) -> None:
        """Raises BadField for a field with an effect."""
        for name, (neutral, instead) in UNSUPPORTED.items():
            if not (data := bytes(getattr(self, name))):
                continue
            value = msgspec.json.decode(data) if len(data) <= _SHOWN else data[:80]
            if value is None or any(value == v and type(value) in _kinds(v) for v in neutral):
                continue
            raise BadField(f"{name} ({short(value)}) is not supported: {instead}", name)


def _kinds(value: Any) -> tuple[type, ...]:
    """JSON's types that are equivalent to this value's."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return (int, float) if number else (type(value),)
