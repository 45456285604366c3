"""The `trt` executor: TensorRT-RTX's engine of a bucket, and onnxruntime for the nodes after it.

Knows both libraries and the device's copies; knows no op. All buffers and states are host arrays: a
run copies the engine's inputs to the device and its outputs back. This is slow for large states;
the executor exists to verify our kernels.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from spark_engine.device.trt_library import library, logger, out_of_memory, says
from spark_engine.device.trt_payload import TrtPayload
from spark_engine.engine_file import EngineHeader
from spark_engine.errors import CapacityError, EngineError, ExecutorError
from spark_engine.hints import extra
from spark_engine.runtime.executors.executor import Specs, SynchronousExecutor, checked
from spark_engine.runtime.executors.ort import open_session
from spark_engine.tensors import Array, TensorSpec


class TrtExecutor(SynchronousExecutor):
    """One bucket.

    Raises EngineError if TensorRT-RTX or a GPU is missing, or the engine is for another GPU.
    """

    def __init__(
        self, header: EngineHeader, payload: bytes, folder: Path, threads: int = 0
    ) -> None:
        trt, made = library("the engine", EngineError), TrtPayload.decode(payload)
        self._errors: list[str] = []
        self._log = logger(trt, self._errors)
        self._label = f"{header.family} {header.rows}"
        self.specs = Specs(header.inputs, header.states, header.outputs)
        self._states = {out: state for out, state in header.aliases.items()}
        self._rest = open_session(made.behind, folder, threads, self._label)
        self._gpu, self._addresses = _gpu(), dict[str, int]()
        self._open = True
        try:
            self._engine = self._deserialised(trt, made)
            self._context = self._engine.create_execution_context()
            if self._context is None:
                self._refuse_memory()
                raise ExecutorError(f"{self._label} has no execution context{says(self._errors)}")
            self._fed, self._made = self._bind(trt)
        except BaseException:
            self.close()
            raise

    def run(self, buffers: Mapping[str, Array]) -> None:
        """Runs one step over `buffers`. Raises ExecutorError if one is missing or misshapen, or if
        TensorRT does not start the engine."""
        if not self._open:
            raise ExecutorError(f"{self._label} is closed")
        for spec in (*self.specs.inputs, *self.specs.states, *self.specs.outputs):
            checked(spec, buffers.get(spec.name))
        self._gpu.use()
        for name in self._fed:
            self._gpu.upload(self._addresses[name], buffers[name])
        if not self._context.execute_async_v3(int(self._gpu.stream)):
            raise ExecutorError(f"TensorRT did not start {self._label}{says(self._errors)}")
        passed = {}
        for name, spec in self._made.items():
            target = buffers.get(self._states.get(name, name))
            array = np.empty(spec.dims, spec.dtype.numpy) if target is None else target
            self._gpu.download(array, self._addresses[name])
            passed[name] = array
        self._gpu.wait()
        self._run_rest(buffers, passed)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._context = self._engine = None
        self._gpu.use()
        for address in self._addresses.values():
            self._gpu.free(address)
        self._gpu.close()

    def _deserialised(self, trt: ModuleType, made: TrtPayload) -> Any:
        engine = trt.Runtime(self._log).deserialize_cuda_engine(made.engine)
        if engine is None:
            self._refuse_memory()
            here = trt.__version__
            by = f" (made by {made.version})" if made.version not in ("", here) else ""
            raise EngineError(
                f"TensorRT-RTX {here} refuses the {self._label} bucket{by}, which may be another "
                "version's or not for this GPU; rebuild the engine with spark-build on this machine"
                + says(self._errors)
            )
        return engine

    def _refuse_memory(self) -> None:
        if out_of_memory(self._errors):
            raise CapacityError(
                f"the GPU does not have enough memory for {self._label}: stop other programs on "
                f"it, or rebuild with a smaller --max-context or --max-seqs, or fewer buckets "
                f"(--decode, --prefill){says(self._errors)}"
            )

    def _bind(self, trt: ModuleType) -> tuple[tuple[str, ...], dict[str, TensorSpec]]:
        """(inputs, outputs) of the engine, each with its own device memory."""
        known = {s.name: s for s in (*self.specs.inputs, *self.specs.states)}
        outs = {s.name: s for s in self.specs.outputs}
        for out, state in self._states.items():
            outs[out] = TensorSpec(out, known[state].dtype, known[state].shape)
        fed, made = [], {}
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            reads = self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            spec = known.get(name) if reads else outs.get(name)
            dims = tuple(self._engine.get_tensor_shape(name))
            if spec is None or dims != spec.dims:
                raise EngineError(
                    f"the {self._label} bucket's engine has {name}{list(dims)}, its header has "
                    f"{spec}; rebuild it with spark-build"
                )
            self._addresses[name] = self._gpu.allocate(spec.nbytes)
            self._context.set_tensor_address(name, self._addresses[name])
            if reads:
                fed.append(name)
            else:
                made[name] = spec
        return tuple(fed), made

    def _run_rest(self, buffers: Mapping[str, Array], passed: Mapping[str, Array]) -> None:
        """Runs the nodes after the engine's on the host and copies their updated states back."""
        wanted = [value.name for value in self._rest.get_inputs()]
        names = [value.name for value in self._rest.get_outputs()]
        fed = {name: passed[name] if name in passed else buffers[name] for name in wanted}
        for name, array in zip(names, self._rest.run(names, fed), strict=True):
            np.copyto(buffers[self._states.get(name, name)], array)


def _gpu() -> Any:
    try:
        from spark_engine.device.gpu import Gpu
    except ImportError as error:
        raise EngineError(f"the engine needs a GPU's packages ({error}): {extra('cuda')}") from None
    return Gpu()
