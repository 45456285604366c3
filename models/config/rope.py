"""Rotary frequencies from config.json: rope types default and yarn.

Knows the formulas of transformers 5.x (`modeling_rope_utils.py`, `_compute_yarn_parameters`,
after Peng et al., 2023), and how many pairs an image's height and width turn. Knows no tensor and
no graph.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError

TYPES = ("default", "yarn")
_BASES = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Yarn:
    """Context extension by `factor` over `original` positions."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class Rope:
    """Partial rotary embedding of the first `dims` elements of a head.

    `sections`: pairs that height and width turn; they alternate with time's, which has the rest
    (`modeling_qwen3_5.py`, apply_interleaved_mrope). `attention_factor` multiplies cos and sin.
    Rotation is linear, so the graph multiplies the first `dims` elements of the q and k norms'
    weights instead.
    """

    dims: int
    theta: float
    attention_factor: float = 1.0
    yarn: Yarn | None = None
    sections: tuple[int, int] = (11, 10)

    @property
    def positions(self) -> int:
        """Positions that a scaled rope reaches; 0 if it is not scaled."""
        return 0 if self.yarn is None else int(self.yarn.factor * self.yarn.original)

    def __str__(self) -> str:
        if self.yarn is None:
            return "default"
        return f"yarn, factor {self.yarn.factor:g} over {self.yarn.original} positions"

    def inv_freq(self) -> NDArray[np.float32]:
        """f32 [dims/2], equal on every machine; rounded at the same points as in transformers.

        The power is taken in f64: numpy's f32 power differs between processors in its last bit.
        """
        steps = np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims)
        freqs = (np.float64(self.theta) ** steps.astype(np.float64)).astype(np.float32)
        plain = np.float32(1) / freqs
        if self.yarn is None:
            return plain
        keep = np.float32(1) - self._ramp(self.yarn)
        stretched = np.float32(1) / (np.float32(self.yarn.factor) * freqs)
        mixed: NDArray[np.float32] = stretched * (np.float32(1) - keep) + plain * keep
        return mixed.astype(np.float32)

    def _ramp(self, yarn: Yarn) -> NDArray[np.float32]:
        """0 where a frequency is kept, 1 where it is interpolated, linear between."""
        low = self._dim_of(yarn.beta_fast, yarn.original)
        high = self._dim_of(yarn.beta_slow, yarn.original)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dims - 1)
        high += 0.001 if low == high else 0.0
        line = (np.arange(self.dims // 2, dtype=np.float32) - low) / (high - low)
        ramp: NDArray[np.float32] = np.clip(line, 0, 1).astype(np.float32)
        return ramp

    def _dim_of(self, rotations: float, positions: int) -> float:
        """The (fractional) dimension that turns `rotations` times over `positions`."""
        turns = math.log(positions / (rotations * 2 * math.pi))
        return self.dims * turns / (2 * math.log(self.theta))


def rope_from_hf(text: Mapping[str, Any], outer: Mapping[str, Any] = NOTHING) -> Rope:
    """Reads rope_parameters, or the older rope_scaling, rope_theta, partial_rotary_factor; `outer`:
    the configuration that `text` is inside of.

    Raises CheckpointError naming the key for any rope type but default and yarn, and for two
    declarations that differ: programs disagree on which counts.
    """
    base = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope = _rope(base, text)
    shared = {k: base[k] for k in _BASES if k in base}
    for where, row in (("", text), ("outside text_config: ", outer)):
        for key in ("rope_parameters", "rope_scaling"):
            if (other := row.get(key)) and _rope({**shared, **other}, text) != rope:
                raise CheckpointError(
                    f"config.json: {where}{key} gives {_words(other)}, and text_config's "
                    f"{'rope_parameters' if text.get('rope_parameters') else 'rope_scaling'} "
                    f"{_words(base)}: programs disagree on which counts; keep one, or build with "
                    "--rope-scaling"
                )
    if (theta := text.get("rope_theta")) not in (None, rope.theta):
        raise CheckpointError(
            f"config.json: rope_theta is {theta!r}, and {rope.theta} in rope_parameters; keep one"
        )
    return rope


def rescaled(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with `scaling` as its only rope type; bases and sections stay the file's. By
    default it begins where the file's positions end."""
    nested = "text_config" in config
    text = config["text_config"] if nested else config
    old = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    kept = {k: v for k, v in old.items() if k in _BASES}
    longest = old.get("original_max_position_embeddings") or text.get("max_position_embeddings")
    new = {**kept, "original_max_position_embeddings": longest, **scaling}
    text = {k: v for k, v in text.items() if k != "rope_scaling"} | {"rope_parameters": new}
    outer = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_parameters")}
    return {**outer, "text_config": text} if nested else text


def _words(row: Mapping[str, Any]) -> str:
    """The type and factor of a declaration."""
    factor = row.get("factor")
    return f"{_kind(row)!r}" + (f" with factor {factor}" if factor is not None else "")


def _kind(row: Mapping[str, Any]) -> object:
    kind = row.get("rope_type", row.get("type", "default"))
    return "default" if kind == "mrope" else kind  # an older spelling, with mrope_section


def _rope(row: Mapping[str, Any], text: Mapping[str, Any]) -> Rope:
    kind = _kind(row)
    if kind not in TYPES:
        raise CheckpointError(
            f"config.json: rope_type is {kind!r}; supported: {', '.join(TYPES)}. Take a config "
            "without rope scaling, or with yarn"
        )
    theta = _positive(row, text, "rope_theta", None)
    part = _positive(row, text, "partial_rotary_factor", 0.25)
    dims = int(int(text.get("head_dim") or 256) * part)
    if dims < 2 or dims % 2 or part > 1:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {part} of head_dim {text.get('head_dim')} gives "
            f"{dims} rotary dimensions; they must be even, at least 2 and at most head_dim"
        )
    if kind == "default":
        return Rope(dims, theta, sections=_sections(row))
    return _yarn(row, text, dims, theta)


def _sections(row: Mapping[str, Any]) -> tuple[int, int]:
    """Pairs that height and width turn: the last two of three numbers; time has the rest."""
    given: Any = row.get("mrope_section")
    if given is None:
        return Rope.sections
    whole = isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
    if not whole or len(given) != 3:
        raise CheckpointError(
            f"config.json: mrope_section is {given!r}: expected three whole numbers"
        )
    return given[1], given[2]


def _yarn(row: Mapping[str, Any], text: Mapping[str, Any], dims: int, theta: float) -> Rope:
    longest = _positive(text, {}, "max_position_embeddings", 32768)
    original = int(_positive(row, {}, "original_max_position_embeddings", longest))
    if original < 1:
        raise CheckpointError(
            "config.json: original_max_position_embeddings is below 1: expected a whole number"
        )
    factor = _positive(row, {}, "factor", longest / original)
    if factor < 1:
        raise CheckpointError(f"config.json: the yarn factor is {factor}; it must be at least 1")
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta is {theta}; with yarn it must be above 1")
    yarn = Yarn(
        factor=factor,
        original=original,
        beta_fast=_positive(row, {}, "beta_fast", 32),
        beta_slow=_positive(row, {}, "beta_slow", 1),
        truncate=bool(row.get("truncate", True)),
    )
    return Rope(dims, theta, _attention_factor(row, factor), yarn, _sections(row))


def _attention_factor(row: Mapping[str, Any], factor: float) -> float:
    given = row.get("attention_factor")
    if given is not None:
        return _positive(row, {}, "attention_factor", None)

    def mscale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if row.get("mscale") and row.get("mscale_all_dim"):
        return mscale(float(row["mscale"])) / mscale(float(row["mscale_all_dim"]))
    return mscale(1.0)


def _positive(
    row: Mapping[str, Any], text: Mapping[str, Any], key: str, default: float | None
) -> float:
    value: Any = row.get(key, text.get(key))
    value = default if value is None else value
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if sound else math.nan
    if not 0 < number < math.inf:  # Python reads NaN and Infinity from JSON
        raise CheckpointError(f"config.json: {key} is {value!r}: expected a positive number")
    return number
