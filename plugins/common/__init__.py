"""What several ops share: ONNX text, number formats, PTX wrappers. Imports no other folder here."""
