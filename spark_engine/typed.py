"""JSON values as frozen dataclasses, refused where they are not what the fields say.

Knows the types that our files use; knows no file. Everything here raises ValueError or TypeError.
"""

import enum
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

MOST = 1 << 48  # above any count or length in bytes that a file of ours can hold
T = TypeVar("T")


def typed(kind: type[T], value: Any, where: str = "") -> T:
    """`value` as `kind`; `where` names it in errors.

    A dataclass with a `from_json` is made by that. Integers are counts: 0 to MOST. An object has
    a dataclass's fields, all of them and no others.
    """
    origin, args = get_origin(kind), get_args(kind)
    made: Any
    if kind is Any or kind is object:
        made = value
    elif origin is UnionType:  # of one kind and None
        (inner,) = (arg for arg in args if arg is not NoneType)
        made = None if value is None else typed(inner, value, where)
    elif origin is tuple:
        rows, make = _of(list, value, where), getattr(args[0], "from_json", None)
        if make is None:
            made = tuple(typed(args[0], v, where) for v in rows)
        else:
            made = tuple(make(_of(dict, v, where)) for v in rows)
    elif origin is not None and issubclass(origin, Mapping):
        rows = _of(dict, value, where)
        made = {typed(args[0], k): typed(args[1], v, f"{where} {k}") for k, v in rows.items()}
    elif (from_json := getattr(kind, "from_json", None)) is not None:
        made = from_json(_of(dict, value, where))
    elif is_dataclass(kind):
        made = kind(**_fields(kind, _of(dict, value, where), where))
    elif issubclass(kind, enum.Enum):
        made = kind(_of(str, value, where))
    else:
        made = _of(kind, value, where)
        if kind is int and not 0 <= made <= MOST:
            raise ValueError(f"{where} is {made}, not between 0 and {MOST}")
    found: T = made
    return found


def _fields(kind: Any, row: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints, known = _hints(kind), {f.name for f in fields(kind)}
    strange, missing = sorted(set(row) - known), sorted(known - set(row))
    if strange or missing:
        raise ValueError(f"{where or kind.__name__} lacks {missing} and has the unknown {strange}")
    return {k: typed(hints[k], v, f"{where} {k}".strip()) for k, v in row.items()}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _of(kind: type[Any], value: Any, where: str) -> Any:
    if type(value) is not kind:
        kinds = (kind.__name__, type(value).__name__)
        raise TypeError(f"{where or 'the value'} must be {kinds[0]}, not {kinds[1]}")
    return value
