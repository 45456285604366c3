"""Masks of grammars: allowed ids, error texts, and time limits."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spark_engine.errors import CapacityError, InternalError, RequestError
from spark_engine.runtime.structured import matcher
from spark_engine.runtime.structured.matcher import Grammars
from tests.runtime.structured.grammar_walks import VOCAB, allowed, grammars, tokenizer

YES = 'start: "yes" | "yesterday"'


def test_a_mask_holds_the_tokens_that_may_follow_and_no_others() -> None:
    tokens = tokenizer()
    begins = {b"a", *("there"[:n].encode() for n in range(1, 6))}
    known = {i for i in range(len(tokens)) if tokens.token_bytes(i) in begins}
    assert allowed(grammars()('start: "there" | "a"')) == known and len(known) > 2


def test_an_end_is_allowed_where_the_answer_may_end() -> None:
    follows, ends = grammars()(YES), set(grammars().ends)
    for token in tokenizer().encode("yes"):
        assert not allowed(follows) & ends and not follows.accepting
        follows.advance(token)
    assert ends < allowed(follows) and follows.accepting and not follows.done
    follows.advance(min(ends))
    assert follows.done


def test_done_comes_with_the_last_token() -> None:
    follows = grammars()('start: "yes"')
    for token in tokenizer().encode("yes"):
        assert not follows.done
        follows.advance(token)
    assert follows.done and follows.accepting


def test_a_token_that_is_not_allowed_is_our_bug() -> None:
    follows = grammars()(YES)
    with pytest.raises(InternalError, match="does not take token"):
        follows.advance(tokenizer().encode("no")[0])


def test_marks_and_ends_are_no_text() -> None:
    found = allowed(grammars()("start: /(?s:.+)/"))
    assert not found & {*tokenizer().special, *tokenizer().marks, *grammars().ends}
    assert len(found) > 3000


def test_sequences_of_one_grammar_do_not_share_a_place() -> None:
    one, two = grammars()(YES), grammars()(YES)
    for token in tokenizer().encode("yes"):
        one.advance(token)
    assert one.accepting and not two.accepting


def test_what_is_no_grammar_is_a_request_error() -> None:
    for text, words in (
        ("start: /(a/", "unclosed group"),
        ('start: "a" b', "unknown name"),
        ("x" * (matcher.MOST_TEXT + 1), "at most 262144 are compiled"),
    ):
        with pytest.raises(RequestError, match=words):
            grammars()(text)
    assert grammars().error_of("start: /(a/") and grammars().error_of(YES) == ""


def test_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = matcher._compile

    def compiled(tokens: Any, grammar: str) -> Any:
        made.append(grammar)
        return real(tokens, grammar)

    monkeypatch.setattr(matcher, "_compile", compiled)
    monkeypatch.setattr(matcher, "KEPT", 2)
    own = Grammars(tokenizer, VOCAB, grammars().ends)
    for word in "abacab":
        own(f'start: "{word}"')
    assert [text[8] for text in made] == ["a", "b", "c", "b"]


def test_long_grammars_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve grammars of 113 KB occupied 159 MiB."""
    own = Grammars(tokenizer, VOCAB, grammars().ends)
    texts = [f'start: "{letter * 40}"' for letter in "abc"]
    monkeypatch.setattr(matcher, "KEPT_TEXT", 2 * len(texts[0]))
    for text in texts:
        own(text)
    assert list(own._known) == texts[1:]
    monkeypatch.setattr(matcher, "KEPT_TEXT", 1)
    own(texts[0])
    assert list(own._known) == texts[:1], "the one in use"


def test_a_compilation_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(matcher, "_compile", lambda tokens, grammar: held.wait(25))
    monkeypatch.setattr(matcher, "MOST_S", 0.05)
    own = Grammars(tokenizer, VOCAB, grammars().ends)
    for _ in range(matcher.AT_ONCE):
        with pytest.raises(RequestError, match="within 0.05 s: make it simpler"):
            own(YES)
    with pytest.raises(CapacityError, match="2 other grammars .* within 0.05 s: try again later"):
        own(YES)  # it does not even start
    held.set()


def test_concurrent_requests_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = matcher._compile
    here = threading.Barrier(16)

    def compiled(tokens: Any, grammar: str) -> Any:
        made.append(grammar)
        time.sleep(0.1)  # the other requests arrive meanwhile
        return real(tokens, grammar)

    def ask(grammar: str) -> Any:
        here.wait(60)
        return own(grammar)

    monkeypatch.setattr(matcher, "_compile", compiled)
    monkeypatch.setattr(matcher, "MOST_S", 60.0)
    own = Grammars(tokenizer, VOCAB, grammars().ends)
    own.begin()
    assert own._tokens
    with ThreadPoolExecutor(16) as threads:
        found = [*threads.map(ask, [YES] * 16)]
        assert made == [YES] and not any(one.accepting for one in found)
        bad = [threads.submit(ask, "start: /(a/") for _ in range(16)]
        assert all(isinstance(one.exception(), RequestError) for one in bad)
    assert len(made) < 16 and not own._making


def test_an_engine_without_an_end_has_no_forms() -> None:
    with pytest.raises(RequestError, match="no end token"):
        Grammars(tokenizer, VOCAB, ())(YES)


def test_a_vocabulary_that_does_not_load_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def load() -> Any:
        gate.wait(25)
        return tokenizer()

    monkeypatch.setattr(matcher, "LOADED_S", 0.05)
    own = Grammars(load, VOCAB, grammars().ends)
    with pytest.raises(CapacityError, match=r"not ready for grammars within 0.05 s: try again"):
        own(YES)
    gate.set()
    monkeypatch.setattr(matcher, "LOADED_S", 60)
    assert not own(YES).done
