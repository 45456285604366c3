"""What int4 checkpoints declare: GPTQ, AutoRound, AWQ, and weights of compressed-tensors groups.

A module has 4 bits in groups of 32, 64 or 128 columns, or is plain; all else is refused when a
projection of the network has it. The rules are those of GPTQModel, AutoRound and AutoAWQ, as vLLM
reads them. Knows names and patterns only; no tensor and no shape.
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any, NoReturn

from spark_engine.errors import CheckpointError
from spark_engine.hints import INSTEAD
from spark_engine.models.checkpoint import name_patterns
from spark_engine.models.checkpoint.layout import HEAD
from spark_engine.models.checkpoint.quant_schemes import INT4, Declared, Dialect, Scheme

Json = Mapping[str, Any]
Names = tuple[str, ...]  # the spellings of a module's name

_PATTERN = set("*+?^$()[]{}|\\")  # a name with one of these is a pattern


def gptq(row: Json, where: str) -> Declared:
    """`dynamic`: `-:` and a pattern leave modules plain, other patterns change their entries."""
    if row.get("desc_act"):
        _refuse(where, "GPTQ", "desc_act is true, so columns are not in order")
    form = row.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        _refuse(where, "GPTQ", f"checkpoint_format is {form!r}")
    wanted = _flat(row.get("modules_in_block_to_quantize"))
    name_patterns.check_patterns(row.get("dynamic") or {}, where)
    rules = [
        (key.startswith("-:"), re.compile(key[2:] if key[:2] in ("-:", "+:") else key), changes)
        for key, changes in (row.get("dynamic") or {}).items()
    ]

    def scheme(names: Names) -> Scheme:
        if HEAD in names and not row.get("lm_head"):
            return Scheme.PLAIN
        if wanted and not any(name.endswith(f".{n}") for name in names for n in wanted):
            return Scheme.PLAIN
        own: Json = row
        for excludes, pattern, changes in rules:
            if any(pattern.match(name) for name in names):
                if excludes:
                    return Scheme.PLAIN
                own = {**row, **changes}
                break
        return _scheme(own, where, "GPTQ")

    return Declared(where, Dialect.GPTQ if form == "gptq" else Dialect.GPTQ_V2, False, scheme)


def auto_round(row: Json, where: str) -> Declared:
    """`extra_config`: entries of modules by name or pattern; those with 16 bits are plain. Only
    `auto_gptq` stores zero points less one."""
    packing = row.get("packing_format") or "auto_round:auto_gptq"
    dialects = {"auto_gptq": Dialect.GPTQ, "auto_awq": Dialect.AWQ}
    dialects |= dict.fromkeys(("auto_round", "gptqmodel"), Dialect.GPTQ_V2)
    dialect = dialects.get(str(packing).removeprefix("auto_round:"))
    if dialect is None:
        _refuse(where, "AutoRound", f"packing_format is {packing!r}")
    blocks = _flat(row.get("block_name_to_quantize") or row.get("to_quant_block_names"))
    extra: Json = row.get("extra_config") or {}
    name_patterns.check_patterns([key for key in extra if _PATTERN & set(key)], where)
    patterns = [(re.compile(key), own) for key, own in extra.items() if _PATTERN & set(key)]

    def scheme(names: Names) -> Scheme:
        exact = (extra[name] for name in names if name in extra)
        matched = (own for p, own in patterns if any(p.search(name) for name in names))
        own: Json = next(chain(exact, matched), {})
        inside = any(name.startswith(tuple(blocks)) for name in names)
        if "bits" not in own and (HEAD in names if not blocks else not inside):
            return Scheme.PLAIN
        return _scheme({**row, **own}, where, "AutoRound")

    return Declared(where, dialect, False, scheme)


def _flat(names: Any) -> list[str]:
    """Names with commas between them, of a list, or of a list of lists."""
    parts = names.split(",") if isinstance(names, str) else names or ()
    return [n for part in parts for n in ([part] if isinstance(part, str) else part)]


def awq(row: Json, where: str) -> Declared:
    """`modules_to_not_convert`: words, and a module that has one in its name is plain."""
    version = str(row.get("version") or "gemm").lower()
    if version != "gemm":
        _refuse(where, "AWQ", f"version is {version!r}, not 'gemm'")
    skipped = _flat(row.get("modules_to_not_convert"))
    sizes = {"bits": row.get("w_bit"), "group_size": row.get("q_group_size")}
    whole = {**{k: v for k, v in sizes.items() if v is not None}, **row}

    def scheme(names: Names) -> Scheme:
        if HEAD in names or any(word in name for word in skipped for name in names):
            return Scheme.PLAIN
        return _scheme(whole, where, "AWQ")

    return Declared(where, Dialect.AWQ, False, scheme)


def compressed(weights: Json, inputs: object, where: str) -> Scheme:
    """Of a group of compressed-tensors with integer weights."""
    bits, size, order = (weights.get(k) for k in ("num_bits", "group_size", "actorder"))
    if inputs is not None:
        _refuse(where, f"int{bits}", "activations are quantised too")
    if order not in (None, False, "weight", "static"):
        _refuse(where, f"int{bits}", f"actorder is {order!r}: groups of columns are not in order")
    symmetric = weights.get("symmetric") is not False
    return _scheme({"bits": bits, "group_size": size}, where, f"int{bits}", symmetric)


def _scheme(row: Json, where: str, kind: str, symmetric: bool = False) -> Scheme:
    """By the entry of one module; `symmetric`: no zero points are stored."""
    bits, size, data = row.get("bits"), row.get("group_size", 0), row.get("data_type") or "int"
    act = row.get("act_bits") or 16
    if isinstance(bits, int) and bits >= 16:
        return Scheme.PLAIN
    found = INT4.get((size, symmetric))
    if bits != 4 or found is None or data != "int" or act < 16:
        rest = f", data_type {data!r}, act_bits {act}" if data != "int" or act < 16 else ""
        _refuse(where, kind, f"bits {bits!r}, group_size {size!r}{rest}")
    return found


def _refuse(where: str, kind: str, what: str) -> NoReturn:
    read = "4 bits in groups of 32, 64 or 128 are read"
    raise CheckpointError(f"{kind}: {what} ({where}); {read}; {INSTEAD}")
