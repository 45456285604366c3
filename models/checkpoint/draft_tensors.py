"""Finds the draft head in a file, and the scheme of each projection, or the reason why it is
unusable.

Exporters keep the head unquantised, quantise it, or remove it, and their configs do not always
record that, so the tensors decide. An incomplete head is no error: the checkpoint is served without
drafts. Knows no name of the head's tensors.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.expected_tensors import MTP, Expected, expected_tensors, misfits
from spark_engine.models.checkpoint.layout import DRAFT, Layout
from spark_engine.models.checkpoint.quant_schemes import IDLE, INT4, SUFFIXES, Dialect, Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable
from spark_engine.models.checkpoint.tensor_list import Linear, Row, Stored, linears
from spark_engine.tensors import DType

Files = Mapping[str, Stored]
# Schemes with scales of inputs, and what an expert without one looks like.
_CALIBRATED = ((Scheme.NVFP4_A4, Scheme.NVFP4), (Scheme.FP8, Scheme.FP8_CHANNEL))


def draft_table(
    rows: Collection[Row], tensors: Files, layout: Layout, text: QuantTable
) -> QuantTable:
    """The quantisation table of the head, from its tensors; `text` is the text network's.

    NVFP4 weights have quantised inputs only if the text network's have. Raises CheckpointError when
    the experts of the head are not stored alike.
    """
    dialect = _dialect(rows, tensors, layout, text.dialect)
    rounds_inputs = Scheme.NVFP4_A4 in text.modules.values()
    table: dict[str, Scheme] = {}
    for linear in linears(rows):
        if linear.group and layout.fused(linear.group):
            stack = tensors.get(layout.file_name(f"{linear.group}.gate_up_proj"))
            codes = stack is not None and stack.dtype is DType.F8E4M3
            scheme = Scheme.FP8_BLOCK if codes else Scheme.PLAIN  # no other stack is read
        else:
            module = layout.file_name(linear.stored.module)
            scheme = _scheme(linear, module, tensors, dialect, rounds_inputs)
            scheme = _int4_scheme(module, tensors, linear.columns) or scheme
        found = table.setdefault(linear.table_key, scheme)
        pair = next((p for p in _CALIBRATED if {found, scheme} == set(p)), None)
        if pair:  # the scale of one expert is not calibrated
            table[linear.table_key] = pair[0]
        elif found is not scheme:
            raise CheckpointError(f"{linear.module} is {scheme}, other experts are not")
    return QuantTable(MappingProxyType(table), dialect, False)


def draft_tensors(
    rows: Collection[Row], plain: DType, tensors: Files, layout: Layout, text: QuantTable
) -> tuple[QuantTable, Mapping[str, Expected], str]:
    """(`text` with the head's schemes, the head's tensors, "") of a file; if its head is
    incomplete, (`text`, nothing, the reason)."""
    there = sorted(n for n in tensors if n.startswith(layout.draft_prefix + DRAFT))
    if not there:
        return text, {}, "the checkpoint's files hold no tensor of the draft head (mtp.*)"
    try:
        table = text.drafting(draft_table(rows, tensors, layout, text))
        expected = expected_tensors(rows, plain, table, layout, MTP)
    except CheckpointError as error:
        return text, {}, f"the checkpoint's draft head is not read: {error}"
    faults = misfits(expected, tensors, MTP)
    other = (n for n in there if n not in expected and not n.endswith(IDLE))
    faults += [f"{n} is not a tensor of a draft head" for n in other]
    if faults:
        more = f", and {len(faults) - 1} more faults" if len(faults) > 1 else ""
        return text, {}, f"the checkpoint's draft head is not read: {faults[0]}{more}"
    return table, expected, ""


def _dialect(rows: Collection[Row], tensors: Files, layout: Layout, usual: Dialect) -> Dialect:
    """The dialect of the head's quantised projections; `usual` if their names do not show it."""
    modules = {layout.file_name(one.stored.module): one for one in linears(rows)}
    for module, one in modules.items():
        words = tensors.get(f"{module}.qweight")
        if words is not None and usual not in (Dialect.GPTQ, Dialect.GPTQ_V2, Dialect.AWQ):
            return Dialect.AWQ if words.shape[0] == one.columns else Dialect.GPTQ
        if f"{module}.weight_packed" in tensors:
            return Dialect.COMPRESSED
    signs = (  # the inverse has NVFP4 as modelopt does
        (Dialect.BLOCK, SUFFIXES[Dialect.BLOCK].block_scale),
        (Dialect.COMPRESSED, SUFFIXES[Dialect.COMPRESSED].fp4_global),
        (Dialect.MODELOPT, SUFFIXES[Dialect.MODELOPT].fp4_global),
    )
    for dialect, suffix in signs:
        if any(f"{module}.{suffix}" in tensors for module in modules):
            return dialect
    blocks = (_is_blocks(one, tensors, f"{module}.weight_scale") for module, one in modules.items())
    return Dialect.MODELOPT if usual is Dialect.BLOCK and any(blocks) else usual


def _is_blocks(linear: Linear, tensors: Files, scale: str) -> bool:
    """True if an FP8 weight's scale is of blocks, not of rows."""
    weight = tensors.get(f"{scale.rpartition('.')[0]}.weight")
    found = tensors.get(scale)
    if weight is None or weight.dtype is not DType.F8E4M3 or found is None:
        return False
    shape = found.shape[::2] if len(found.shape) == 4 else found.shape
    return tuple(shape) == (-(-linear.stored.rows // 128), -(-linear.columns // 128))


def _scheme(
    linear: Linear, module: str, tensors: Files, dialect: Dialect, rounds_inputs: bool
) -> Scheme:
    names = SUFFIXES[dialect]
    if f"{module}.{names.fp4_global}" in tensors:
        rounded = rounds_inputs and f"{module}.{names.fp4_input}" in tensors
        return Scheme.NVFP4_A4 if rounded else Scheme.NVFP4
    weight = tensors.get(f"{module}.weight")
    if weight is None or weight.dtype is not DType.F8E4M3:
        return Scheme.PLAIN
    inverse = f"{module}.{SUFFIXES[Dialect.BLOCK].block_scale}" in tensors
    if inverse or _is_blocks(linear, tensors, f"{module}.{names.block_scale}"):
        return Scheme.FP8_BLOCK
    return Scheme.FP8 if f"{module}.input_scale" in tensors else Scheme.FP8_CHANNEL


def _int4_scheme(module: str, tensors: Files, columns: int) -> Scheme | None:
    """The scheme of an int4 projection in the file, by the number of its groups."""
    groups, axis = tensors.get(f"{module}.scales"), 0
    packed = tensors.get(f"{module}.weight_packed")
    if packed is not None and packed.dtype is DType.I32:
        groups, axis = tensors.get(f"{module}.weight_scale"), 1
    if groups is None or len(groups.shape) != 2:
        return None
    stored = not axis or f"{module}.weight_zero_point" in tensors
    return INT4.get((columns // max(1, groups.shape[axis]), not stored))
