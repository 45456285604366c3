"""The bytes of a bucket for the `trt` executor: the builder writes them, the runtime reads them.

8 bytes little-endian length, a JSON header of that length, then the two parts that it lists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from spark_engine.errors import EngineError


@dataclass(frozen=True)
class TrtPayload:
    """One bucket."""

    engine: bytes  # TensorRT-RTX's engine of the network up to the logits
    behind: bytes  # an ONNX model of what runs on the host after it
    # Names of the engine's outputs; that of an updated state ends with `.out`.
    outputs: tuple[str, ...]
    version: str = ""  # of the TensorRT-RTX that built the engine; empty if unknown

    def encode(self) -> bytes:
        """The bytes that `decode` reads."""
        sizes = {"engine": len(self.engine), "behind": len(self.behind)}
        known = {**sizes, "outputs": self.outputs, "version": self.version}
        head = json.dumps(known, sort_keys=True).encode()
        return len(head).to_bytes(8, "little") + head + self.engine + self.behind

    @classmethod
    def decode(cls, data: bytes) -> TrtPayload:
        """Raises EngineError for malformed bytes."""
        start = 8 + int.from_bytes(data[:8], "little")
        try:
            head = json.loads(data[8:start])
            middle, outputs = start + head["engine"], tuple(head["outputs"])
            if middle + head["behind"] != len(data):
                raise ValueError(f"{len(data)} bytes are not {head}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EngineError(
                f"the bucket is not TensorRT's ({error}); rebuild the engine with spark-build"
            ) from None
        return cls(data[start:middle], data[middle:], outputs, str(head.get("version", "")))
