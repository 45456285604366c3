"""What an op's operands say of themselves, by hand for ops where a name would mislead."""

import pytest

from spark_engine.plugins import registry


@pytest.mark.parametrize(
    ("op", "constant"),
    [
        ("nvfp4_linear_a4", {"w", "w_scale", "alpha"}),  # x_scale comes with the activations
        ("fp8_block_linear", {"w", "w_scale"}),
        ("fp8_linear", {"w", "w_scale", "x_scale"}),  # static: of the checkpoint
        ("norm_quant", {"weight", "scales"}),
    ],
)
def test_what_is_the_same_in_every_launch(op: str, constant: set[str]) -> None:
    operands = registry.get(op).operands
    found = {o.name for o in operands if o.constant}
    assert found == constant, [o.name for o in operands]
