"""The ops: formula, operands, reference, ONNX body, cases. Knows no model."""
