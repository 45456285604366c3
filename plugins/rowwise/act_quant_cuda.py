"""The CUDA side of the element-wise ops: silu_mul, sigmoid_gate, act_quant, the *_quant ops.

All are one kernel, `act_quant.cu`: an activation (or none), then bf16 and quantised copies.
"""

from __future__ import annotations

from collections.abc import Callable

from spark_engine.kernel import (
    NULL,
    Attrs,
    Cuda,
    Early,
    Launch,
    Plan,
    Pointer,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common import row_quant_cuda as rq

SOURCE = "rowwise/act_quant.cu"
THREADS = 256
_ACT = {"none": 0, "silu_mul": 1, "sigmoid_gate": 2}
Whole = Callable[[Attrs], Attrs]


def _width(attrs: Attrs, specs: Specs) -> int:
    """Columns of y."""
    k = specs[0].dims[1]
    return k // 2 if attrs["act"] == "silu_mul" else k


def _activations(attrs: Attrs, specs: Specs) -> Specs:
    return specs[: 2 if attrs["act"] == "sigmoid_gate" else 1]


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    used = _activations(attrs, specs)
    k = _width(attrs, specs)
    reason = rq.refuse_rows(used, k) or rq.refuse_copies(attrs)
    if reason is None and attrs["act"] == "sigmoid_gate":
        for what, value in (("head_dim", int(attrs["head_dim"])), ("qkv's row", used[1].dims[1])):
            if value % rq.VECTOR:
                return f"{what} is {value}; 16-byte loads want a multiple of {rq.VECTOR}"
    return reason


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    k, rows = _width(attrs, specs), specs[0].dims[0]
    used = len(_activations(attrs, specs))
    threads = min(THREADS, rq.whole_warps(-(-k // rq.VECTOR)))
    chunks = -(-k // (threads * rq.VECTOR))
    gates = {"HEAD_DIM": int(attrs["head_dim"]), "QKV": specs[1].dims[1]} if used == 2 else {}
    act = _ACT[str(attrs["act"])]
    args = (
        Pointer("input", 0),
        Pointer("input", 1) if used == 2 else NULL,
        Pointer("input", used) if rq.takes_scales(attrs) else NULL,
        *rq.outputs(attrs, int(attrs["keep"])),
    )
    defines = rq.defines(attrs, k, THREADS=threads, ACT=act, **gates)
    launch = Launch(
        "act_quant", (chunks, rows, 1), (threads, 1, 1), args, 0, (1, 1, 1), defines, True,
        early=Early(begins=True, lets=True),
    )  # fmt: skip
    return Plan((launch,))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    made = specs[0].dims[0] * _width(attrs, specs) * (2 * int(attrs["keep"]) + int(attrs["n"]))
    return rq.seconds(_activations(attrs, specs), made, target)


def _cuda(whole: Whole) -> Cuda:
    """The tactic for an op whose attributes `whole` completes to those of act_quant."""
    return Cuda(
        (
            Tactic(
                "elementwise",
                SOURCE,
                lambda attrs, specs, target: _refuse(whole(attrs), specs, target),
                lambda attrs, specs, target: _plan(whole(attrs), specs, target),
                lambda attrs, specs, target: _cost(whole(attrs), specs, target),
            ),
        )
    )


def _alone(act: str, quant: str) -> Whole:
    keep = int(quant == "none")
    return lambda attrs: {**attrs, "act": act, "quant": quant, "keep": keep, "n": 1}


ACT_QUANT = _cuda(lambda attrs: attrs)
SILU_MUL = _cuda(_alone("silu_mul", "none"))
SIGMOID_GATE = _cuda(_alone("sigmoid_gate", "none"))
FP8_QUANT = _cuda(_alone("none", "fp8"))
FP8_BLOCK_QUANT = _cuda(_alone("none", "fp8_block"))
NVFP4_QUANT = _cuda(_alone("none", "nvfp4"))
