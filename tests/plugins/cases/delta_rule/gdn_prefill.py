"""The seeded cases of a prefill's convolution and delta rule in one. Knows their operands, not
their maths."""

from dataclasses import dataclass

import numpy as np

from spark_engine.op import Attrs, Case
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.ops.delta_rule import causal_conv
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases

EXTRA = 8  # unused columns behind v


@dataclass(frozen=True)
class Launch:
    """Row lists, head sizes and the taps of the convolution."""

    delta: gated_delta_cases.Launch
    taps: int = 4

    @property
    def attrs(self) -> Attrs:
        return self.delta.attrs

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        d = self.delta
        c, ba, *rest = d.inputs(rng)
        channels, columns = c.shape[1], causal_conv.conv_rows(self.taps, d.drafts)
        qkvz = np.concatenate([c, np.full((len(c), EXTRA), np.nan, c.dtype)], axis=1)
        weight = random_arrays.normal(rng, channels, self.taps, scale=0.4)
        state = rng.standard_normal((d.units + 1, columns, channels))
        state[-1] = np.nan
        state[d.tiles.unread] = np.nan
        return (qkvz, ba, weight, state.astype(d.dtype.numpy), *rest)


def case_of(of: Case, taps: int = 4) -> Case:
    """The launch of a case of the delta rule, from a projection."""
    launch = Launch(of.inputs.__self__, taps)  # type: ignore[attr-defined]
    d = launch.delta
    assert isinstance(d, gated_delta_cases.Launch)
    exact = d.dtype is DType.F32 and d.state is DType.F32
    rtol, atol = (2e-5, 5e-6) if exact else (1e-2, 1e-2)
    label = f"{of.label}, {taps} taps" if taps != 4 else of.label
    return Case(label, launch.attrs, launch.inputs, rtol, atol, of.bench, d.ignore)


OF = {case.label: case for case in gated_delta_cases.CHUNK}
CASES = (
    *map(case_of, (c for label, c in OF.items() if "full" not in label)),
    case_of(OF["begins elsewhere and saves, tiles"], 2),
    case_of(OF["begins elsewhere and saves, 3 drafts, bf16"], 3),
)
