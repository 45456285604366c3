"""Linear layers in bf16, FP8 and NVFP4: from skinny GEMM to prefill."""
