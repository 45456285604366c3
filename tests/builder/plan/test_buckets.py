"""Bucket sizes, defaults of options, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from spark_engine.builder.plan import buckets, budget
from spark_engine.builder.plan.drafts import HeadFacts
from spark_engine.builder.plan.options import KV_BUDGET, ModelFacts, Options, gpu_of, resolve
from spark_engine.errors import OptionError
from spark_engine.interface import Limits
from spark_engine.kernel import CARDS, GB10, H200
from spark_engine.tensors import DType

FACTS = ModelFacts(262144, 1000, 2 * 2 * 2 * 64, None, None)
NO_HEAD = "the checkpoint has no draft head: built without drafts"


@pytest.mark.parametrize(
    ("most", "rows"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 32)), (5, (1, 2, 4, 5))],
)
def test_decode_rows(most: int, rows: tuple[int, ...]) -> None:
    assert buckets.decode_rows(most) == rows


@pytest.mark.parametrize(
    ("most", "rows"),
    [
        (1, (1,)),
        (16, (1, 2, 4, 8, 16)),
        (24, (1, 2, 4, 8, 16, 24)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (65, (1, 2, 4, 8, 16, 24, 32, 48, 64, 65)),
        (100, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)),
        (128, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)),
    ],
)
def test_a_gpus_decode_rows(most: int, rows: tuple[int, ...]) -> None:
    """65 rows alive run 96, not 128."""
    assert buckets.fine_decode_rows(most) == rows
    plan = resolve(Options(target="sm_90a", max_seqs=most, max_context=64), FACTS)
    assert tuple(size.rows for size in plan.buckets.decode) == rows


@pytest.mark.parametrize(
    ("most", "rows"),
    [
        (2, ()),
        (4, (3,)),
        (16, (3, 6, 12)),
        (64, (3, 6, 12, 20, 28, 40, 56)),
        (128, (3, 6, 12, 20, 28, 40, 56, 80, 112)),
    ],
)
def test_sizes_that_a_build_may_add_are_between_those_that_it_has(
    most: int, rows: tuple[int, ...]
) -> None:
    assert buckets.finer_rows(most) == rows


def test_finer_sizes_are_for_families_that_were_not_named_and_not_for_equal_bits() -> None:
    given: dict[str, Any] = {"target": "sm_90a", "max_seqs": 16, "max_context": 64}
    both = resolve(Options(**given), FACTS).finer
    assert [s.rows for s in both if s.family == "decode"] == [3, 6, 12]
    assert [s.dims["tokens"] for s in both if s.family == "prefill"] == [192, 384, 768, 1536, 3072]
    assert {s.family for s in resolve(Options(**given, decode=(16,)), FACTS).finer} == {"prefill"}
    assert {s.family for s in resolve(Options(**given, prefill=(64,)), FACTS).finer} == {"decode"}
    assert resolve(Options(**given, invariant=True), FACTS).finer == ()
    assert resolve(Options(), FACTS).finer == ()
    small = resolve(Options(target="sm_121a", max_seqs=16, max_context=64), FACTS).finer
    assert max(s.dims["tokens"] for s in small if s.family == "prefill") == 768


def test_sizes_bind_dims_and_name_files() -> None:
    decode, prefill = buckets.Size("decode", 4), buckets.Size("prefill", 4)
    assert decode.dims == {"rows": 4, "tokens": 4} and decode.file == "decode_b4.engine"
    assert prefill.dims == {"rows": 4, "tokens": 256} and prefill.file == "prefill_t256.engine"


def test_wishes_are_sorted_and_the_largest_holds_every_sequence() -> None:
    found = buckets.bucket_sizes((4, 1, 4), (256, 64), Limits(6, 128, 8, 9))
    assert [s.rows for s in found.decode] == [1, 4, 6]
    assert [s.dims["tokens"] for s in found.of("prefill")] == [64, 256]


@pytest.mark.parametrize(
    ("decode", "prefill", "words"),
    [
        *(((0, 1), None, "--decode 0,1"), ((9,), None, "--max-seqs")),
        *((None, (65,), "--prefill 65"), (None, (), "--prefill : give multiples of 64")),
        (None, (64, 10**20), "--prefill 64,1.* up to 67108864"),
    ],
)
def test_bad_sizes(
    decode: tuple[int, ...] | None, prefill: tuple[int, ...] | None, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        buckets.bucket_sizes(decode, prefill, Limits(6, 128, 8, 9))


def test_parse() -> None:
    assert buckets.parse_sizes("--decode", "1, 2,4") == (1, 2, 4)
    for text in ("1,,2", "a", "", "-1", "1.5", "4,0"):
        with pytest.raises(OptionError, match=f"--decode {text}: .* is no number from 1"):
            buckets.parse_sizes("--decode", text)
    assert buckets.parse_rounds("--verify", "1:3, 16:2") == ((1, 3), (16, 2))
    for text in ("1", "1:", ":2", "1:2:3", "1:2,", "a:1", ""):
        with pytest.raises(OptionError, match="is not rows:drafts; write e.g. 1:3,8:2"):
            buckets.parse_rounds("--verify", text)


def test_a_bucket_that_verifies_has_a_token_more_than_drafts() -> None:
    size = buckets.Size("verify_k3", 16)
    assert (size.tile, size.dims) == (4, {"rows": 16, "tokens": 64})
    assert size.file == "verify_b16_k3.engine"


@pytest.mark.parametrize(
    ("drafts", "few", "many"),
    [
        *((0, (), ()), (1, (1,), (1,)), (2, (1, 2), (1, 2)), (3, (1, 2, 3), (1, 3))),
        *((4, (1, 2, 3, 4), (1, 3, 4)), (7, (1, 2, 3, 5, 7), (1, 3, 7))),
    ],
)
def test_rounds_of_few_rows_come_in_more_lengths(
    drafts: int, few: tuple[int, ...], many: tuple[int, ...]
) -> None:
    found = buckets.rounds((1, 16, 24, 128), drafts)
    by_rows = {rows: tuple(k for r, k in found if r == rows) for rows in (1, 16, 24, 128)}
    assert by_rows == {1: few, 16: few, 24: many, 128: many}


def test_every_decode_bucket_has_rounds_of_its_size() -> None:
    limits = Limits(24, 128, 8, 9, drafts=3)
    found = buckets.bucket_sizes((1, 8), None, limits)
    assert [(s.family, s.rows) for s in found.verify] == [
        *[("verify_k1", 1), ("verify_k1", 8), ("verify_k1", 24)],
        *[("verify_k2", 1), ("verify_k2", 8)],
        *[("verify_k3", 1), ("verify_k3", 8), ("verify_k3", 24)],
    ]
    assert [s.rows for s in found.of("verify_k2")] == [1, 8]
    assert found.families(3) == ("decode", "prefill", "verify_k1", "verify_k2", "verify_k3")
    assert len(found) == 3 + 2 + 8
    planned = buckets.bucket_sizes((1, 8), None, limits, ((8, 2), (1, 2), (8, 2)))
    assert [s.file for s in planned.verify] == ["verify_b1_k2.engine", "verify_b8_k2.engine"]
    assert planned.families(3) == ("decode", "prefill", "verify_k2")


def test_a_cpu_verifies_few_rows_with_every_draft() -> None:
    assert buckets.cpu_rounds((1, 2, 4, 8, 32), 3) == ((1, 3), (4, 3))
    assert buckets.cpu_rounds((1,), 3) == ((1, 3),) and buckets.cpu_rounds((8, 32), 3) == ()
    assert buckets.cpu_rounds((1, 2), 0) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (((0, 1),), "--verify 0:1: rows run from 1 to --max-seqs .4"),
        (((5, 1), (4, 1)), "--verify 5:1: rows"),
        (((1, 0),), "--verify 1:0: drafts run from 1 to --drafts .2"),
        (((4, 3),), "--verify 4:3: drafts"),
    ],
)
def test_bad_rounds(given: tuple[tuple[int, int], ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        buckets.bucket_sizes(None, None, Limits(4, 128, 8, 9, drafts=2), given)


def test_defaults() -> None:
    plan = resolve(Options(), FACTS)
    assert plan.target == "cpu"
    assert (plan.limits.max_context, plan.limits.max_seqs) == (4096, 32)
    assert plan.limits.pages == 32 * 64 and plan.notes == (NO_HEAD,)
    assert plan.precision.activation is plan.precision.kv is plan.precision.state is DType.F32
    assert [s.rows for s in plan.buckets.decode] == [1, 2, 4, 8, 16, 32]
    assert [s.rows for s in plan.buckets.prefill] == [1, 4]


def test_the_checkpoint_decides_auto_dtypes() -> None:
    facts = ModelFacts(100, 10, 64, DType.F8E4M3, DType.BF16)
    plan = resolve(Options(), facts)
    assert plan.precision.kv is DType.F8E4M3 and plan.precision.kv_storage is DType.U8
    assert plan.precision.state is DType.BF16 and plan.limits.max_context == 100
    planned = resolve(Options(kv_dtype="bf16", state_dtype="f32"), facts)
    assert planned.precision.kv is DType.BF16 and planned.precision.state is DType.F32
    fast, slow = (resolve(Options(target=t), facts).precision for t in ("sm_90a", "sm_121a"))
    assert fast.state is DType.BF16 and slow.state is DType.F16
    assert resolve(Options(target="sm_121a", state_dtype="f32"), facts).precision.state is DType.F32


def test_kv_is_capped_and_says_so() -> None:
    wide = ModelFacts(262144, 10, 1 << 15, None, None)
    plan = resolve(Options(max_context=8192), wide)
    used = plan.limits.pages * 64 * wide.kv_token_width * 4
    assert KV_BUDGET * 0.9 < used <= KV_BUDGET
    assert "--kv-tokens" in plan.notes[1]
    long = resolve(Options(max_context=262144, max_seqs=2), wide)
    assert long.limits.pages == long.limits.pages_per_seq == 4096


GIB = 1 << 30
# 27B: 48 layers of 48 heads of 128 x 128, 16 layers of 4 heads of 256.
DENSE = ModelFacts(262144, 248320, 32768, DType.F8E4M3, None, 21 * GIB, 37748736, 1474560)


def test_a_gpus_memory_is_shared_out() -> None:
    plan = resolve(Options(target="sm_90a"), DENSE)
    limits = plan.limits
    assert (limits.max_seqs, limits.max_context) == (128, 32768)
    assert [s.rows for s in plan.buckets.decode] == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    tokens = [s.dims["tokens"] for s in plan.buckets.prefill]
    assert tokens == [64, 128, 256, 512, 1024, 2048, 4096]
    mixture = resolve(Options(target="sm_90a"), replace(DENSE, experts=True))
    assert mixture.buckets.prefill[-1].dims["tokens"] == 8192
    small = resolve(Options(target="sm_121a"), replace(DENSE, experts=True))
    assert small.buckets.prefill[-1].dims["tokens"] == 1024
    kv = (limits.pages + 1) * limits.page_size * DENSE.kv_token_width
    states = 129 * (37748736 * 4 + 1474560 * 2 + 248320 * 4)
    total = kv + states + int(1.05 * DENSE.weight_bytes) + budget.WORKSPACE
    left = 128 * (37748736 * 4 + 1474560 * 2)  # for a snapshot of each sequence
    assert 0.89 * H200.card.memory < total + left <= 0.9 * H200.card.memory
    assert "fit the memory of the target" in plan.notes[1]
    small = resolve(Options(target="sm_121a"), DENSE)
    assert small.limits.pages < limits.pages and small.buckets.prefill[-1].rows == 16


def test_snapshots_take_their_part_of_a_gpus_memory() -> None:
    """Rows that the runtime allocates: left free of pages, and not among the limits."""
    page = 64 * DENSE.kv_token_width
    none, some, usual = (
        resolve(Options(target="sm_90a", cache_gib=n), DENSE).limits for n in (0, 2.5, None)
    )
    assert {limits.snapshots for limits in (none, some, usual)} == {0}
    assert abs((none.pages - some.pages) * page - 2.5 * GIB) <= page
    one = 37748736 * 4 + 1474560 * 2
    assert abs((none.pages - usual.pages) * page - 128 * one) <= page
    crowded = [Options(target="sm_90a", max_seqs=400, cache_gib=n) for n in (0, None)]
    pages = [resolve(options, DENSE).limits.pages for options in crowded]
    assert abs(pages[1] - 3 / 4 * pages[0]) <= 2, "a quarter of what there is at most"


@pytest.mark.parametrize(
    ("seqs", "gib", "rows"),
    [(1, None, 16), (8, None, 32), (32, None, 67), (8, 0, 0), (8, 0.5, 33), (8, 80, 4096)],
)
def test_snapshots_of_the_cpu(seqs: int, gib: float | None, rows: int) -> None:
    """Four for each sequence in up to 1 GiB, or as many as the budget holds: 16 MB each here."""
    small = replace(DENSE, state_width=4_000_000, conv_width=0)
    options = Options(target="cpu", max_seqs=seqs, cache_gib=gib)
    assert resolve(options, small).limits.snapshots == rows
    assert resolve(options, FACTS).limits.snapshots == 0, "nothing is recurrent"


@pytest.mark.parametrize("gib", [-1, float("nan"), float("inf"), 1 << 20])
def test_a_budget_that_is_none_is_refused(gib: float) -> None:
    with pytest.raises(OptionError, match="--cache-gib .*GiB for the prefix cache, 0 for none"):
        resolve(Options(cache_gib=gib), DENSE)


def test_budgets_are_the_cards() -> None:
    """An engine for 80 GB asks for no more than those; each card fits its own."""
    total = {}
    for name, target in CARDS.items():
        plan = resolve(Options(card=name), DENSE)
        needs = DENSE.needs(plan.precision, plan.limits.page_size, plan.limits.gdn_ring)
        slots = (plan.limits.max_seqs + 1) * needs.slot
        total[name] = needs.weights + slots + (plan.limits.pages + 1) * needs.page
        assert plan.gpu == target and plan.target == target.name
        assert total[name] <= 0.9 * target.card.memory
    assert total["h100"] < total["gb10"] < total["h200"]
    planned = resolve(Options(target="sm_90a", card="h100"), DENSE)
    assert planned.limits == resolve(Options(card="h100"), DENSE).limits
    present = replace(H200, card=replace(H200.card, name="mine", memory=90 << 30))
    assert gpu_of(Options(), present) is present
    assert gpu_of(Options(target="sm_90a"), present) is present
    assert gpu_of(Options(target="sm_121a"), present) is GB10
    assert gpu_of(Options(card="h200"), present) is H200
    assert gpu_of(Options(target="cpu"), present) is gpu_of(Options()) is None
    mine = resolve(Options(target="sm_90a", gpu=present), DENSE)
    assert planned.limits.pages < mine.limits.pages and mine.gpu is present


def test_states_that_do_not_fit_make_fewer_sequences() -> None:
    wide = replace(DENSE, state_width=8 * DENSE.state_width)
    plan = resolve(Options(target="sm_90a"), wide)
    assert plan.limits.max_seqs == 32 and plan.buckets.decode[-1].rows == 32
    planned = resolve(Options(target="sm_90a", max_seqs=64, max_context=64), wide)
    assert planned.limits.max_seqs == 64 and planned.limits.pages == 64


def test_rings_behind_recurrent_states() -> None:
    """Eight records on a GPU, none on the CPU or without a recurrence, by default."""
    facts = replace(DENSE, record_width=48 * 8256)
    rings = [resolve(Options(target=t), facts).limits.gdn_ring for t in ("cpu", "sm_90a")]
    assert rings == [0, 8]
    assert resolve(Options(target="sm_90a", gdn_ring=0), facts).limits.gdn_ring == 0
    assert resolve(Options(gdn_ring=16), facts).limits.gdn_ring == 16
    assert resolve(Options(target="sm_121a"), FACTS).limits.gdn_ring == 0
    given = Options(target="sm_90a", cache_gib=0)
    planned, without = (resolve(replace(given, gdn_ring=n), facts) for n in (8, 0))
    page = 64 * facts.kv_token_width  # FP8
    taken = (without.limits.pages - planned.limits.pages) * page
    assert abs(taken - 129 * 8 * 48 * 8256 * 4) <= page


HEAD = HeadFacts(2048, 5120 * 2, True, (248046,))
DRAFTING = replace(DENSE, record_width=48 * 8256, conv_channels=48 * 10240, head=HEAD)


def test_drafts_take_their_part_of_the_memory() -> None:
    """Counted by hand: eight records more (two rounds of three, and a header: 7), four columns,
    the head's part of each page, and the logits of three more tokens a sequence."""
    drafting, plain = (resolve(Options(target="sm_90a", drafts=n), DRAFTING) for n in (3, 0))
    assert (drafting.limits.drafts, plain.limits.drafts) == (3, 0)
    assert drafting.limits.gdn_ring == plain.limits.gdn_ring == 8
    assert drafting.notes == plain.notes[:0] + drafting.notes[-1:] and plain.draft is None
    needs = [
        DRAFTING.needs(p.precision, 64, 8, p.limits.drafts, p.draft) for p in (plain, drafting)
    ]
    ring, columns = 7 * 48 * 8256 * 4, 4 * 48 * 10240 * 2
    assert needs[1].slot - needs[0].slot == ring + columns + 4 * 4 + 3 * 4 * 248320
    assert needs[1].page - needs[0].page == 64 * 2048 and needs[1].weights == needs[0].weights
    listed = resolve(Options(target="sm_90a", draft_vocab=1000), DRAFTING)
    assert listed.draft is not None and listed.draft.shortlist == (*range(1003), 248046)
    more = DRAFTING.needs(listed.precision, 64, 8, 3, listed.draft)
    assert more.weights - needs[0].weights == 1004 * 10240
    assert drafting.limits.pages < plain.limits.pages
    assert [s.rows for s in drafting.buckets.of("verify_k2")] == [1, 2, 4, 8, 16]
    assert drafting.buckets.of("verify_k3")[-1].dims["tokens"] == 512


def test_drafts_need_a_ring() -> None:
    rings = {
        t: resolve(Options(target=t, drafts=3), DRAFTING).limits.gdn_ring
        for t in ("cpu", "sm_121a")
    }
    assert rings == {"cpu": 8, "sm_121a": 8}
    assert resolve(Options(drafts=0), DRAFTING).limits.gdn_ring == 0
    assert resolve(Options(gdn_ring=2, drafts=3), DRAFTING).limits.gdn_ring == 2
    with pytest.raises(OptionError, match="--gdn-ring 0: drafts need a ring of 2 to 16"):
        resolve(Options(gdn_ring=0, drafts=3), DRAFTING)
    full = replace(DRAFTING, state_width=0, record_width=0)
    assert resolve(Options(gdn_ring=0, drafts=3), full).limits.drafts == 3
    assert resolve(Options(), full).limits.gdn_ring == 0


def test_a_small_model_gets_every_page() -> None:
    plan = resolve(Options(target="sm_121a", max_seqs=4), FACTS)
    assert plan.limits.pages == 4 * 512 and plan.notes == (NO_HEAD,)


def test_decode_wish_sets_max_seqs() -> None:
    assert resolve(Options(decode=(1, 2, 4)), FACTS).limits.max_seqs == 4
    assert resolve(Options(decode=(2,), max_seqs=4), FACTS).buckets.decode[-1].rows == 4


def test_kv_tokens() -> None:
    assert resolve(Options(max_context=128, kv_tokens=129), FACTS).limits.pages == 3
    assert resolve(Options(max_context=64, max_seqs=2, kv_tokens=9999), FACTS).limits.pages == 2
    with pytest.raises(OptionError, match="--kv-tokens 64 .* at least 128"):
        resolve(Options(max_context=128, kv_tokens=64), FACTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(target="sm_90a", kv_dtype="f32"), "sm_90a keeps bf16 or fp8 pages"),
        (Options(card="h20"), "--card h20 is not known; did you mean h200"),
        (Options(card="gb10", target="sm_90a"), "gb10 is of sm_121a, not of --target sm_90a"),
        (Options(card="h100", target="cpu"), "h100 is of sm_90a, not of --target cpu"),
        (Options(target="gpu"), "choose from auto, cpu"),
        (Options(timing=True), "--timing: the CPU has no tactics"),
        (Options(target="rtx", invariant=True), "--invariant: TensorRT .* for --target rtx"),
        (Options(max_context=0), "--max-context 0"),
        (Options(max_context=10**7), "1 to 262144"),
        (Options(max_seqs=0), "--max-seqs 0"),
        (Options(kv_tokens=-1), "--kv-tokens -1"),
        (Options(kv_tokens=2**31), "--kv-tokens 2147483648: give 1 to 1073741824"),
        (Options(max_seqs=65537), "--max-seqs 65537: give 1 to 65536"),
        (Options(decode=(1, 65537)), "--decode 65537: give 1 to 65536"),
        (Options(kv_dtype="int4"), "--kv-dtype int4"),
        (Options(state_dtype="fp8"), "--state-dtype fp8"),
        (
            Options(activation="f16"),
            "activation f16 is not known.* .choose from auto, f32, bf16",
        ),
        (Options(gdn_ring=1), "--gdn-ring 1 .* choose 0 or from 2 to 16"),
    ],
)
def test_bad_options(options: Options, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        resolve(options, FACTS)
