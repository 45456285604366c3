"""The storage schemes of a projection, and what one file declares about them.

The vocabulary of `quant_declarations.py` (which reads the declarations) and `quant_table.py`
(which makes the table of them), and what each dialect calls a projection's tensors. Knows no JSON.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


class Scheme(enum.StrEnum):
    """The storage of a projection's weight, and the rounding of its input."""

    PLAIN = "plain"  # bf16, f16 or f32, as the file says
    FP8 = "fp8"  # e4m3, one scale per tensor or row; static e4m3 input
    FP8_CHANNEL = "fp8_channel"  # the same weights; dynamic e4m3 input per token
    FP8_BLOCK = "fp8_block"  # e4m3, one scale per 128x128; dynamic e4m3 input per 1x128
    NVFP4 = "nvfp4"  # e2m1, e4m3 scale per 16 and one f32; input untouched (W4A16)
    NVFP4_A4 = "nvfp4_a4"  # the same with e2m1 input (W4A4)
    INT4_G32 = "int4_g32"  # 4-bit codes, scale and zero point per 32 columns; input untouched
    INT4_G64 = "int4_g64"
    INT4_G128 = "int4_g128"
    INT4_SYM_G32 = "int4_sym_g32"  # the same with zero point 8, which is not stored
    INT4_SYM_G64 = "int4_sym_g64"
    INT4_SYM_G128 = "int4_sym_g128"

    @property
    def weights(self) -> str:
        """The weight format (plugins/formats) that ops have such a projection in."""
        return "dense" if self is Scheme.PLAIN else "int4" if self.group else self.value

    @property
    def group(self) -> int:
        """Columns of a group of int4; 0: another scheme."""
        return int(self.value.rpartition("_g")[2]) if self.value.startswith("int4") else 0

    @property
    def symmetric(self) -> bool:
        """True if int4 has no stored zero points."""
        return self.value.startswith("int4_sym")


INT4 = {(s.group, s.symmetric): s for s in Scheme if s.group}


class Dialect(enum.StrEnum):
    """The names and conventions of the scale tensors."""

    MODELOPT = "modelopt"
    COMPRESSED = "compressed-tensors"
    BLOCK = "fp8"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"


@dataclass(frozen=True)
class Suffixes:
    """A dialect's suffixes of a projection's tensors, after the module's name.

    The others are `weight`, `weight_scale` and, of FP8, `input_scale` in each dialect.
    """

    fp4_weight: str
    fp4_global: str
    fp4_input: str
    block_scale: str


GROUP_OF = "g_idx"  # the group of each column of int4
# The ends of names of tensors that change nothing, some if they are zero (idle_tensors.py).
ZERO = ("bias", "zero_point")
IDLE = (
    ".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq", ".self_attn.q_scale",
    ".self_attn.prob_scale", "input_scale", "input_global_scale", *ZERO,
)  # fmt: skip
_MODELOPT = Suffixes("weight", "weight_scale_2", "input_scale", "weight_scale")
_COMPRESSED = Suffixes("weight_packed", "weight_global_scale", "input_global_scale", "weight_scale")
SUFFIXES: Mapping[Dialect, Suffixes] = {
    **dict.fromkeys(Dialect, _MODELOPT),
    Dialect.COMPRESSED: _COMPRESSED,
    Dialect.BLOCK: replace(_MODELOPT, block_scale="weight_scale_inv"),
}


@dataclass(frozen=True)
class Declared:
    """The declarations of one JSON file. `scheme` takes the spellings of one module's name.

    `by_expert`: it may differ between the experts of a group, so each is asked for. `by_index`:
    columns of int4 may be permuted, so the files must have the group of each.
    """

    where: str
    dialect: Dialect
    kv_fp8: bool
    scheme: Callable[[tuple[str, ...]], Scheme]
    by_expert: bool = True
    by_index: bool = False
