"""The fields of a request body that constrain the answer.

Knows names only; `constraints` defines their meaning.
"""

from typing import Any

import msgspec


class StructuredFields(msgspec.Struct, kw_only=True):
    """Null means absent. `guided_*` are vLLM's older names for `structured_outputs`."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
