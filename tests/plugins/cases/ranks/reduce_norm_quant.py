"""The seeded cases of reduce_norm_quant."""

from dataclasses import replace

from spark_engine.op import Case
from spark_engine.plugins.ops.ranks.reduce_norm_quant import NORM
from tests.plugins.cases.norm import norm_quant


def _case(case: Case) -> Case:
    own = {name: case.attrs[name] for name in NORM}
    label = case.label.replace(" add1", "")
    return replace(case, label=label, attrs={"ranks": 1, **own})


CASES = tuple(_case(case) for case in norm_quant.CASES if case.attrs["add"])
