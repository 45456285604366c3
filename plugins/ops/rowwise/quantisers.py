"""The stand-alone quantisers of activations, an op for the formats that share it (`Format.inputs`).

fp8_quant          codes = e4m3(clamp(x / scale, ±448)), with the checkpoint's scale, amax/448
                   of calibration (TensorRT Model Optimizer). `by_token`: with a token's own
                   amax/448, 1 if 0 (compressed-tensors' FP8_DYNAMIC). `halves`: the codes of
                   each 16 columns are those of 8, 0, 9, 1, … (plugins/formats/nvfp4.py)
fp8_block_quant    the same with a scale for each 128 columns of a token; the last block may be
                   narrower (DeepSeek-V3, section 3.3)
nvfp4_quant        x_scale = e4m3(clamp((amax of 16 columns/6) / scale, ±448)), codes =
                   e2m1(x / scale / x_scale), 0 where x_scale is 0 (TensorRT Model Optimizer;
                   vLLM's NVFP4 emulation agrees)
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats.format import Format, Inputs
from spark_engine.plugins.formats.numpy_codecs import NVFP4_BLOCK
from spark_engine.plugins.formats.quantised import quant_of
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec

CALLED = {"scale": "scales", "codes": "q0", "x_scale": "s0"}  # by act_quant's kernels


def _op_of(forms: dict[str, tuple[Format, Inputs]], name: str) -> Op:
    """The quantiser of the formats with these names in `quant`."""
    made: dict[str, Result] = {}
    scales: dict[str, Operand] = {}
    for form, inputs in forms.values():
        named = {o.name: o for o in form.operands}
        for result, operand in zip(("codes", "x_scale"), inputs.makes, strict=False):
            made.setdefault(result, Result(result, named[operand].spec, named[operand].when))
        if form.static:
            when = named[inputs.scale].when
            scales.setdefault("scale", Operand("scale", Role.SCALE, "f32[]", when))

    def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """(x, [scale]) -> (codes, [x_scale])."""
        x, *scale = (a.astype(np.float32) for a in arrays)
        return forms[quant_of(name, attrs)][1].quantise(x, *scale or [np.ones((), np.float32)])

    def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
        """The fragment of the format."""
        f, k = Text(), op.named(attrs, specs).dim("K")
        outs = [r.name for r in op.made(attrs)]
        forms[quant_of(name, attrs)][1].quantise_body(f, widen(f, "x"), "scale", k, outs)
        return f.function(name, op.names(attrs, len(specs)), outs)

    op = Op(
        name=name,
        operands=(operands.x(), *scales.values()),
        results=tuple(made.values()),
        attrs={attr: 0 for _, inputs in forms.values() for attr in inputs.attrs},
        check=_check,
        reference=reference,
        body=body,
        quantises=True,
    )
    return serve(
        op,
        act_quant_kernels.CANDIDATES,
        whole=lambda attrs: act_quant_kernels.alone("none", quant_of(name, attrs))(attrs),
        called=CALLED,
    )


def _check(node: Named) -> str | None:
    k = node.dim("K")
    if node.attrs.get("halves") and (k % NVFP4_BLOCK or not node.number("by_token")):
        return f"K is {k}; halves is for scales by token and for whole blocks of {NVFP4_BLOCK}"
    return None


_ALL = [(form, form.inputs) for form in FORMATS.values() if form.inputs is not None]
OPS = tuple(
    _op_of({i.quant: (form, i) for form, i in _ALL if i.op == name}, name)
    for name in dict.fromkeys(i.op for _, i in _ALL)
)
