"""Dimensions as docs/graph.md writes them: `2·Hk·Dk+Hv·Dv`, `⌈K/128⌉`, `S+1`.

A formula has names, numbers, +, −, ·, / and ⌈ ⌉ around a quotient. It is evaluated from known
names, or solved for one unknown name. The value of a name may be a dimension that a bucket binds
("rows"). Knows no op and no tensor.
"""

import ast
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache

from spark_engine.tensors import Dim

Look = Callable[[str], Dim | None]  # a name -> its value, where it is known
_WORDS = ((r"⌈(.+?)/(.+?)⌉", r"-(-(\1)//(\2))"), (r"(\d)([A-Za-z])", r"\1*\2"))
_SIGNS = str.maketrans({"·": "*", "−": "-"})


@cache
def names(formula: str) -> tuple[str, ...]:
    """The names in a formula, each once."""
    return tuple(dict.fromkeys(n.id for n in ast.walk(_parsed(formula)) if isinstance(n, ast.Name)))


def evaluated(formula: str, look: Look) -> Dim | None:
    """The value; None while a name has no number. A lone name may have a named dimension.

    Raises ValueError where a quotient is not whole.
    """
    known = tuple(look(name) for name in names(formula))
    if names(formula) == (formula,):
        return known[0]
    return _number(formula, known) if all(isinstance(v, int) for v in known) else None


def solved(formula: str, size: Dim, look: Look) -> tuple[str, Dim] | None:
    """The one unknown name of a formula that has `size`, with its value; None where there is none.

    Raises ValueError where the value is not whole.
    """
    known = tuple(look(name) for name in names(formula))
    if known.count(None) != 1:
        return None
    name = names(formula)[known.index(None)]
    if formula == name:
        return name, size
    if "⌈" in formula or any(isinstance(v, str) for v in (size, *known)):
        return None
    return name, _unknown(formula, int(size), known)


def divisor(formula: str) -> str:
    """What a size must be divisible by for the formula to be whole: of `K/16` and `16·K` 16."""
    found = re.search(r"/(\w+)|^(\d+)", formula)
    return (found[1] or found[2]) if found else "1"


@lru_cache(maxsize=1024)
def _number(formula: str, known: tuple[Dim | None, ...]) -> int:
    return _whole(_value(_parsed(formula), _fractions(formula, known)))


@lru_cache(maxsize=1024)
def _unknown(formula: str, size: int, known: tuple[Dim | None, ...]) -> int:
    """The value of the name that has None; the formula is linear in it."""
    name = names(formula)[known.index(None)]
    given = _fractions(formula, known)
    zero, one = (_value(_parsed(formula), {**given, name: Fraction(x)}) for x in (0, 1))
    return _whole((size - zero) / (one - zero))


def _fractions(formula: str, known: tuple[Dim | None, ...]) -> dict[str, Fraction]:
    return {n: Fraction(int(v or 0)) for n, v in zip(names(formula), known, strict=True)}


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise ValueError(f"{value} is not whole")
    return value.numerator


@cache
def _parsed(formula: str) -> ast.expr:
    text = formula
    for pattern, made in _WORDS:
        text = re.sub(pattern, made, text)
    return ast.parse(text.translate(_SIGNS), mode="eval").body


def _value(node: ast.expr, known: dict[str, Fraction]) -> Fraction:
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, known)
    assert isinstance(node, ast.BinOp), f"{ast.unparse(node)} is in no formula"
    left, right = _value(node.left, known), _value(node.right, known)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return Fraction(left // right)
    assert isinstance(node.op, ast.Div)
    return left / right
