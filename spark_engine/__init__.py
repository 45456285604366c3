"""The contracts every package shares: errors, tensor types, ops, the engine-file format.

Knows nothing about any model, any kernel or any executor, and imports no other package. `LLM` and
its values are found under this name too, and are imported when they are first asked for.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers: `import spark_engine` alone imports none of it
    from spark_engine.runtime.offline.llm import LLM as LLM
    from spark_engine.runtime.offline.llm import LLMClosed as LLMClosed
    from spark_engine.runtime.offline.params import SamplingParams as SamplingParams
    from spark_engine.runtime.offline.results import Completion as Completion
    from spark_engine.runtime.offline.results import CompletionChunk as CompletionChunk

__all__ = ["LLM", "CompletionChunk", "Completion", "LLMClosed", "SamplingParams"]

# onnxruntime writes a device id and a database of events under the user's cache and may send
# them. It asks the environment when it is imported, and every module of ours is imported after
# this line; the processes that we start inherit it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("spark_engine.runtime.offline.llm"), name)
