"""CUDA kernels; next to each, which nodes it takes and how it is launched. Knows no op."""
