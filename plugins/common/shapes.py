"""Legal dtypes of activations and weights, and their attribute."""

from spark_engine.op import Attrs
from spark_engine.tensors import DType

ACTIVATIONS = (DType.F32, DType.BF16)
LEGAL = {"dtype": tuple(d.value for d in ACTIVATIONS)}  # `Op.legal`


def activation(attrs: Attrs) -> DType:
    """The attribute `dtype`."""
    return DType(str(attrs["dtype"]))
