"""Every packing of int4 gives the stored values exactly: any group, whole, sliced or shared."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.layout import Layout
from spark_engine.models.checkpoint.quant_schemes import INT4, Dialect
from spark_engine.models.checkpoint.quant_table import QuantTable
from spark_engine.models.checkpoint.tensor_list import Slice, by_columns, by_rows
from spark_engine.models.open_model import describe
from spark_engine.models.weights.operands import projection
from spark_engine.models.weights.shards import Shards, of_rank
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.formats import int4
from spark_engine.tensors import Array, DType, TensorSpec
from tests import quantisers
from tests.checkpoints import text_config

PACKINGS = {
    "gptq": Dialect.GPTQ,
    "gptq_v2": Dialect.GPTQ_V2,
    "awq": Dialect.AWQ,
    "ct": Dialect.COMPRESSED,
    "ct_sym": Dialect.COMPRESSED,
}
N, K = 40, 256


class Tensors(dict[str, Array]):
    def read(self, name: str) -> Array:
        return self[name]


def stored(packing: str, group: int, **changes: Array) -> tuple[Model, Tensors, Array]:
    """A model of one matrix `m`, its tensors, and its values."""
    w = np.random.default_rng(group).standard_normal((N, K)).astype(np.float32)
    rows, values = quantisers.int4_tensors(w, packing, group)
    rows |= changes
    tensors = Tensors({f"m.{suffix}": array for suffix, array in rows.items()})
    table = QuantTable(MappingProxyType({}), PACKINGS[packing], False)
    specs = {n: TensorSpec(n, DType.of(a.dtype), a.shape) for n, a in tensors.items()}
    model = replace(
        describe(text_config(False)), table=table, tensors=specs, layout=Layout("", False)
    )
    return model, tensors, values


def values_of(model: Model, tensors: Tensors, packing: str, group: int, rank: int = 0) -> Array:
    found = projection(model, "m", INT4[group, packing == "ct_sym"])
    parts = [found.weight, *found.scales.values()]
    read = [of_rank(part, rank).evaluate(tensors) for part in parts]
    names = [operand.name for operand in int4.FORMAT.stored]
    made = dict(zip(names, read, strict=True))
    return int4.FORMAT.decode(made) * made["w_scale2"].astype(np.float64)[:, None]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("packing", PACKINGS)
def test_values_are_exact(packing: str, group: int) -> None:
    model, tensors, values = stored(packing, group)
    np.testing.assert_array_equal(values_of(model, tensors, packing, group), values)


@pytest.mark.parametrize("packing", PACKINGS)
def test_slices_and_shares_of_ranks_are_parts(packing: str) -> None:
    model, tensors, values = stored(packing, 64)
    ranges = ((8, 16), (0, 4))
    sliced = replace(model, layout=Layout("", False, slices={"m": Slice("m", N, ranges)}))
    wanted = np.concatenate([values[8:16], values[:4]])
    np.testing.assert_array_equal(values_of(sliced, tensors, packing, 64), wanted)
    for split, axis in ((by_columns(8, K // 8), 1), (by_rows((2, 10), (2, 10)), 0)):
        shared = replace(model, shards=Shards(2, splits={"m": split}))
        parts = np.split(values, 2 if axis else 4, axis=axis)
        for rank in (0, 1):
            mine = parts[rank] if axis else np.concatenate(parts[rank::2])
            found = values_of(shared, tensors, packing, 64, rank)
            np.testing.assert_array_equal(found, mine)


def test_a_scale_that_is_not_finite_is_named() -> None:
    model, tensors, _ = stored("awq", 32)
    tensors["m.scales"][3, 5] = np.inf
    with pytest.raises(CheckpointError, match=r"m.scales\[3, 5\] is inf: the scale of a group"):
        values_of(model, tensors, "awq", 32)
