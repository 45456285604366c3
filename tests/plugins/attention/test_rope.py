"""The functions that bodies compute without onnxruntime's own: exact to f32."""

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.ops.attention import rope
from spark_engine.plugins.ops.delta_rule.gated_delta_nodes import softplus
from tests.plugins.run_op import run_nodes


def test_cosine_sine_and_softplus_are_exact_to_f32() -> None:
    at = np.asarray([0, 1, 2, 3, 5, 63, 64, 1000, 4095, 65537, 262143])[:, None]
    inv_freq = (1e7 ** (-np.arange(32) / 32)).astype(np.float32)
    x = np.linspace(-60, 60, 1001).astype(np.float32)

    def build(f: Text) -> None:
        cos, sin = rope.cos_sin(f, "at", "inv_freq")
        for name, value in (("cos", cos), ("sin", sin), ("soft", softplus(f, "x"))):
            f("Identity", value, out=name)

    angle = at.astype(np.float32) * inv_freq
    like = {"cos": angle, "sin": angle, "soft": x}
    cos, sin, soft = run_nodes(build, {"at": at, "inv_freq": inv_freq, "x": x}, like)
    np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(soft, np.logaddexp(0, x.astype(np.float64)), rtol=5e-7)
