"""The contracts every package shares: errors, tensor types, ops, the engine-file format.

Knows nothing about any model, any kernel or any executor, and imports no other package.
"""

import os

# onnxruntime writes a device id and a database of events under the user's cache and may send
# them. It asks the environment when it is imported, and every module of ours is imported after
# this line; the processes that we start inherit it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
