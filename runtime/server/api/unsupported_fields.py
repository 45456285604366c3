"""Fields that would change an answer and that this server does not support.

Ignoring them would give a wrong answer, so each is refused with an alternative; a value without
effect is accepted. The names are in unsupported_fields.json; supported fields are in the bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.structured.fields import StructuredFields

_SHOWN = 4096  # bytes; a longer value has an effect
# name: (values without effect, the alternative); null never has an effect
UNSUPPORTED: Mapping[str, tuple[list[Any], str]] = MappingProxyType(
    json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)
VERBOSITIES = UNSUPPORTED["verbosity"][0]  # OpenAI's; has no effect here


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
