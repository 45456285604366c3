"""Executors of buckets: onnxruntime on the CPU, CUDA graphs on a GPU; and their memory."""
