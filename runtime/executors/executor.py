"""The executor protocol: one compiled bucket that runs over named buffers.

Knows no implementation; the table of executors is in `runtime/engine/load.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spark_engine.errors import ExecutorError
from spark_engine.tensors import Array, TensorSpec

Wait = Callable[[], None]


@dataclass(frozen=True)
class Specs:
    """Tensors that one bucket reads and writes, with the names of docs/graph.md."""

    inputs: tuple[TensorSpec, ...]  # step inputs and tables, written by the host
    states: tuple[TensorSpec, ...]  # updated in place by `run`
    outputs: tuple[TensorSpec, ...]


class Executor(Protocol):
    """One loaded bucket of one engine. Not thread-safe: one thread uses it."""

    specs: Specs  # the buffers `run` expects

    def run(self, buffers: Mapping[str, Array]) -> None:
        """Runs one step over `buffers`, which holds every input, state and output by name.

        States and outputs are written in place. Memory that the call allocates does not outlive it.
        An executor with states on a device (`Loaded.device_states`) uses those if `buffers` holds
        none. Raises ExecutorError if a buffer is missing or misshapen.
        """

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Starts `run`. Returns a function that blocks until the outputs are readable.

        Launches of all buckets of an engine run in the order of the calls. A launch reads tables as
        they are at this call, or as last written to `Loaded.table_writer` if the engine has one
        (`run` always reads `buffers`). The executor owns the step inputs, the states of the step's
        slots and pages, and the outputs until the returned function has returned. A device may
        leave outputs of more than `device.buffers.WIDE` bytes a row unwritten; `run` writes them. A
        synchronous executor runs the step here and returns a function that does nothing.
        """

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """`launch` in two parts, so that `allow` and `sampling_i` can come later: it may start
        the part before `sample` now, and starts the rest when the returned function is called.

        No other launch may come between the two calls. An executor may run everything in the second
        call.
        """

    def close(self) -> None:
        """Frees the executor's resources. May be called twice."""


class SynchronousExecutor:
    """Base class of executors that run a launch in the caller's thread."""

    def run(self, buffers: Mapping[str, Array]) -> None:
        raise NotImplementedError

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Runs the step; the returned function does nothing."""
        self.run(buffers)
        return lambda: None

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """Starts everything in the second call."""
        return partial(self.launch, buffers)


def checked(spec: TensorSpec, array: Array | None) -> Array:
    """The named buffer. Raises ExecutorError if it is missing, misshapen or not C-contiguous."""
    if array is None or (array.dtype, array.shape) != (spec.dtype.numpy, spec.dims):
        found = "missing" if array is None else f"{array.dtype}{array.shape}"
        raise ExecutorError(f"buffer {spec.name} is {found}, expected {spec.dtype}{spec.dims}")
    if not array.flags.c_contiguous:
        raise ExecutorError(f"buffer {spec.name} is not contiguous")
    return array
