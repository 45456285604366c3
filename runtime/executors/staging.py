"""Pinned copies of the host buffers of one bucket on a device.

Knows step inputs and outputs; knows no launch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_engine.device.buffers import Buffers
from spark_engine.device.gpu import Event
from spark_engine.device.resources import DeviceResources
from spark_engine.runtime.executors.executor import Specs, checked
from spark_engine.tensors import Array, Bytes

MAX_STAGED = 4  # sets of host buffers that a bucket remembers; an engine has one or two


@dataclass(frozen=True)
class Staging:
    """Pinned copies of one set of host buffers; `done`: their last launch has ended."""

    buffers: Mapping[str, Array]
    steps: Bytes
    outputs: Bytes
    done: Event
    fed: tuple[tuple[str, Array], ...]  # views of `steps`
    read: tuple[tuple[str, Array], ...]  # views of `outputs`


class StagedBuffers:
    """The copies of the last MAX_STAGED sets of host buffers; `resources` frees them."""

    def __init__(self, resources: DeviceResources, specs: Specs, buffers: Buffers) -> None:
        self._resources, self._specs, self._buffers = resources, specs, buffers
        self._staged: list[Staging] = []

    def find(self, buffers: Mapping[str, Array]) -> Staging:
        """The copies of this set, made at its first use. Raises ExecutorError for a buffer that is
        missing or misshapen."""
        for known in self._staged:
            if known.buffers is buffers:
                return known
        for spec in (*self._specs.inputs, *self._specs.outputs):
            checked(spec, buffers.get(spec.name))
        if len(self._staged) == MAX_STAGED:
            oldest = self._staged.pop(0)
            self._resources.gpu.wait_for(oldest.done)
            steps, outputs, done = oldest.steps, oldest.outputs, oldest.done
        else:
            steps = self._resources.pinned(self._buffers.steps.nbytes)
            outputs = self._resources.pinned(self._buffers.outputs.nbytes)
            done = self._resources.event()
        fed = tuple((f.spec.name, f.view(steps)) for f in self._buffers.steps.fields)
        read = tuple((f.spec.name, f.view(outputs)) for f in self._buffers.outputs.fields)
        made = Staging(buffers, steps, outputs, done, fed, read)
        self._staged.append(made)
        return made
