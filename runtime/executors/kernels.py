"""The kernels of an engine's buckets on one GPU.

Knows cubins and their entries; knows no launch.
"""

from typing import Any, NamedTuple

from spark_engine.device.gpu import Function, Gpu

SAMPLED = 64  # of so many bytes one is hashed; all are compared, at ten times the speed


class _Image(NamedTuple):
    """A cubin as a key."""

    cubin: bytes

    def __hash__(self) -> int:
        return hash(self.cubin[::SAMPLED])


class Kernels:
    """The kernels of all buckets. A cubin that several buckets contain is loaded once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._modules: dict[_Image, Any] = {}
        self._found: dict[tuple[_Image, str], tuple[Function, int]] = {}

    def find(self, cubin: bytes, symbol: str, shared: int) -> Function:
        """The kernel, loaded, with a dynamic shared memory limit of at least `shared` bytes and of
        all earlier requests."""
        image = _Image(cubin)
        if image not in self._modules:
            self._modules[image] = self._gpu.module(cubin)
        key = image, symbol
        if key not in self._found:
            found = self._gpu.function(self._modules[image], symbol)
            self._gpu.load_function(found)
            self._found[key] = found, 0
        function, allowed = self._found[key]
        if shared > allowed:
            self._gpu.allow_shared(function, shared)
            self._found[key] = function, shared
        return function
