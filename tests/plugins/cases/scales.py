"""Scales of quantised activations."""

import numpy as np
from numpy.typing import NDArray

from spark_engine.plugins.common import random_arrays


def static_scales(rng: random_arrays.Rng, count: int) -> NDArray[np.float32]:
    """f32 [count]: static scales of activations, for `count` quantised copies."""
    return random_arrays.positive(rng, count, low=1e-3, high=3e-2)
