"""Checkpoint to engine files. Never imports the runtime.

The graph is an ONNX graph in graphsurgeon's objects, from lowering to packing (`graph`, `rules`).
The native backend only reads it and imports no ONNX; `executors/ort.py` writes ONNX.
"""
