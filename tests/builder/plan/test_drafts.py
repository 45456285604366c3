"""What a build decides of drafts, and what it refuses."""

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
from spark_engine.models.draft_options import DraftOptions

HEAD = HeadFacts(512, 128, nvfp4=True, eos=(90, 200))
IDS = 100
NONE = "there is no head"


def test_auto_drafts_where_there_is_a_head() -> None:
    made = decide(DraftRequest(), HEAD, IDS, gpu=True)
    assert (made.drafts, made.head, made.notes) == (3, DraftOptions("nvfp4"), ())
    cpu = decide(DraftRequest(), HEAD, IDS, gpu=False)
    assert cpu.drafts == 0 and "--drafts 3 builds with it" in cpu.notes[0]
    assert decide(DraftRequest(dtype="fp8"), HEAD, IDS, gpu=False).drafts == 3  # requested
    bare = decide(DraftRequest(), NONE, IDS, gpu=True)
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
        made = decide(DraftRequest(0), head, IDS, gpu=True)
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
    made = decide(DraftRequest(7, dtype), HeadFacts(512, nvfp4=nvfp4), IDS, gpu)
    assert made.drafts == 7 and made.head == DraftOptions(stored)


@pytest.mark.parametrize(
    ("vocab", "ids"),
    [
        (None, None),
        (3, (0, 1, 2, 90)),  # an end that the model has is always drafted
        (95, tuple(range(95))),
        (100, None),
        (1000, None),
        ((7, 3, 7), (3, 7)),
        (tuple(range(100)), None),
    ],
)
def test_shortlists_ascend(vocab: Vocab | None, ids: tuple[int, ...] | None) -> None:
    made = decide(DraftRequest(1, vocab=vocab), HEAD, IDS, gpu=False)
    assert made.head is not None and made.head.shortlist == ids


@pytest.mark.parametrize(
    ("requested", "dtype", "vocab", "head", "words"),
    [
        (3, "auto", None, NONE, "--drafts 3: there is no head; build with --drafts 0"),
        (8, "auto", None, HEAD, "--drafts 8 is not possible; choose auto or 0 to 7"),
        (-1, "auto", None, HEAD, "--drafts -1 is not possible"),
        (1, "int4", None, HEAD, "--draft-dtype int4 .* auto, checkpoint, fp8, nvfp4"),
        (0, "fp8", None, HEAD, "--draft-dtype: --drafts is 0"),
        (None, "auto", 9, NONE, "--draft-vocab: there is no head"),
        (1, "auto", 0, HEAD, "--draft-vocab 0 must be positive"),
        (1, "auto", (99, 100), HEAD, "--draft-vocab: 100 is no id of the model, which has 100"),
        (1, "auto", (), HEAD, "--draft-vocab: the file holds no id"),
    ],
)
def test_what_cannot_be(
    requested: int | None, dtype: str, vocab: Vocab | None, head: HeadFacts | str, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        decide(DraftRequest(requested, dtype, vocab), head, IDS, gpu=True)


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


@pytest.mark.parametrize("text", ["1\ntwo", "[1, 2", "[1.5]", "-3", "[true]", "[[1]]", "[null]"])
def test_what_is_no_list_of_ids(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    with pytest.raises(OptionError, match="write one id a line, or a JSON list of ids"):
        parse_vocab(str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"neither a number of ids nor a file of them \(No such"):
        parse_vocab(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="the file is no text"):
        parse_vocab(str(tmp_path / "binary"))
