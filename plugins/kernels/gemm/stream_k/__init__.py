"""The persistent stream-K GEMM; its formats are in kernels/gemm."""
