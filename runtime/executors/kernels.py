"""The kernels of an engine's buckets on one GPU.

Knows cubins and their entries; knows no launch.
"""

from typing import Any

from spark_engine.device.gpu import Function, Gpu


class Kernels:
    """The kernels of all buckets. A cubin that several buckets contain is loaded once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._modules: dict[bytes, Any] = {}
        self._found: dict[tuple[bytes, str], tuple[Function, int]] = {}

    def find(self, cubin: bytes, symbol: str, shared: int) -> Function:
        """The kernel, loaded, with a dynamic shared memory limit of at least `shared` bytes and of
        all earlier requests."""
        if cubin not in self._modules:
            self._modules[cubin] = self._gpu.module(cubin)
        key = cubin, symbol
        if key not in self._found:
            found = self._gpu.function(self._modules[cubin], symbol)
            self._gpu.load_function(found)
            self._found[key] = found, 0
        function, allowed = self._found[key]
        if shared > allowed:
            self._gpu.allow_shared(function, shared)
            self._found[key] = function, shared
        return function
