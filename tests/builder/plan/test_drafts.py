"""What a build decides of drafts, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.plan.drafts import (
    DraftRequest,
    HeadFacts,
    Vocab,
    decide,
    parse_drafts,
    parse_vocab,
)
from spark_engine.errors import OptionError
from spark_engine.kernel import GB10, H200, Target, rehearsal
from spark_engine.models.draft_options import DraftOptions

HEAD = HeadFacts(512, 128, nvfp4=True, eos=(90, 200))
IDS = 100
NONE = "there is no head"


def test_auto_drafts_where_there_is_a_head() -> None:
    made = decide(DraftRequest(), HEAD, IDS, gpu=H200)
    assert (made.drafts, made.head, made.notes) == (3, DraftOptions("nvfp4"), ())
    cpu = decide(DraftRequest(), HEAD, IDS, gpu=None)
    assert cpu.drafts == 0 and "--drafts 3 builds with it" in cpu.notes[0]
    assert decide(DraftRequest(dtype="fp8"), HEAD, IDS, gpu=None).drafts == 3  # requested
    bare = decide(DraftRequest(), NONE, IDS, gpu=H200)
    assert (bare.drafts, bare.head) == (0, None)
    assert bare.notes == ("there is no head: built without drafts",)


def test_the_text_drafts_with_a_head_or_without() -> None:
    for gpu in (True, False):
        both = decide(DraftRequest(suffix=6), HEAD, IDS, gpu)
        assert both.drafts == 7 and both.head is not None and both.notes == ()
        assert decide(DraftRequest(2, suffix=6), HEAD, IDS, gpu).drafts == 2
        alone = decide(DraftRequest(suffix=6), NONE, IDS, gpu)
        assert (alone.drafts, alone.head) == (7, None)
        assert alone.notes == ("there is no head: the text alone drafts",)
        assert decide(DraftRequest(4, suffix=1), NONE, IDS, gpu).drafts == 4
    for wrong, words in (
        (DraftRequest(suffix=17), "--draft-suffix 17 is not possible; choose 0 to 16"),
        (DraftRequest(suffix=-1), "--draft-suffix -1 is not possible"),
        (DraftRequest(0, suffix=6), "--draft-suffix: --drafts is 0, so nothing drafts"),
        (DraftRequest(dtype="fp8", suffix=6), "--draft-dtype: there is no head"),
    ):
        with pytest.raises(OptionError, match=words):
            decide(wrong, HEAD if wrong.drafts == 0 else NONE, IDS, gpu=True)


def test_none_are_requested() -> None:
    for head in (HEAD, NONE):
        made = decide(DraftRequest(0), head, IDS, gpu=H200)
        assert (made.drafts, made.head, made.notes) == (0, None, ())


@pytest.mark.parametrize(
    ("nvfp4", "gpu", "dtype", "stored"),
    [
        (True, True, "auto", "nvfp4"),
        (False, True, "auto", "checkpoint"),
        (True, False, "auto", "checkpoint"),
        (True, True, "fp8", "fp8"),
        (True, True, "checkpoint", "checkpoint"),
        (False, False, "nvfp4", "nvfp4"),
    ],
)
def test_the_head_is_stored_as_the_model_on_a_gpu(
    nvfp4: bool, gpu: bool, dtype: str, stored: str
) -> None:
    made = decide(DraftRequest(7, dtype), HeadFacts(512, nvfp4=nvfp4), IDS, H200 if gpu else None)
    assert made.drafts == 7 and made.head == DraftOptions(stored)


@pytest.mark.parametrize(
    ("vocab", "ids"),
    [
        ("auto", None),
        ("full", None),
        (3, (0, 1, 2, 90)),  # an end that the model has is always drafted
        (95, tuple(range(95))),
        (100, None),
        (1000, None),
        ((7, 3, 7), (3, 7)),
        (tuple(range(100)), None),
    ],
)
def test_shortlists_ascend(vocab: Vocab, ids: tuple[int, ...] | None) -> None:
    made = decide(DraftRequest(1, vocab=vocab), HEAD, IDS, gpu=None)
    assert made.head is not None and made.head.shortlist == ids


@pytest.mark.parametrize(
    ("gpu", "vocab", "ids"),
    [
        (GB10, "auto", (0, 5, 7, 90)),
        (rehearsal(GB10, H200), "auto", (0, 5, 7, 90)),
        (H200, "auto", None),
        (H200, "list", (0, 5, 7, 90)),
        (None, "auto", None),
        (None, "list", (5, 7, 90)),
        (GB10, "full", None),
        (GB10, 2, (0, 1, 2, 90)),
        (GB10, (3,), (0, 1, 2, 3)),
    ],
)
def test_the_list_is_for_cards_with_slow_memory(
    gpu: Target | None, vocab: Vocab, ids: tuple[int, ...] | None
) -> None:
    """And an end of the text that the list has not is drafted too."""
    head = HeadFacts(512, 128, eos=(90, 200), listed=(7, 5))
    made = decide(DraftRequest(3, vocab=vocab), head, IDS, gpu)
    assert made.head is not None and made.head.shortlist == ids
    listed = 5 in (ids or ())
    assert [f"{len(ids or ())} of the 100 ids" in n for n in made.notes] == [True] * listed
    if vocab == "list":
        return
    bare = decide(DraftRequest(3, vocab=vocab), HeadFacts(512, eos=(90,)), IDS, gpu)
    assert bare.notes == (), "another vocabulary"


@pytest.mark.parametrize(
    ("requested", "dtype", "vocab", "head", "words"),
    [
        (3, "auto", "auto", NONE, "--drafts 3: there is no head; build with --drafts 0"),
        (8, "auto", "auto", HEAD, "--drafts 8 is not possible; choose auto or 0 to 7"),
        (-1, "auto", "auto", HEAD, "--drafts -1 is not possible"),
        (1, "int4", "auto", HEAD, "--draft-dtype int4 .* auto, checkpoint, fp8, nvfp4"),
        (0, "fp8", "auto", HEAD, "--draft-dtype: --drafts is 0"),
        (None, "auto", 9, NONE, "--draft-vocab: there is no head"),
        (0, "auto", "full", HEAD, "--draft-vocab: --drafts is 0"),
        (1, "auto", 0, HEAD, "--draft-vocab 0: give 1 or more"),
        (1, "auto", (99, 100), HEAD, "--draft-vocab: 100 is no id of the model, which has 100"),
        (1, "auto", (), HEAD, "--draft-vocab: the file holds no id"),
        (1, "auto", "list", HEAD, "--draft-vocab list: .* Qwen3.5's vocabulary"),
    ],
)
def test_what_cannot_be(
    requested: int | None, dtype: str, vocab: Vocab, head: HeadFacts | str, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        decide(DraftRequest(requested, dtype, vocab), head, IDS, gpu=H200)


def test_a_block_drafter_drafts_all_but_one_of_its_block() -> None:
    head = HeadFacts(512, block=6)
    for gpu in (None, H200):
        made = decide(DraftRequest(), head, IDS, gpu)
        assert made.drafts == 5 and made.head is not None and made.notes == ()
    assert decide(DraftRequest(2), head, IDS, H200).drafts == 2
    assert decide(DraftRequest(suffix=6), head, IDS, None).drafts == 5
    assert decide(DraftRequest(), replace(head, block=16), IDS, H200).drafts == 7
    with pytest.raises(OptionError, match="--drafts 6 is not possible; choose auto or 0 to 5"):
        decide(DraftRequest(6), head, IDS, None)
    with pytest.raises(OptionError, match="--drafter: --drafts is 0, so nothing drafts"):
        decide(DraftRequest(0), head, IDS, None)


def test_parse_drafts() -> None:
    assert parse_drafts("auto") is None and parse_drafts("0") == 0 and parse_drafts("7") == 7
    for text in ("", "-1", "two", "1.0"):
        with pytest.raises(OptionError, match="choose auto or 0 to 7"):
            parse_drafts(text)


@pytest.mark.parametrize("text", ["3\n1\n\n 2 \n", "[3, 1, 2]", ' [3, 1, "2"]\n'])
def test_ids_of_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert parse_vocab(str(file)) == (3, 1, 2)
    assert parse_vocab("32000") == 32000
    assert [parse_vocab(word) for word in ("auto", "full", "list")] == ["auto", "full", "list"]


@pytest.mark.parametrize("text", ["1\ntwo", "[1, 2", "[1.5]", "-3", "[true]", "[[1]]", "[null]"])
def test_what_is_no_list_of_ids(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    with pytest.raises(OptionError, match="write one id a line, or a JSON list of ids"):
        parse_vocab(str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"not full, auto, list, a number of ids or a file of them \(No such"
    ):
        parse_vocab(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="the file is no text"):
        parse_vocab(str(tmp_path / "binary"))


def test_a_gpu_drafts_from_a_multiple_of_what_it_reads_at_once() -> None:
    """The id that ends a text would be one more."""
    head = replace(HEAD, eos=(IDS - 1,))
    for vocab in (8, (3, 9, 11)):
        plan = decide(DraftRequest(vocab=vocab), head, IDS, GB10)
        assert plan.head is not None and plan.head.shortlist is not None
        found = plan.head.shortlist
        assert len(found) % 4 == 0 and list(found) == sorted({*found})
        assert {*(range(vocab) if isinstance(vocab, int) else vocab)} <= {*found}
