"""The bytes of a bucket for the `trt` executor, which the builder writes and the runtime reads."""

from __future__ import annotations

import msgspec

from spark_engine.errors import EngineError


class TrtPayload(msgspec.Struct, frozen=True, array_like=True):
    """Attributes:
    engine: TensorRT-RTX's, of the network up to the logits.
    behind: an ONNX model, of what runs behind it on the host.
    outputs: names of what the engine makes; an updated state's ends with `.out`.
    """

    engine: bytes
    behind: bytes
    outputs: tuple[str, ...]

    def encode(self) -> bytes:
        """MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> TrtPayload:
        """Raises EngineError for bytes of another form."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise EngineError(
                f"the bucket is not TensorRT's ({error}); rebuild the engine with spark-build"
            ) from None
