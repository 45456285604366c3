"""Linear layers in bf16, FP8 and NVFP4."""
