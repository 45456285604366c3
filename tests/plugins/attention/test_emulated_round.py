"""Attention over a round of drafts on the host, thread by thread: teams have one token's bits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from spark_engine.builder.native.nvrtc import Defines
from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Attrs
from spark_engine.plugins.ops.attention import attention_decode
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.attention.paged_attention import Launch

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP, TILE = attention_decode.OP, 4
# The first row has its first tokens; the second's round begins in a tile of 16 and ends in the
# next, and a warp's ring of stages wraps; the third's ends with a chunk; the last is not there.
SLOTS, STARTS, COUNTS = (1, 0, 2, -1), (0, 973, 125, 9), (4, 4, 3, 0)
FOLLOWED = (("FOLLOWED", "1"),)  # as compute-sanitizer has it (benchmarks/rehearsal/sanitized.py)
Sizes = tuple[int, int, int]  # heads, kv heads, dimensions
FORMS = [
    (H200, DType.F8E4M3, (3, 1, 128), "8_chunks_1024_3", 4),
    (H200, DType.BF16, (3, 1, 128), "8_chunks_1024_6", 2),
    (GB10, DType.F8E4M3, (20, 2, 128), "chunks_128_4", 4),  # ten share a kv head
    (H200, DType.F8E4M3, (3, 1, 256), "chunks_256_3", 4),  # a team's last step is not full
    (GB10, DType.BF16, (3, 1, 256), "chunks_128_4", 4),  # merges a query at a time
]


def given(kv: DType, sizes: Sizes) -> tuple[Attrs, tuple[Array, ...]]:
    """A node and its operands, with scores that rise late; what is not there has gates alone."""
    launch = Launch(TILE, SLOTS, STARTS, COUNTS, *sizes, 16, kv=kv, dtype=DType.BF16)
    qkv, *rest = launch.inputs(np.random.default_rng(7))
    size = 2 * launch.heads * launch.dim
    pairs = qkv[:, :size].reshape(-1, launch.heads, 2, launch.dim)
    dead = (np.arange(TILE) >= np.asarray(COUNTS)[:, None]).reshape(-1)
    pairs[dead, :, 1] = 1
    qkv[:, :size] = pairs.reshape(len(qkv), -1)
    rest[0] *= 4  # the queries' norm
    attrs = {**launch.attrs, "keep": 1, "quant": "fp8", "n": 1}
    return attrs, (qkv, *rest, np.asarray([0.01], np.float32))


def run(
    tactic: str,
    attrs: Attrs,
    arrays: tuple[Array, ...],
    target: Target,
    cache: Path,
    late: bool,
    macros: Defines = (),
) -> list[Array]:
    few = replace(target, card=replace(target.card, sms=2))  # a block has several items
    return emulated.results(OP, tactic, attrs, arrays, few, cache, late, macros)


def tokens(arrays: tuple[Array, ...]) -> Iterator[tuple[Array, ...]]:
    """The launch of each token of every row, without the pages that the ones before made."""
    qkv, *rest = arrays
    for t in range(TILE):
        there = np.asarray(COUNTS) > t
        token = np.ascontiguousarray(qkv.reshape(len(COUNTS), TILE, -1)[:, t])
        steps = (np.where(there, SLOTS, -1), np.asarray(STARTS) + t, there)
        yield (token, *rest[:8], *(np.asarray(s, np.int32) for s in steps), *rest[11:])


@pytest.mark.parametrize(
    ("target", "kv", "sizes", "name", "team"), FORMS, ids=lambda v: str(v)[:20]
)
def test_a_team_has_the_bits_of_single_tokens(
    target: Target, kv: DType, sizes: Sizes, name: str, team: int, cache: Path
) -> None:
    attrs, arrays = given(kv, sizes)
    (tactic,) = (t for t in OP.cuda.tactics if t.name == name)
    (launch,) = tactic.plan(attrs, cuda_node.specs_of(OP, attrs, arrays), target).launches
    assert dict(launch.defines)["TEAM"] == str(team)
    keys, values, *got = run(name, attrs, arrays, target, cache, late=True)
    pages, parts = list(arrays[6:8]), []
    for token in tokens(arrays):
        operands = (*token[:6], *pages, *token[8:])
        *pages, y, codes = run(name, {**attrs, "tile": 1}, operands, target, cache, late=True)
        parts.append((y, codes))
    live = np.arange(TILE) < np.asarray(COUNTS)[:, None]
    for made, single in zip(got, zip(*parts, strict=True), strict=True):
        want = np.stack(single, axis=1)
        assert made.reshape(want.shape)[live].tobytes() == want[live].tobytes()
    for made, want in zip((keys, values), pages, strict=True):
        assert made[:-1].tobytes() == want[:-1].tobytes()
    _, _, y, _ = OP.reference(attrs, arrays)
    shape = (len(COUNTS), TILE, -1)
    assert got[0].dtype == ml_dtypes.bfloat16
    near = got[0].reshape(shape)[live].astype(float), y.reshape(shape)[live].astype(float)
    np.testing.assert_allclose(*near, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kv", [DType.F8E4M3], ids=str)
def test_copies_that_arrive_at_once_overwrite_nothing(kv: DType, cache: Path) -> None:
    attrs, arrays = given(kv, FORMS[0][2])
    early, late = (run(FORMS[0][3], attrs, arrays, H200, cache, late=x) for x in (False, True))
    assert [x.tobytes() for x in early[2:]] == [x.tobytes() for x in late[2:]]


@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=lambda form: form[3])
def test_in_the_form_for_racecheck_all_warps_pass_as_many_barriers(
    form: tuple[Target, DType, Sizes, str, int], cache: Path
) -> None:
    target, kv, sizes, name, _ = form
    attrs, arrays = given(kv, sizes)
    served, followed = (run(name, attrs, arrays, target, cache, True, m) for m in ((), FOLLOWED))
    assert [x.tobytes() for x in served] == [x.tobytes() for x in followed]
