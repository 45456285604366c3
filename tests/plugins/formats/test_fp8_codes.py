"""FP8 codes: every value, every tie, and values out of range."""

import ml_dtypes
import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import fp8_codes
from tests.plugins.run_op import run_nodes


def test_every_fp8_code_survives_decode_and_encode() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.isfinite(values)
    grid = np.sort(values[finite])
    middles = (grid[1:] + grid[:-1]) / 2  # ties
    around = [np.nextafter(middles, np.float32(s)) for s in (-1e9, 1e9)]
    wild = np.float32([500, -1e30, 464, 465, 1e-9, -1e-9, 2.0**-10, -(2.0**-10)])
    noise = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 40
    x = np.concatenate([grid, middles, *around, wild, noise]).astype(np.float32)

    def build(f: Text) -> None:
        f("Identity", fp8_codes.encode(f, "x"), out="encoded")
        f("Identity", fp8_codes.decode(f, "codes", [256]), out="decoded")

    like = {"encoded": np.zeros(len(x), np.uint8), "decoded": values}
    encoded, decoded = run_nodes(build, {"x": x, "codes": codes}, like)
    np.testing.assert_array_equal(decoded[finite], values[finite])
    assert np.isfinite(decoded).all()
    rounded = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(
        encoded.view(ml_dtypes.float8_e4m3fn).astype(np.float32), rounded.astype(np.float32)
    )
    np.testing.assert_array_equal(encoded[x != 0], rounded.view(np.uint8)[x != 0])
    np.testing.assert_array_equal(encoded, fp8_codes.encode_array(x))
