"""The grammar of an answer that enforces as much of the request as possible.

If a grammar does not compile, the pieces are tried separately. A strict piece that cannot be
enforced is an error with its place; a lenient piece is written again without its unenforceable
parts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import GrammarPiece, Lark, TooLong, param_of
from spark_engine.runtime.structured.matcher import Grammars, GrammarTooSlow
from spark_engine.runtime.structured.schema_errors import Search, Trials
from spark_engine.runtime.structured.schemas import LISTS, MAPS, ONE, coarse

Rows: TypeAlias = Sequence[tuple[Any, Any]]
_Each: TypeAlias = Callable[[Rows, Callable[[Rows], Any]], Rows]
# keywords, and those that restrict what they leave: without the first they would restrict more
_LEFT = {
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "additionalItems", "unevaluatedItems"),
}


def settle(write: Callable[[Lark], str | None], grammars: Grammars, place: str) -> str | None:
    """A grammar's text, which `grammars` compiles; `write` writes it and returns its start, or None
    without a grammar.

    `place` in the request is named if each piece compiles and the whole does not. Raises
    RequestError, with the field as `param`, for a strict piece that cannot be enforced.
    """
    lark = Lark()
    try:
        return _checked(lark, write, grammars)
    except RequestError as error:
        if error.param and error is not lark.failed:  # the error belongs to no piece
            raise
        first = error
    lenient = any(piece.style.lenient for piece in lark.pieces)
    plans: list[Callable[[GrammarPiece], Any]] = [_anything] if lenient else []
    if not isinstance(first, GrammarTooSlow | TooLong):  # otherwise the error is known
        loose = explain(lark.pieces, grammars)
        if lenient:
            plans = [partial(_loosened, loose), _coarse, _anything]
    for plan in plans:
        try:
            return _checked(Lark(plan), write, grammars)
        except RequestError as error:
            first = error
    if first.param:
        raise first
    raise RequestError(f"{place} cannot be enforced: {first}", param_of(place))


def explain(pieces: Sequence[GrammarPiece], grammars: Grammars) -> dict[str, Any]:
    """{place: schema} of the lenient pieces, without their unenforceable parts.

    Lacks the pieces for which time ran out. Raises RequestError, which names the place, for a
    strict piece that cannot be enforced. Takes as long as `Trials` allows.
    """
    trials = Trials()
    loose = {}
    for piece in pieces:
        if not trials.left:
            break
        search = _Loosening(piece, grammars, trials)
        error = search.error(piece.schema)
        if piece.style.lenient:
            loose[piece.place] = search.loosened() if error else piece.schema
        elif error:
            _own_words(piece)
            where, words = search.locate(piece.place)
            raise RequestError(f"{piece.real(where)} cannot be enforced: {words}", piece.param)
    return loose


def _own_words(piece: GrammarPiece) -> None:
    """Raises the writer's own error, if it names the place."""
    try:
        piece.write(Lark(), piece.schema)
    except RequestError as error:
        if error.param:
            raise


def _checked(lark: Lark, write: Callable[[Lark], str | None], grammars: Grammars) -> str | None:
    start = write(lark)
    if start is None:
        return None
    text = lark.text(start)
    grammars.check(text)
    return text


def _loosened(loose: Mapping[str, Any], piece: GrammarPiece) -> Any:
    return loose[piece.place] if piece.place in loose else _coarse(piece)


def _coarse(piece: GrammarPiece) -> Any:
    return coarse(piece.schema) if piece.style.lenient else piece.schema


def _anything(piece: GrammarPiece) -> Any:
    return piece.anything if piece.style.lenient else piece.schema


class _Loosening(Search):
    def __init__(self, piece: GrammarPiece, grammars: Grammars, trials: Trials) -> None:
        def error_of(schema: Any) -> str:
            lark = Lark()
            try:
                return grammars.error_of(lark.text(piece.write(lark, schema)))
            except RequestError as error:
                return str(error)

        super().__init__(piece.schema, error_of, trials)
        self._anything = piece.anything

    def loosened(self) -> Any:
        """The schema without its unenforceable parts; at worst one that allows anything."""
        schema = self.schema
        if isinstance(schema, Mapping):
            made = self._loose({key: part for key, part in schema.items() if key != "$defs"})
            if isinstance(made, Mapping) and isinstance(shared := schema.get("$defs"), Mapping):
                made = {**made, "$defs": {name: self._loose(part) for name, part in shared.items()}}
            for plan in (made, coarse(made)):
                if not self.error(plan):  # or no time is left
                    return plan
        return self._anything

    def _loose(self, schema: Any) -> Any:
        error = self.error(schema)
        if error == "":
            return schema
        if error is None or not isinstance(schema, Mapping):  # out of time, or not a schema
            return coarse(schema) if isinstance(schema, Mapping) else True
        made = dict(schema)
        # both: a property may be invalid and `properties` not, since all properties are optional
        for each in (self._halves, self._all):
            rows = {key: self._rows(key, part, each) for key, part in made.items()}
            lost = [key for key in _LEFT if _count(rows.get(key)) < _count(made.get(key))]
            made = {key: part for key, part in rows.items() if not self._left(key, lost)}
            if self.error(made) == "":
                return made
        kept: dict[str, Any] = {}
        for key in sorted(made, key=lambda key: key != "type"):
            if self.error({**kept, key: made[key]}) == "":
                kept[key] = made[key]
        lost = [key for key in made if key not in kept]
        return {key: part for key, part in kept.items() if not self._left(key, lost)}

    def _left(self, key: str, lost: Sequence[str]) -> bool:
        """True if a keyword would restrict more without the removed ones."""
        return any(key in _LEFT.get(name, ()) for name in lost)

    def _rows(self, name: str, value: Any, each: _Each) -> Any:
        """The schemas below a keyword, loosened, without those that cannot be kept."""
        if name in MAPS and isinstance(value, Mapping):
            return dict(each([*value.items()], lambda rows: {name: dict(rows)}))
        if name in LISTS and isinstance(value, list):
            rows = each([*enumerate(value)], lambda rows: {name: [v for _, v in rows]})
            return [part for _, part in rows]
        return self._loose(value) if name in ONE and isinstance(value, Mapping) else value

    def _halves(self, rows: Rows, wrap: Callable[[Rows], Any]) -> Rows:
        """The valid rows, found by bisection."""
        if not rows or self.error(wrap(rows)) == "":
            return rows
        if len(rows) == 1:
            rows = self._all(rows, wrap)
            return [] if self.error(wrap(rows)) else rows  # a single invalid row
        middle = len(rows) // 2
        return [*self._halves(rows[:middle], wrap), *self._halves(rows[middle:], wrap)]

    def _all(self, rows: Rows, wrap: Callable[[Rows], Any]) -> Rows:
        return [(key, self._loose(part)) for key, part in rows]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, Mapping | list) else 0
