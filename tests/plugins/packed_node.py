"""A node's operands as the op has them, and packed as the tactics see them. Imports no CUDA."""

from collections.abc import Sequence

import numpy as np

from spark_engine.dims import evaluated
from spark_engine.kernel import Target
from spark_engine.op import Attrs, Op
from spark_engine.plugins.launch import Node, node_of
from spark_engine.tensors import Array, DType, TensorSpec


def specs_of(op: Op, attrs: Attrs, arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    """The operands' specs as docs/graph.md has them."""
    names = op.names(attrs, len(arrays))
    pairs = zip(names, arrays, strict=True)
    return tuple(TensorSpec(n, DType.of(a.dtype), a.shape) for n, a in pairs)


def packed_specs(op: Op, attrs: Attrs, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The operands' specs as the tactics see them."""
    packs, pairs = op.cuda.packs, zip(op.names(attrs, len(specs)), specs, strict=True)
    return tuple(packs[name].infer(attrs, s) if name in packs else s for name, s in pairs)


def declared(op: Op, attrs: Attrs, **sizes: int) -> tuple[TensorSpec, ...]:
    """The operands' specs as an engine for a GPU has them; `sizes`: the declared dimensions."""
    shapes = [tuple(int(evaluated(f, sizes.get) or 0) for f in o.dims) for o in op.given(attrs)]
    pairs = zip(op.given(attrs), shapes, strict=True)
    return tuple(TensorSpec(o.name, o.dtypes[-1], shape) for o, shape in pairs)


def linear_node(op: Op, m: int, n: int, k: int, target: Target) -> Node:
    """A node of a linear op: y bf16 [m, n] over k."""
    attrs: Attrs = {"dtype": "bf16"}
    return node_of(op, attrs, declared(op, attrs, tokens=m, N=n, K=k), target)


def packed_arrays(op: Op, attrs: Attrs, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The operands as the tactics see them. Checks that a pack gives what it promises."""
    specs = specs_of(op, attrs, arrays)
    found = []
    for name, array, spec in zip(op.names(attrs, len(arrays)), arrays, specs, strict=True):
        if name in op.cuda.packs:
            want = op.cuda.packs[name].infer(attrs, spec)
            array = np.ascontiguousarray(op.cuda.packs[name].apply(attrs, array))
            assert (array.dtype, array.shape) == (want.dtype.numpy, want.dims), (
                f"{op.name}: pack {name} gives {array.dtype}{array.shape}, promised {want}"
            )
        found.append(array)
    return tuple(found)
