"""What an executor is: one compiled bucket that can be run over named buffers.

Knows no executor; the table that names them is in `runtime/engine/load.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spark_engine.errors import ExecutorError
from spark_engine.tensors import Array, TensorSpec

Wait = Callable[[], None]


@dataclass(frozen=True)
class Specs:
    """What one engine reads and writes; the names are those of docs/graph.md."""

    inputs: tuple[TensorSpec, ...]  # steps and tables, host-written
    states: tuple[TensorSpec, ...]  # updated in place by run
    outputs: tuple[TensorSpec, ...]


class Executor(Protocol):
    """One bucket of one engine, loaded. Not thread-safe: one thread owns it."""

    @property
    def specs(self) -> Specs:
        """The buffers `run` expects."""
        ...

    def run(self, buffers: Mapping[str, Array]) -> None:
        """Runs one step over `buffers`, which holds every input, state and output by name.

        States are updated in place, outputs are written in place; nothing is allocated that
        outlives the call. With `Loaded.device_states` an executor uses those when
        `buffers` holds none. Raises ExecutorError when a buffer is missing or misshapen.
        """
        ...

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Starts `run` and returns what blocks until its outputs can be read.

        Launches run in the order of their start, over all buckets of an engine. Tables are
        read as they are at this call, or as last written to `Loaded.table_writer` where an engine
        has one (`run` reads `buffers` in any case). Steps, states that the step names by
        slot or page, and outputs belong to the executor until the wait returned. A device may
        leave outputs of more than `device_buffers.WIDE` bytes a row unwritten, which `run`
        writes. A synchronous executor does everything here and returns a function that does
        nothing.
        """
        ...

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """As `launch`, but `allow` and `sampling_i` need not be there yet: what comes before
        `sample` may be started, the rest is when what this returns is called.

        Nothing else is launched in between. An executor may leave all of it to that call.
        """
        ...

    def close(self) -> None:
        """Frees what the executor holds. May be called twice."""
        ...


class SynchronousExecutor:
    """An executor that starts nothing early, such as one whose launches run at once."""

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """See `Executor`."""
        raise NotImplementedError

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """Leaves all of it to the second call."""
        return partial(self.launch, buffers)


def checked(spec: TensorSpec, array: Array | None) -> Array:
    """The buffer. Raises ExecutorError unless it is there, as specified, and C-contiguous."""
    if array is None or (array.dtype, array.shape) != (spec.dtype.numpy, spec.dims):
        found = "missing" if array is None else f"{array.dtype}{array.shape}"
        raise ExecutorError(f"buffer {spec.name} is {found}, wanted {spec.dtype}{spec.dims}")
    if not array.flags.c_contiguous:
        raise ExecutorError(f"buffer {spec.name} is not contiguous")
    return array
