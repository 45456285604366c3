"""The build halves of executors: what the straight line asks of each, and onnxruntime's."""
