"""The quantisation table: what each projection of a checkpoint is stored as.

Built from the checkpoint's own declarations (`quant_declarations.py` reads their dialects);
`expected_tensors.py` then holds every tensor in the file against it. Never guessed from a flag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint import layout, quant_declarations
from spark_engine.models.checkpoint.quant_schemes import Declared, Dialect, Scheme
from spark_engine.models.config.json_values import malformed_json
from spark_engine.models.config.model_config import ModelConfig


@dataclass(frozen=True)
class QuantTable:
    """Scheme by module; experts of one layer share one, found at `layers.N.mlp.experts`.

    `kv_fp8`: the checkpoint asks for an e4m3 KV cache.
    """

    modules: Mapping[str, Scheme]
    dialect: Dialect
    kv_fp8: bool

    def __getitem__(self, module: str) -> Scheme:
        """The scheme of a module; what is not a projection is plain."""
        return self.modules.get(module, Scheme.PLAIN)

    @property
    def quantised(self) -> bool:
        """True when any module is not plain."""
        return any(s is not Scheme.PLAIN for s in self.modules.values())

    def summary(self) -> Mapping[str, int]:
        """Projections by scheme; the experts of a layer count as one."""
        return Counter(s.value for s in self.modules.values())


def quant_table(
    config: ModelConfig, config_json: Mapping[str, Any], hf_quant: Mapping[str, Any]
) -> QuantTable:
    """The table of a checkpoint, from config.json and hf_quant_config.json ({} if absent).

    Raises CheckpointError when a method is unsupported, when the two files contradict each
    other, or when the experts of one layer are not stored alike.
    """
    from_files = declarations(config_json, hf_quant)
    if not from_files:
        names = {_group(m): Scheme.PLAIN for m, _ in layout.linears(config)}
        return QuantTable(MappingProxyType(names), Dialect.MODELOPT, False)
    table: dict[str, Scheme] = {}
    for module, _ in layout.linears(config):
        scheme = _agreed(module, from_files)
        if table.setdefault(_group(module), scheme) is not scheme:
            raise CheckpointError(
                f"{from_files[0].where}: {module} is {scheme}, but other experts of its layer are "
                f"{table[_group(module)]}; quantise all experts of a layer alike"
            )
    kv_fp8 = any(d.kv_fp8 for d in from_files)
    return QuantTable(MappingProxyType(table), from_files[0].dialect, kv_fp8)


def declarations(config_json: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> list[Declared]:
    """What the two files declare, the more specific hf_quant_config.json first."""
    found = []
    if hf_quant:
        with malformed_json("hf_quant_config.json"):
            found.append(quant_declarations.modelopt(hf_quant, "hf_quant_config.json"))
    text = config_json.get("text_config") or {}
    inner = config_json.get("quantization_config") or text.get("quantization_config")
    if inner:
        with malformed_json("config.json: quantization_config"):
            found.append(quant_declarations.from_config(inner))
    return found


def _agreed(module: str, from_files: list[Declared]) -> Scheme:
    names = layout.spellings(module)
    said = [d.scheme(names) for d in from_files]
    if len(set(said)) > 1:
        first, second = from_files
        raise CheckpointError(
            f"{module} is {said[0]} in {first.where} but {said[1]} in {second.where}; take both "
            "files from one export of the checkpoint"
        )
    return said[0]


def _group(module: str) -> str:
    """`layers.N.mlp.experts` for any of its experts' projections, else the module itself."""
    head, found, _ = module.partition(".experts.")
    return head + ".experts" if found else module
