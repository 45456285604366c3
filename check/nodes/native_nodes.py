"""Runs every node of a native bucket alone: its launches on the GPU over recorded operands.

The twin of the engine (the same graph, `open_engines.build_twin`) gives the tensors that a node
reads and writes; the payload's `places` give their memory. The weights are the engine's, packed.
Knows places and copies; knows no op and judges nothing.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.check.engines.reference import POISON
from spark_engine.check.nodes.compare_node import Recorded, StateValue
from spark_engine.errors import EngineError, InternalError, OptionError
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.program import MemoryOperand, Program

Queue = Callable[[], None]


class NativeNodes:
    """Runs single nodes of one open bucket; `weights`: the names of operands that are no
    activations.

    Overwrites the engine's states, tables and step inputs with those that the node read.
    """

    def __init__(self, executor: Executor, payload: bytes, weights: Collection[str]) -> None:
        # Not by its class, since its module needs the extra `cuda`.
        opened: Any = executor
        self._executor, self._gpu = opened, opened.gpu
        self._program = Program.read(payload)
        self._weights = weights
        specs = executor.specs
        self._own = {s.name: MemoryOperand("input", s.name) for s in specs.inputs}
        self._own |= {s.name: MemoryOperand("output", s.name) for s in specs.outputs}
        self._queues: dict[str, list[Queue]] = {}
        for node, launches in groupby(opened.launches(payload), lambda x: x.node):
            if node in self._queues:
                raise InternalError(f"the launches of node {node} do not follow one another")
            self._queues[node] = [launch.queue for launch in launches]

    def run(self, recorded: Recorded) -> tuple[NDArray[Any], ...]:
        """The node's outputs for the recorded operands and the engine's weights.

        Raises OptionError if the engine has no such node, ExecutorError if the GPU fails.
        """
        step = recorded.step
        if step.name not in self._queues:
            raise OptionError(
                f"the engine has no node {step.name}: it was built by another version, so its "
                "nodes cannot be checked one by one; rebuild it, or use --level layer"
            )
        made = [np.empty(a.shape, a.dtype) for a in recorded.results]
        outputs = list(zip(step.outputs, made, strict=True))
        operands = zip(step.inputs, recorded.operands, strict=True)
        given = [(n, np.ascontiguousarray(a)) for n, a in operands if n not in self._weights]
        copies = [copy for n, a in given for copy in self._copies(n, a, recorded.states)]
        # Poison first: an output that is updated in place is an operand too.
        for name, array in outputs:
            held = recorded.states.get(name)
            units = len(array) if held is None else held.count
            nbytes = array.itemsize * math.prod((units, *array.shape[1:]))
            self._gpu.fill(self._address(name, array, held), POISON, nbytes)
        for address, array in copies:
            self._gpu.upload(address, array)
        self._gpu.wait()
        for queue in self._queues[step.name]:
            queue()
        for name, array in outputs:
            for address, part in self._copies(name, array, recorded.states):
                self._gpu.download(part, address)
        self._gpu.wait()
        return tuple(made)

    def _copies(
        self, name: str, array: NDArray[Any], states: Mapping[str, StateValue]
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """(address, part) of the tensor: whole, or the units of a state one by one."""
        held = states.get(name)
        address = self._address(name, array, held)
        if held is None:
            yield address, array
            return
        for i, unit in enumerate(held.index.tolist()):
            part = array[i : i + 1]
            yield address + unit * part.nbytes, part

    def _address(self, name: str, array: NDArray[Any], held: StateValue | None = None) -> int:
        """The memory of the whole tensor, or of its state."""
        if held is not None:
            return int(self._executor.address(MemoryOperand("state", held.name)))
        place = self._program.places.get(name) or self._own.get(name)
        if place is None:
            raise OptionError(
                f"the engine does not say where {name} is stored: it was built by another "
                "version; rebuild it, or use --level layer"
            )
        if place.kind == "arena" and place.nbytes < array.nbytes:
            raise EngineError(
                f"{name} needs {array.nbytes} bytes, and its place in the engine has "
                f"{place.nbytes}: rebuild the engine with spark-build"
            )
        return int(self._executor.address(place))
