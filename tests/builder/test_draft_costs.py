"""What drafting costs, by hand."""

from dataclasses import replace

from spark_engine.builder.draft_costs import draft_costs
from spark_engine.interface import Limits
from spark_engine.manifest import Bucket, Manifest, StateInfo
from spark_engine.tensors import DType, TensorSpec

STATES = (
    StateInfo(TensorSpec("positions", DType.I32, (3,)), "slot"),  # 12
    StateInfo(TensorSpec("drafts", DType.I32, (3, 2)), "slot"),  # 24
    StateInfo(TensorSpec("token_counts", DType.I32, (3, 9)), "slot"),
    StateInfo(TensorSpec("layers.0.gdn_state", DType.F32, (3, 1, 8, 8)), "slot"),
    StateInfo(TensorSpec("layers.0.gdn_ring", DType.F32, (3, 13, 16)), "slot"),  # 5 of 13 records
    StateInfo(TensorSpec("layers.0.conv_state", DType.BF16, (3, 6, 10)), "slot"),  # 3 of 6 columns
    StateInfo(TensorSpec("layers.1.k_pages", DType.U8, (5, 1, 64, 8)), "page"),
    StateInfo(TensorSpec("mtp.k_pages", DType.U8, (5, 1, 64, 8)), "page"),  # 2560
)
BUCKETS = (
    Bucket("decode", 1, 1, "a", 0, cost_us=100.0),
    Bucket("decode", 8, 1, "b", 0, cost_us=200.0),
    Bucket("decode", 64, 1, "c", 0, cost_us=400.0),
    Bucket("prefill", 1, 64, "d", 0, cost_us=900.0),
    Bucket("verify_k2", 1, 3, "e", 0, cost_us=130.0),
    Bucket("verify_k1", 1, 2, "f", 0, cost_us=115.0),
    Bucket("verify_k2", 8, 3, "g", 0, cost_us=300.0),
    Bucket("verify_k1", 64, 2, "h", 0, cost_us=900.0),
)
WEIGHTS = [TensorSpec(n, DType.U8, (1000,)) for n in ("mtp.fc.weight", "lm_head.weight")]


def manifest(drafts: int, timed: bool = True) -> Manifest:
    made: Manifest = object.__new__(Manifest)
    limits = replace(Limits(2, 256, 4, 9), drafts=drafts, gdn_ring=8)
    rows = ({"timed": False}, {"timed": timed})
    given = {"limits": limits, "states": STATES, "buckets": BUCKETS, "tactics": rows}
    for name, value in given.items():
        object.__setattr__(made, name, value)
    return made


def test_bytes_and_rounds() -> None:
    ring, columns = 3 * 5 * 16 * 4, 3 * 3 * 10 * 2
    taken, one, many = draft_costs(manifest(2), WEIGHTS)
    assert "1000 B of weights" in taken and "2.50 KiB of KV pages" in taken
    assert f"{(12 + 24 + ring + columns) / 1024:.2f} KiB of states" in taken
    assert one == (
        "verify_k2 of 1 rows takes 130 us, decode 100: drafts pay there from 1.30 tokens of a row "
        "each round on"
    )
    assert many.startswith("verify_k1 of 64 rows takes 900 us, decode 400: drafts pay there from 2")


def test_times_that_nothing_measured_are_called_predicted() -> None:
    _, one, _ = draft_costs(manifest(2, timed=False), WEIGHTS)
    assert "takes 130 us, decode 100 (predicted): drafts pay" in one


def test_an_engine_without_drafts_says_nothing() -> None:
    assert draft_costs(manifest(0), WEIGHTS) == ()
