"""Writes a function in ONNX's textual syntax, node by node, with generated names.

A body reads like its formula: `f("Mul", f("Exp", g), s)`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from spark_engine.op import DOMAIN, Attrs, Body
from spark_engine.tensors import Array, DType, TensorSpec

OPSET = 23
DOUBLE = 11  # onnx.TensorProto.DOUBLE: only for values within bodies
LOOP_TYPES = ("int64", "bool")  # iteration and condition, scalars
Operand = str | int | float | Sequence[int] | Array | np.generic


class Graph:
    """A graph attribute (of Loop, Scan, If) in textual syntax."""

    def __init__(self, text: str) -> None:
        self.text = text


class Text:
    """Nodes of one function or nested graph; nested graphs see the outer names.

    Operands: a name; an int (int64 scalar); a float (f32 scalar); a sequence of ints (int64
    vector, as axes and shapes are); a numpy array or scalar (a constant of its dtype). Equal
    constants are one: of the nodes that onnxruntime reads, they would be two in five.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = numbers if numbers is not None else count()
        self._constants: dict[str, str] = {}  # names by value
        self._lines: list[str] = []

    def __call__(self, op: str, *operands: Operand, out: str = "", **attrs: object) -> str:
        """Appends a node with one output, named `out` when given; returns the output's name."""
        name = out or self.fresh()
        self._append((name,), op, operands, attrs)
        return name

    def many(self, outputs: int, op: str, *operands: Operand, **attrs: object) -> tuple[str, ...]:
        """Appends a node with several outputs and returns their names."""
        names = tuple(self.fresh() for _ in range(outputs))
        self._append(names, op, operands, attrs)
        return names

    def cast(self, value: Operand, dtype: DType, out: str = "") -> str:
        """`value` converted to `dtype`."""
        return self("Cast", value, out=out, to=dtype.onnx)

    def double(self, value: Operand) -> str:
        """`value` as float64."""
        return self("Cast", value, to=DOUBLE)

    def long(self, value: Operand) -> str:
        """`value` as int64."""
        return self.cast(value, DType.I64)

    def length(self, value: str) -> str:
        """int64 [1]: the first dimension. Bodies ask for it where a launch's rows count: they are
        the same for every bucket of a family."""
        return self("Shape", value, start=0, end=1)

    def indices(self, value: str) -> str:
        """int64 [n]: 0, 1, 2, … along the first dimension."""
        return self("Range", 0, self("Squeeze", self.length(value), [0]), 1)

    def graph(
        self, inputs: int, build: Callable[..., Sequence[str]], types: Sequence[str] = ()
    ) -> Graph:
        """A nested graph: `build(text, *input names)` appends its nodes and returns its outputs.

        An output must be the result of a node inside (an outer name or an input needs an Identity).
        `types`: of the first inputs; a Loop needs LOOP_TYPES, other types are inferred.
        """
        inner = Text(self._numbers)
        names = [self.fresh() for _ in range(inputs)]
        outputs = build(inner, *names)
        typed = [f"{t} {n}" for t, n in zip(types, names, strict=False)] + names[len(types) :]
        head = f"{self.fresh()} ({', '.join(typed)}) => ({', '.join(outputs)})"
        return Graph(head + " {\n" + "\n".join(inner._lines) + "\n}")

    def function(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
        """The whole function's text. `inputs` and `outputs` are names used by the nodes."""
        head = f'<opset_import: ["" : {OPSET}], domain: "{DOMAIN}">'
        lines = "\n".join(self._lines)
        return f"{head}\n{name} ({', '.join(inputs)}) => ({', '.join(outputs)})\n{{\n{lines}\n}}\n"

    def fresh(self) -> str:
        """A name that is unique in this function."""
        return f"t{next(self._numbers)}"

    def _append(
        self,
        names: Sequence[str],
        op: str,
        operands: Sequence[Operand],
        attrs: Mapping[str, object],
    ) -> None:
        inputs = ", ".join(self._name(x) for x in operands)
        pairs = ", ".join(f"{k} = {_attribute(v)}" for k, v in attrs.items())
        middle = f" <{pairs}>" if pairs else ""
        self._lines.append(f"  {', '.join(names)} = {op}{middle} ({inputs})")

    def _name(self, operand: Operand) -> str:
        if isinstance(operand, str):
            return operand
        value = _tensor(_array(operand))
        if value not in self._constants:
            self._constants[value] = self.fresh()
            self._lines.append(f"  {self._constants[value]} = Constant <value = {value}> ()")
        return self._constants[value]


def _array(value: int | float | Sequence[int] | Array | np.generic) -> Array:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    return np.asarray(value, np.float32 if isinstance(value, float) else np.int64)


def _tensor(array: Array) -> str:
    dims = f"[{','.join(map(str, array.shape))}]" if array.ndim else ""
    values = ", ".join(map(repr, _numbers_of(array.reshape(-1))))
    wide = array.dtype == np.float64
    return f"{'double' if wide else DType.of(array.dtype).onnx_text}{dims} {{{values}}}"


def _numbers_of(flat: Array) -> list[int] | list[float]:
    if flat.dtype.kind in "biu":
        found: list[int] = flat.astype(np.int64).tolist()
        return found
    values = flat.astype(np.float64)
    if not np.isfinite(values).all():
        worst = values[~np.isfinite(values)][0]
        raise ValueError(f"{worst} has no literal in ONNX's textual syntax")
    numbers: list[float] = values.tolist()
    return numbers


def _attribute(value: object) -> str:
    if isinstance(value, Graph):
        return value.text
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_attribute, value))}]"
    if isinstance(value, (bool, int, float)):
        return repr(int(value) if isinstance(value, bool) else value)
    raise TypeError(f"attribute {value!r} has no textual syntax here")


def identity(op: str) -> Body:
    """The body of `op` where one rank has all: y = x."""
    f = Text()
    f("Identity", "x", out="y")
    text = f.function(op, ("x",), ("y",))

    def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
        """y = x."""
        return text

    return body
