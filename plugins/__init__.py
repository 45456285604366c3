"""Ops: numpy reference, ONNX body, CUDA source. Knows no model."""
