"""Recipes: values, laziness (only its own sources are touched), and what cannot be joined."""

import ml_dtypes
import numpy as np
import pytest

from spark_engine.errors import GraphError
from spark_engine.models.weights import recipes as w
from spark_engine.tensors import Array, DType, TensorSpec


class Store:
    """A checkpoint that remembers what was read; other tensors may not be touched."""

    def __init__(self, **tensors: Array) -> None:
        self.tensors, self.seen = tensors, list[str]()

    def read(self, name: str) -> Array:
        self.seen.append(name)
        return self.tensors[name]

    def source(self, name: str) -> w.Recipe:
        return w.source(name, DType.of(self.tensors[name].dtype), self.tensors[name].shape)


RNG = np.random.default_rng(0)
STORE = Store(
    a=RNG.standard_normal((2, 3)).astype(np.float32),
    b=RNG.standard_normal((4, 3)).astype(np.float32),
    half=np.array([0.5, 1.5, -2], ml_dtypes.bfloat16),
    s=np.array([4.0], np.float32),
    conv=np.arange(8, dtype=np.float32).reshape(4, 1, 2),
)
A, B = STORE.source("a"), STORE.source("b")


def _value(recipe: w.Recipe) -> Array:
    value = recipe.evaluate(STORE)
    assert value.shape == recipe.shape and value.dtype == recipe.dtype.numpy
    return value


def test_values() -> None:
    a, b = STORE.tensors["a"], STORE.tensors["b"]
    half = STORE.source("half")
    assert _value(A) is a
    assert np.array_equal(_value(w.concat0([A, B])), np.concatenate([a, b]))
    assert np.array_equal(_value(w.stack([A, A])), np.stack([a, a]))
    mixed = w.concat0([half, STORE.source("s")])  # plain dtypes that differ are joined as f32
    assert mixed.dtype is DType.F32 and _value(mixed).tolist() == [0.5, 1.5, -2, 4]
    assert _value(w.one_plus(half)).tolist() == [1.5, 2.5, -1]
    assert _value(w.cast(half)).tolist() == [0.5, 1.5, -2] and w.cast(A) is A
    assert _value(w.repeat(w.reciprocal(STORE.source("s")), 3)).tolist() == [0.25] * 3
    assert _value(w.multiply(w.cast(half), w.constant(np.ones(3) * 2))).tolist() == [1, 3, -4]
    assert np.shares_memory(_value(w.reshape(STORE.source("conv"), (4, 2))), STORE.tensors["conv"])


def test_joins_nest() -> None:
    a, b = STORE.tensors["a"], STORE.tensors["b"]
    one = w.concat0([A, B])
    experts = w.append_expert(w.stack([one, one]), w.concat0([B, A]))
    want = np.stack([np.concatenate(p) for p in ([a, b], [a, b], [b, a])])
    assert np.array_equal(_value(experts), want)
    scales = w.append_expert(
        w.stack([w.repeat(w.constant(np.array(2.0)), 2)] * 2), w.constant([3, 4])
    )
    assert _value(scales).tolist() == [[2, 2], [2, 2], [3, 4]]
    assert _value(w.append_expert(w.constant([1.0]), w.constant(np.array(5.0)))).tolist() == [1, 5]


def test_only_its_own_sources_are_read() -> None:
    store = Store(a=STORE.tensors["a"], b=STORE.tensors["b"], poison=np.zeros(0))
    recipe = w.concat0([store.source("a"), store.source("b"), store.source("a")])
    assert list(recipe.sources()) == ["a", "b", "a"]
    recipe.evaluate(store)
    assert store.seen == ["a", "b", "a"]


def test_weight_takes_its_spec_from_the_recipe() -> None:
    weight = w.weight("x", w.concat0([A, B]))
    assert weight.spec == TensorSpec("x", DType.F32, (6, 3))
    assert weight.evaluate(STORE).shape == (6, 3)


def test_equal_recipes_are_equal_and_hashable() -> None:
    assert w.concat0([A, B]) == w.concat0([STORE.source("a"), STORE.source("b")])
    assert len({w.one_plus(A), w.one_plus(A), w.one_plus(B)}) == 2


@pytest.mark.parametrize(
    "join",
    [
        lambda: w.concat0([A, STORE.source("half")]),
        lambda: w.concat0([w.constant([1], DType.U8), w.constant([1.0])]),
        lambda: w.stack([A, B]),
        lambda: w.append_expert(w.stack([A, A]), B),
        lambda: w.append_expert(w.stack([A]), w.Recipe("source", DType.U8, (2, 3), source="a")),
        lambda: w.reshape(A, (4, 2)),
        lambda: w.reshape(A, (2, 2)),
        lambda: w.repeat(A, 2),
        lambda: w.multiply(A, B),
    ],
)
def test_what_does_not_fit_is_refused(join: object) -> None:
    assert callable(join)
    with pytest.raises(GraphError):
        join()


def test_a_file_that_gives_another_shape_is_caught() -> None:
    with pytest.raises(GraphError, match="recipe source gave"):
        w.source("a", DType.F32, (3, 2)).evaluate(STORE)


def test_a_file_that_gives_another_dtype_is_caught() -> None:
    with pytest.raises(GraphError, match="recipe source gave bfloat16"):
        w.source("half", DType.F16, (3,)).evaluate(STORE)
