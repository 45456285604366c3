"""The engines that are measured: how weights are stored, and what is rounded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """An engine: how its weights are stored, and what it rounds. `base`: the choice to which it
    adds one rounding; "" for none, and then it is compared with the first."""

    name: str
    weights: str = "bf16"
    activation: str = "f32"
    kv: str = "f32"
    state: str = "f32"
    base: str = ""

    @property
    def options(self) -> dict[str, str]:
        return {"activation": self.activation, "kv_dtype": self.kv, "state_dtype": self.state}


NVFP4, GPU = "NVFP4 weights", "NVFP4 weights, bf16 activations, FP8 KV"
SERVED = {"activation": "bf16", "kv": "fp8"}  # of a GPU's engine of a published NVFP4 file
CHOICES = (
    Choice("bf16 weights, the rest f32"),
    Choice("FP8 weights and inputs, by row and token", "ct_fp8_channel"),
    Choice(NVFP4, "ct_nvfp4"),
    Choice("int4 weights, groups of 128", "ct_int4_g128"),
    Choice("bf16 activations", activation="bf16"),
    Choice("FP8 inputs of the MLP (W4A8)", "ct_mlp_a8", base=NVFP4),
    Choice("NVFP4 inputs of the MLP (W4A4)", "ct_mlp_a4", base=NVFP4),
    Choice("bf16 KV", kv="bf16"),
    Choice("FP8 KV", kv="fp8"),
    Choice("bf16 states", state="bf16"),
    Choice("f16 states", state="f16"),
    Choice(GPU, "ct_nvfp4", **SERVED, base=NVFP4),
    Choice("the same with bf16 states", "ct_nvfp4", **SERVED, state="bf16", base=GPU),
    Choice("the same with f16 states", "ct_nvfp4", **SERVED, state="f16", base=GPU),
)
OWN = "the file as it is (NVFP4 and FP8)"
EMBEDDED = (
    Choice("the file's values as bf16, the rest f32"),
    *(c for c in CHOICES[1:] if not c.kv == "fp8" or c.weights == "bf16"),
    Choice(OWN, "file"),
    Choice(f"{OWN}, bf16 activations, FP8 KV", "file", **SERVED),
    Choice("the same with bf16 states", "file", **SERVED, state="bf16"),
    Choice("the same with f16 states", "file", **SERVED, state="f16"),
)
