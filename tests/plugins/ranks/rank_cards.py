"""Ranks in one process, for measurement and tests: what an op gives each of them.

Knows `RankGpus`, which has their streams and regions; knows no engine.
"""

from collections.abc import Sequence

import numpy as np

from spark_engine.builder.native.rank_gpus import Queue, RankGpus
from spark_engine.device.cuda_driver import driver, value
from spark_engine.kernel import Plan, Tactic
from spark_engine.op import Attrs, Op
from spark_engine.tensors import Array, DType, TensorSpec


class RankCards(RankGpus):
    """`devices`: the GPU of each rank. `symmetric`: bytes of each rank's region."""

    def get(self, rank: int, address: int, spec: TensorSpec) -> Array:
        """A copy of the array there, when everything queued is done."""
        self.wait(rank)
        array = np.empty(spec.dims, spec.dtype.numpy)
        value(driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def queue(self, rank: int, tactic: Tactic, plan: Plan, x: int, y: int) -> list[Queue]:
        """What puts the plan's launches, over one input and one output, on the rank's stream."""
        return self.queue_all(rank, tactic, plan, {"input": [x], "output": [y]})

    def together(self, op: Op, attrs: Attrs, parts: Sequence[Array]) -> list[Array]:
        """What each rank has of the op over its own part, by the op's first tactic."""
        operands = [(part,) for part in parts]
        return [y for (y,) in self.run(op, attrs, op.cuda.tactics[0], operands)]

    def run(
        self, op: Op, attrs: Attrs, tactic: Tactic, operands: Sequence[Sequence[Array]]
    ) -> list[list[Array]]:
        """What each rank has of a node over its own operands; outputs are NaN before."""
        specs = specs_of(op, attrs, operands[0])
        outs = op.infer(attrs, specs)
        assert tactic.refuse(attrs, specs, self.target) is None
        plan = tactic.plan(attrs, specs, self.target)
        with self.placed(tactic, plan, operands, [s.nbytes for s in outs]) as (places, queues):
            for rank, launches in enumerate(queues):
                self.use(rank)
                for launch in launches:
                    launch()
            return [
                [self.get(r, at, spec) for at, spec in zip(made["output"], outs, strict=True)]
                for r, made in enumerate(places)
            ]


def specs_of(op: Op, attrs: Attrs, arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    pairs = zip(op.names(attrs, len(arrays)), arrays, strict=True)
    return tuple(TensorSpec(name, DType.of(a.dtype), a.shape) for name, a in pairs)
