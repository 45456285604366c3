"""Quantisers and decode tables in literals: ties, saturation, zeros, the sign of what rounds to
zero, subnormal scales. Each is asked of the reference and of the body."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from spark_engine.plugins import registry
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import format_fragments, fp8_codes, numpy_codecs
from spark_engine.tensors import Array
from tests.oracles.attention_truth import e4m3_value
from tests.plugins import one_node
from tests.plugins.run_op import run_nodes

Ask = Callable[..., list[Array]]
TINY = 2.0**-9  # the smallest e4m3


def reference(op: str, *values: object) -> list[Array]:
    return list(registry.get(op).reference({}, tuple(np.asarray(v, np.float32) for v in values)))


def body(op: str, *values: object) -> list[Array]:
    arrays = tuple(np.asarray(v, np.float32) for v in values)
    return list(one_node.run_op(registry.get(op), {}, arrays))


BOTH = pytest.mark.parametrize("ask", [reference, body])


def codes_of(packed: Array) -> list[int]:
    """The nibbles of one row, low first."""
    return [code for byte in packed[0].tolist() for code in (byte & 15, byte >> 4)]


def bits(array: Array) -> list[int]:
    return [int(b) for b in array.view(np.uint8).ravel()]


# ---- NVFP4 -----------------------------------------------------------------------------------

TIES = {
    **{0.0: 0, 0.25: 0, 0.26: 1, 0.75: 2, 0.74: 1, 1.25: 2, 1.26: 3, 1.75: 4, 1.74: 3},
    **{2.5: 4, 2.6: 5, 3.5: 6, 3.4: 5, 5.0: 6, 5.1: 7, 6.0: 7},
}


@BOTH
@pytest.mark.parametrize("sign", [1, -1])
def test_nvfp4_codes_at_ties(sign: int, ask: Ask) -> None:
    """6 is the largest, so that the block's scale is 1; a negative zero's code is 0, that of a
    negative value which rounds to zero 8."""
    x = [[sign * v for v in TIES]]
    packed, scale = ask("nvfp4_quant", x, 1.0)
    assert scale.astype(np.float32).tolist() == [[1]]
    want = [c + 8 * (sign < 0 and v != 0) for v, c in TIES.items()]
    assert codes_of(packed) == want


@BOTH
def test_nvfp4_scales_round_saturate_and_vanish(ask: Ask) -> None:
    """Per block of 16, of which one element is not zero: amax / 6 as e4m3."""
    amax = {
        6 * 448.0: 0x7E,
        6 * 1e6: 0x7E,  # beyond 448
        6.0: 0x38,
        6 * 1.0625: 0x38,  # between 1 and 1.125: to the even code
        6 * 1.1875: 0x3A,  # between 1.125 and 1.25: to the even code
        6 * TINY: 0x01,
        6 * 1.5 * TINY: 0x02,  # a tie of subnormals
        6 * 0.5 * TINY: 0x00,  # a tie with zero
        0.0: 0x00,
    }
    x = np.zeros((1, 16 * len(amax)))
    x[0, ::16] = list(amax)
    packed, scale = ask("nvfp4_quant", x, 1.0)
    assert bits(scale) == list(amax.values())
    # 6 · 1.1875 / 1.25 = 5.7, 6 · 1.5 / 2 = 4.5; all else is at its end or gone
    assert codes_of(packed)[::16] == [7, 7, 7, 7, 7, 7, 6, 0, 0]


@BOTH
def test_nvfp4_block_without_a_scale_is_zero_without_a_sign(ask: Ask) -> None:
    packed, scale = ask("nvfp4_quant", [[-1e-3 * TINY] * 16], 1.0)
    assert bits(scale) == [0] and codes_of(packed) == [0] * 16


@BOTH
def test_nvfp4_input_scale_divides(ask: Ask) -> None:
    packed, scale = ask("nvfp4_quant", [[3.0, -1.5] + [0.0] * 14], 0.25)
    assert scale.astype(np.float32).tolist() == [[2]]  # 3 / 6 / 0.25
    assert codes_of(packed)[:2] == [7, 8 + 5]  # 12 / 2 = 6, −6 / 2 = −3


@BOTH
def test_nvfp4_of_a_small_block_next_to_a_large_one(ask: Ask) -> None:
    """Each block has its own scale, and the even element the low nibble."""
    x = [[6.0, 0.5] + [0.0] * 14 + [-0.75, 0.125] + [0.0] * 14]
    packed, scale = ask("nvfp4_quant", x, 1.0)
    assert scale.astype(np.float32).tolist() == [[1, 0.125]]
    assert packed[0, [0, 8]].tolist() == [0x17, 0x2F]


def test_e2m1_decodes_to_its_values() -> None:
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    found = numpy_codecs.e2m1_decode(np.arange(16, dtype=np.uint8))
    assert found.tolist() == want and np.signbit(found).tolist() == [False] * 8 + [True] * 8
    other = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(found, other)
    assert format_fragments.NIBBLES[0x2F].tolist() == [-6, 1]
    assert format_fragments.NIBBLES[0xF2].tolist() == [1, -6]
    assert numpy_codecs.unpack(np.asarray([[0x2F]], np.uint8)).tolist() == [[15, 2]]


def test_nvfp4_weights_scale_by_rule() -> None:
    """Global amax / 2688; a block's amax / (6 · global), at least 2⁻⁹, 1 for a block of zeros."""
    w = np.zeros((1, 48), np.float32)
    w[0, 0], w[0, 16] = 2688, -6e-6
    packed, scale, scale2 = numpy_codecs.nvfp4_weight(w)
    assert scale2 == 1 and bits(scale) == [0x7E, 0x01, 0x38]
    assert codes_of(packed)[::16] == [7, 8, 0]
    decoded = numpy_codecs.nvfp4_decode(packed, scale)
    assert decoded[0, 0] == 2688 and decoded[0, 16] == 0


# ---- FP8 -------------------------------------------------------------------------------------

E4M3 = {
    **{1.0: 0x38, 1.0625: 0x38, 1.1875: 0x3A, -1.0625: 0xB8, 448.0: 0x7E, 464.0: 0x7E, 1e9: 0x7E},
    **{-1e9: 0xFE, TINY: 0x01, TINY / 2: 0x00, 1.5 * TINY: 0x02, 0.015625: 0x08, 0.0: 0x00},
    **{7.5 * TINY: 0x08, 6.5 * TINY: 0x06},  # at the edge of the normal numbers
}


@BOTH
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fp8_codes(scale: float, ask: Ask) -> None:
    (codes,) = ask("fp8_quant", [[v * scale for v in E4M3]], scale)
    assert bits(codes) == list(E4M3.values())


@BOTH
def test_fp8_blocks_have_their_own_scales(ask: Ask) -> None:
    """A row of three blocks, the last of two columns: amax / 448 each, 1 where it is 0."""
    x = np.zeros((2, 258))
    x[0, [0, 1, 127]], x[0, 257], x[1, 128] = (896, -896, 2.125), -56, 448
    codes, scale = ask("fp8_block_quant", x)
    assert scale.tolist() == [[2, 1, 0.125], [1, 1, 1]]
    assert bits(codes[0, [0, 1, 127, 257]]) == [0x7E, 0xFE, 0x38, 0xFE]  # 1.0625 is a tie
    assert bits(codes[1, [0, 128]]) == [0, 0x7E]


def test_every_e4m3_code_decodes_by_its_bits() -> None:
    codes = np.arange(256, dtype=np.uint8)
    by_bits = np.asarray([e4m3_value(c) for c in range(256)])
    legal = np.flatnonzero(codes & 0x7F != 0x7F)
    np.testing.assert_array_equal(fp8_codes.decode_array(codes)[legal], by_bits[legal])
    other = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(by_bits[legal], other[legal])

    def build(f: Text) -> None:
        f("Identity", fp8_codes.decode(f, "codes", [256]), out="values")

    (values,) = run_nodes(build, {"codes": codes}, {"values": np.zeros(256, np.float32)})
    np.testing.assert_array_equal(values[legal], by_bits[legal])
    assert [e4m3_value(c) for c in (0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xB8)] == [
        *(0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -1)
    ]
