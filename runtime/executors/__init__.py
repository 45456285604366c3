"""What runs a bucket: onnxruntime on the CPU, CUDA graphs on a GPU; their memory."""
