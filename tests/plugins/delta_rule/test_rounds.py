"""Rounds of drafts through the gated delta net: however tokens are cut into rounds and whatever was
rejected in between, each has the bits that it has alone, and so have the states' values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Op
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta, gdn_decode
from spark_engine.plugins.state.replay_ring import Ring, ring_behind, ring_records
from spark_engine.tensors import Array, DType
from tests.plugins import one_node
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases
from tests.plugins.cases.delta_rule import gdn_decode as gdn_decode_cases

SLOT, OTHER, UNITS, TOKENS = 2, 0, 3, 44
Compute = Callable[[Op, Attrs, dict[str, Array]], Sequence[Array]]


@dataclass(frozen=True)
class Part:
    """Tokens start … start + count of a row, of which `kept` are accepted; a prompt's are all."""

    start: int
    count: int
    kept: int
    prompt: bool = False


def one_by_one(tokens: int, prompts: dict[int, int]) -> list[Part]:
    """`prompts`: where prefills begin and how many tokens they have."""
    parts, at = [], 0
    while at < tokens:
        n = prompts.get(at, 1)
        parts.append(Part(at, n, n, at in prompts))
        at += n
    return parts


def in_rounds(
    tokens: int, tile: int, prompts: dict[int, int], rng: np.random.Generator
) -> list[Part]:
    """Rounds of random size of which a random part is kept, and between them the prompts."""
    parts: list[Part] = []
    at = 0
    while at < tokens:
        if at in prompts:
            parts.append(Part(at, prompts[at], prompts[at], True))
        else:
            end = min([p for p in prompts if p > at], default=tokens)
            count = int(rng.integers(1, tile + 1))
            parts.append(Part(at, count, min(int(rng.integers(1, count + 1)), end - at)))
        at += parts[-1].kept
    return parts


class Sequence_:
    """One sequence through the ops, its states kept; what must not be read is NaN.

    A rejected token's columns are random, those of an accepted one the sequence's own.
    """

    def __init__(
        self,
        launch: gated_delta_cases.Launch,
        compute: Compute,
        fused: bool,
        tokens: int = TOKENS,
    ) -> None:
        self.launch, self.compute, self.fused = launch, compute, fused
        rng = np.random.default_rng(17)
        whole = replace(launch, tile=1, slots=(SLOT,) * tokens, starts=tuple(range(tokens)))
        whole = replace(whole, counts=(1,) * tokens, units=UNITS)
        arrays = gdn_decode_cases.Launch(whole).inputs(rng)
        attrs = gdn_decode_cases.Launch(whole).attrs
        self.given = dict(zip(gdn_decode.OP.names(attrs, len(arrays)), arrays, strict=True))
        self.states = {
            n: np.full_like(self.given[n], np.nan) for n in ("conv_state", "gdn_state", "gdn_ring")
        }
        self.noise = np.random.default_rng(5)

    def go(self, part: Part) -> Array:
        tile = 64 if part.prompt else self.launch.tile
        row = {"slots": [SLOT, -1], "starts": [part.start, 9], "counts": [part.count, 0]}
        row |= {"sources": row["slots"], "saves": [-1, -1]}
        steps = {n: np.asarray(x, np.int32) for n, x in row.items()}
        operands = {**self.given, **self.states, **steps}
        for name in ("qkvz", "ba"):
            own = self.given[name][part.start : part.start + part.kept]
            wild = self.noise.standard_normal((part.count - part.kept, own.shape[1])) * 3
            cut = np.concatenate([own.astype(np.float64), wild])
            cut = np.pad(cut, ((0, 2 * tile - part.count), (0, 0)), constant_values=np.nan)
            operands[name] = cut.astype(own.dtype)
        return self._run(operands, tile)[: part.kept]

    def _run(self, operands: dict[str, Array], tile: int) -> Array:
        launch = gdn_decode_cases.Launch(replace(self.launch, tile=tile))
        if self.fused and tile < 64:
            outs = self._call(gdn_decode.OP, launch.attrs, operands)
            return outs[len(self.states)]
        attrs: Attrs = {"tile": tile, "drafts": self.launch.drafts}  # of the convolution
        operands |= {"x": operands["qkvz"], "weight": operands["conv_weight"]}
        (operands["c"], *_) = self._call(causal_conv.OP, attrs, operands)
        op = gated_delta.STEP if tile < 64 else gated_delta.CHUNK
        return self._call(op, launch.delta.attrs, operands)[0]

    def _call(self, op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
        names = [n for n in op.names(attrs, 99) if n in operands]
        outs = self.compute(op, attrs, {n: operands[n] for n in names})
        for result, array in zip(op.made(attrs), outs, strict=False):
            if result.updates:
                self.states[result.updates] = array
        return outs

    def after_one_more(self, end: int, states: dict[str, Array]) -> list[bytes]:
        """What a single token at `end` leaves of `states`: all that was due is folded by then. The
        state, the header, the records that it lags behind, the convolution's columns."""
        single = Sequence_(replace(self.launch, tile=1), self.compute, self.fused)
        single.states = dict(states)
        single.go(Part(end, 1, 1))
        records, columns = (single.states[n][SLOT] for n in ("gdn_ring", "conv_state"))
        ring = self.launch.layout
        places = np.arange(int(ring.since(records, end + 1).min()), end + 1) % ring.records
        recent = np.arange(max(0, end - 3), end + 1) % len(columns)
        used = records[places, : ring.decays + ring.heads.values]
        header = records[-1, : 2 * ring.heads.values]
        state = single.states["gdn_state"][SLOT]
        return [x.tobytes() for x in (state, header, used, columns[recent])]


def by_reference(op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
    return op.reference(attrs, tuple(operands.values()))


class ByBody:
    """The bodies on onnxruntime; a session serves all launches of its shapes."""

    def __init__(self) -> None:
        self._sessions: dict[object, Any] = {}

    def __call__(self, op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
        forms = ((n, a.shape, a.dtype) for n, a in operands.items())
        key = op.name, tuple(attrs.items()), tuple(forms)
        if key not in self._sessions:
            specs = tuple(one_node.spec_of(n, a) for n, a in operands.items())
            outs = [s.name for s in op.infer(attrs, specs)]
            node = one_node.Node(op, list(operands), [f"out_{n}" for n in outs], attrs)
            session, known = one_node.build([node], operands, node.outputs)
            self._sessions[key] = session, [known[n] for n in node.outputs]
        session, made = self._sessions[key]
        return list(one_node.execute(session, operands, made).values())


by_body = ByBody()


def followed(sequence: Sequence_, parts: list[Part]) -> Iterator[tuple[int, Array]]:
    """After each part: the tokens so far and the y of the part's."""
    for part in parts:
        y = sequence.go(part)
        for other in set(range(UNITS)) - {SLOT}:
            for array in sequence.states.values():
                assert np.isnan(array[other].astype(np.float32)).all(), "a bystander changed"
        yield part.start + part.kept, y


FORMS = {
    "f32": gated_delta_cases.Launch(1, (), (), (), 2, 4, 16, 32, ring=8, drafts=3),
    "bf16 state": gated_delta_cases.Launch(
        1, (), (), (), 2, 4, 16, 32, DType.BF16, DType.BF16, ring=8, drafts=3
    ),
    "short ring": gated_delta_cases.Launch(1, (), (), (), 1, 3, 16, 32, ring=2, drafts=3),
    "many drafts": gated_delta_cases.Launch(1, (), (), (), 2, 2, 16, 16, ring=4, drafts=7),
}
PROMPTS = {"from nothing": {}, "prompts between": {0: 5, 19: 7, 33: 2}}


def check_rounds(
    launch: gated_delta_cases.Launch, where: dict[int, int], compute: Compute, fused: bool
) -> None:
    """Rounds of up to two tokens and of as many as there can be against single tokens."""
    single, states, want = Sequence_(launch, compute, fused), {}, []
    for end, y in followed(single, one_by_one(TOKENS - 8, where)):
        states[end] = dict(single.states)
        want.extend(y)
    for tile in (2, launch.drafts + 1):
        parts = in_rounds(TOKENS - 8, tile, where, np.random.default_rng(tile))
        assert any(p.kept < p.count for p in parts) and any(p.kept > 1 for p in parts)
        drafted = Sequence_(replace(launch, tile=tile), compute, fused)
        for i, (end, y) in enumerate(followed(drafted, parts)):
            assert y.tobytes() == np.asarray(want[end - len(y) : end]).tobytes(), f"before {end}"
            if i % 4 == 3 or end >= TOKENS - 8:
                left = drafted.after_one_more(end, drafted.states)
                assert left == single.after_one_more(end, states[end]), f"states before {end}"


@pytest.mark.parametrize("fused", [False, True], ids=["parts", "fused"])
@pytest.mark.parametrize("compute", [by_reference, by_body], ids=["reference", "body"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("form", FORMS)
def test_rounds_give_the_bits_of_single_tokens(
    form: str, prompts: str, compute: Compute, fused: bool
) -> None:
    check_rounds(FORMS[form], PROMPTS[prompts], compute, fused)


def test_the_layout_of_a_ring_with_drafts() -> None:
    launch = FORMS["many drafts"]
    ring = launch.layout
    assert (ring.records, ring.rows) == (4 + 14, 4 + 14 + 1)
    assert ring_records(8, 3) == 15 and ring_records(8, 0) == 8
    plain = Ring(4, replace(ring.heads, tile=1), 7)
    assert ring_behind((2, 16, 16), (ring.rows, ring.width), 7) == plain
    assert causal_conv.conv_rows(4, 3) == 7 and causal_conv.conv_rows(4, 0) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 5}, "a tile of 5 tokens; a round has up to 4"),
        ({"ring": 0}, "3 drafts over a ring of 0 records"),
        ({"drafts": 8}, "8 drafts over a ring of 8"),
    ],
)
def test_what_no_round_can_be_is_refused(change: Attrs, message: str) -> None:
    launch = replace(FORMS["f32"], tile=4, slots=(1,), starts=(3,), counts=(4,))
    arrays = launch.inputs(np.random.default_rng(0))
    names = gated_delta.STEP.names(launch.attrs, 99)
    specs = [one_node.spec_of(n, a) for n, a in zip(names, arrays, strict=True)]
    attrs = {**launch.attrs, **change}
    if not attrs["ring"]:
        specs.pop(names.index("gdn_ring"))
    with pytest.raises(GraphError, match=message):
        gated_delta.STEP.infer(attrs, tuple(specs))
