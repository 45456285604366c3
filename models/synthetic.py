"""A synthetic checkpoint without weight files: every tensor is random, drawn when it is read.

A folder of config.json, the quantisation config and `synthetic.json` ({"seed": 1}) represents a
checkpoint of the published shapes, names and types with plausible random values: norms near one,
projections of gain one, long and short memories, block scales as exporters write them. A tensor
depends on seed, name and kind alone, and takes no additional memory. For measurements and tests;
knows no name of a tensor and no graph. A draft head is drawn if config.json or the model
type's files have one, a vision tower if config.json describes one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.expected_tensors import Expected
from spark_engine.models.checkpoint.files import CONFIGS, Checkpoint, StoredTensor, read_json
from spark_engine.models.checkpoint.quant_schemes import SUFFIXES, Dialect
from spark_engine.models.checkpoint.tensor_list import Linear, Row, Tensor, ValueKind
from spark_engine.tensors import Array, DType

MARK = "synthetic.json"
NOWHERE = "(drawn)"  # the "file" of a drawn tensor
AMAX = 8.0  # the activations' maximum that the input scales assume
ROUTER_STD = 0.2  # over inputs of norm one: logits far enough apart to spread the choice
_STDS = {ValueKind.EMBEDDING: 1.0, ValueKind.ROUTER: ROUTER_STD}
_BLOCK = 1 << 20  # elements drawn at a time
_RANGES = {  # of uniform values
    ValueKind.NORM: (0.9, 1.1),
    ValueKind.CENTRED_NORM: (-0.1, 0.1),
    ValueKind.LOG_DECAY: (-3.0, 1.0),
    ValueKind.DECAY_BIAS: (-5.0, 0.0),
}


@dataclass(frozen=True)
class Synthetic(Checkpoint):
    """A `Checkpoint` with tensors that `read` draws; `maps` is empty.

    `expected`: the description of each tensor, by name.
    """

    expected: Mapping[str, Expected]
    seed: int

    def read(self, name: str) -> Array:
        """The tensor: equal for equal seed and name, in its own dtype and shape.

        Raises CheckpointError when there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path} describes no tensor {name}; correct its config.json"
            )
        tensor, row = self.tensors[name], self.expected[name].row
        leaf, group = name.rpartition(".")[2], self.expected[name].scheme.group
        if "scale" in leaf and tensor.dtype is not DType.F8E4M3:
            if not group:
                return np.full(tensor.shape, _scale(leaf, row), tensor.dtype.numpy)
            # Codes have a mean of half a step: with one sign, all outputs would share it, and every
            # token would choose the same experts.
            signs = 1 - 2 * (np.indices(tensor.shape).sum(0) % 2)
            return np.asarray(signs * (_std(row) / _INT4_RMS), tensor.dtype.numpy)
        if "zero" in leaf:
            return np.full(tensor.shape, 0x77777777, np.int32)  # 7; of GPTQ 8
        if leaf in ("g_idx", "weight_g_idx"):
            return np.arange(tensor.shape[0], dtype=np.int32) // np.int32(group)
        if leaf == "weight_shape" and isinstance(row, Linear):
            return np.array((row.stored.rows, row.columns), tensor.dtype.numpy)
        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        rng = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
        drawn: Array = _draw(rng, tensor, row).reshape(tensor.shape)
        return drawn

    def digest(self) -> str:
        """SHA-256 over the JSON files, the seed's included."""
        total = hashlib.sha256()
        for file in (*CONFIGS, MARK):
            if (self.path / file).is_file():
                total.update(file.encode() + b"\0" + (self.path / file).read_bytes())
        return total.hexdigest()


def is_synthetic(path: Path | str) -> bool:
    """True if the folder is a synthetic checkpoint."""
    return (Path(path) / MARK).is_file()


def open_synthetic(
    folder: Path, expected: Mapping[str, Expected], stored: Iterable[Expected]
) -> Synthetic:
    """The drawn tensors of a folder with synthetic.json: the `stored` ones of those `expected`.

    Raises CheckpointError when synthetic.json is malformed.
    """
    seed = read_json(folder / MARK, required=True).get("seed")
    if not isinstance(seed, int):
        raise CheckpointError(f'{folder / MARK}: seed is {seed!r}; write {{"seed": 1}}')
    drawn = [StoredTensor(e.name, e.dtypes[0], e.shapes[0], NOWHERE, 0) for e in stored]
    tensors = MappingProxyType({t.name: t for t in drawn})
    return Synthetic(folder, tensors, {}, expected, seed)


def _draw(rng: np.random.Generator, tensor: StoredTensor, row: Row) -> Array:
    """The elements of a tensor that stores `row`, in one dimension."""
    count = tensor.nbytes // tensor.dtype.itemsize
    if tensor.dtype in (DType.U8, DType.I32):  # codes of 4 bits: every byte is one pair
        return _bytes(rng, tensor.nbytes).view(tensor.dtype.numpy)
    if tensor.name.endswith("scale"):  # of blocks; no other FP8 input has drawn scales
        return _by_table(rng, count, _BLOCK_SCALES)
    if isinstance(row, Tensor) and row.kind in _RANGES:
        return rng.uniform(*_RANGES[row.kind], count).astype(tensor.dtype.numpy)
    return _by_table(rng, count, _levels(tensor, row))


def _levels(tensor: StoredTensor, row: Row) -> Array:
    """256 equally likely values: the quantiles of a normal distribution."""
    if tensor.dtype is DType.F8E4M3:
        return _E4M3
    return np.asarray(_QUANTILES * _std(row)).astype(tensor.dtype.numpy)


def _std(row: Row) -> float:
    """Standard deviation of a matrix: gain one, but for embedding and router."""
    if isinstance(row, Tensor) and row.kind in _STDS:
        return _STDS[row.kind]
    return float(row.columns**-0.5)


def _scale(leaf: str, row: Row) -> float:
    """The value of an f32 or bf16 scale; compressed-tensors globals divide, others multiply."""
    fp4 = _std(row) / (_E2M1_RMS * _BLOCK_RMS)
    fp8 = _std(row) / _E4M3_RMS
    multiply, divide = SUFFIXES[Dialect.MODELOPT], SUFFIXES[Dialect.COMPRESSED]
    values = {
        multiply.fp4_global: fp4,
        divide.fp4_global: 1 / fp4,
        multiply.fp4_input: AMAX / 448,
        divide.fp4_input: 2688 / AMAX,
    }
    return values.get(leaf, fp8)


def _by_table(rng: np.random.Generator, count: int, table: Array) -> Array:
    # As whole numbers, which numpy copies fast and without the interpreter's lock.
    whole = table.view(f"u{table.dtype.itemsize}")
    out = np.empty(count, whole.dtype)
    for start in range(0, count, _BLOCK):
        part = out[start : start + _BLOCK]
        part[...] = whole[_bytes(rng, len(part))]
    return out.view(table.dtype)


def _bytes(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    words: NDArray[np.uint64] = rng.bit_generator.random_raw(-(-count // 8))
    return words.view(np.uint8)[:count]


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


def _constant(values: Array) -> Array:
    values.flags.writeable = False
    return values


_NORMAL = NormalDist()
_QUANTILES = np.array([_NORMAL.inv_cdf((i + 0.5) / 256) for i in range(256)])
_E4M3 = _constant((_QUANTILES * (448 / _QUANTILES[-1])).astype(DType.F8E4M3.numpy))
_BLOCK_SCALES = _constant(np.linspace(64, 448, 256).astype(DType.F8E4M3.numpy))
_E4M3_RMS, _BLOCK_RMS = _rms(_E4M3), _rms(_BLOCK_SCALES)
_INT4_RMS = _rms(np.arange(-7, 9))
_E2M1_RMS = _rms(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]))  # every code equally likely
