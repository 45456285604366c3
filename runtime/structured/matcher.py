"""Compiles grammars in llguidance's format for one tokenizer, and computes token masks.

Knows llguidance and tokens as bytes. Knows no schema, request or engine. Both processes use it: the
frontend validates a grammar before it sends it, the engine process applies it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from spark_engine.errors import CapacityError, InternalError, RequestError
from spark_engine.runtime.engine.constraint import Words
from spark_engine.runtime.structured import raw_text
from spark_engine.runtime.structured.lark import MOST_TEXT
from spark_engine.runtime.text.tokenizer import Tokenizer

# Slices: sets of tokens that a lexeme allows without a check of each, one regex a set, subsets
# before supersets. The library has those for JSON strings; these are for raw text.
SLICES = (*raw_text.SLICES, *LLTokenizer.json_slices(), "[^<]+")
_LONGEST = 400  # characters of an error
MOST_S, AT_ONCE = 5.0, 2  # seconds of a compilation, and concurrent compilations
LOADED_S = 30.0  # seconds of loading the vocabulary; usual is 2
_HEAD = 1024  # bytes of forced text that are tokenised like the tokenizer does
_FUEL = 200_000  # of building lexemes; the library's default allows half a minute
KEPT = 64  # compiled grammars,
KEPT_TEXT = 256 << 10  # and their characters: a compiled one takes about 120 bytes each
_STACK = 512 << 20  # bytes of address space for a compilation: it recurses from rule to rule
_WORD = 32  # bits
_WORDS = (  # the library's message, and its meaning for the schema's author
    ("NoExtension", "no answer satisfies it"),
    ("lexer precomputation failed", "its patterns are too complex"),
    ("too many expressions", "its patterns are too complex"),
    ("lexer configuration (grammar) too big", "its strings and patterns are too many or too long"),
    ("Unable to determine if regex is empty", "its patterns and lengths are too complex together"),
)
T = TypeVar("T")


class GrammarTooSlow(RequestError):
    """A grammar did not compile in its time."""


class Matcher:
    """The state of one sequence in a grammar; a `Constraint` of the engine."""

    def __init__(self, matcher: LLMatcher, tokens: int) -> None:
        self._matcher = matcher
        self._words = -(-tokens // _WORD)

    def fill(self, row: Words) -> bool:
        """Writes the allowed ids to u32 [ceil(vocab / 32)]; always True.

        Raises RequestError if the grammar became too complex at this position.
        """
        own = row[: self._words]
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        row[self._words :] = 0
        if self._matcher.is_error():
            raise RequestError(f"its grammar became too complex to follow here: {self.error}")
        return True

    def advance(self, token: int) -> None:
        """Raises InternalError for a token that was not allowed."""
        if not self._matcher.consume_token(token):
            raise InternalError(f"the grammar does not take token {token}: {self.error}")

    @property
    def done(self) -> bool:
        """True if only an end token may follow."""
        return self._matcher.is_stopped()

    @property
    def accepting(self) -> bool:
        """True if the text so far is complete."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str:
        return _plain(self._matcher.get_error())


class Grammars:
    """Compiles grammars for one tokenizer and caches them. Thread-safe.

    A compilation recurses as deeply as rules refer to rules, so it has its own thread with a large
    stack. It releases Python's lock.
    """

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        vocab: int,
        eos: Sequence[int],
        most_s: float | None = None,
    ) -> None:
        """`vocab`: the engine's; `eos`: the ids that end an answer; `most_s`: seconds of one
        compilation, None: MOST_S."""
        self._most_s = most_s
        self._load, self._vocab, self.ends = load, vocab, tuple(eos)
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._making: dict[str, Future[LLMatcher]] = {}
        self._lock = threading.Lock()
        self._count = 0  # of the tokenizer's ids
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._opened: Future[LLTokenizer] | None = None

    @classmethod
    def of(cls, folder: Path, vocab: int, eos: Sequence[int]) -> Grammars:
        return cls(lambda: Tokenizer.load(folder), vocab, eos)

    def __call__(self, grammar: str) -> Matcher:
        """A new matcher at the grammar's start. May take as long as a compilation.

        Raises RequestError for an invalid or too complex grammar, and CapacityError if too many
        others are compiling.
        """
        if len(grammar) > MOST_TEXT:
            words = f"the grammar has {len(grammar)} characters; at most {MOST_TEXT} are compiled"
            raise RequestError(words)
        with self._lock:
            found = self._known.get(grammar)
            if found is not None:
                self._known.move_to_end(grammar)
                return self._own(found)
            first = grammar not in self._making
            making = self._making.setdefault(grammar, Future())
        made = self._make(grammar, making) if first else making.result()
        with self._lock:
            return self._own(made)

    def _make(self, grammar: str, making: Future[LLMatcher]) -> LLMatcher:
        """Compiles it once for all concurrent callers, and caches it."""
        try:
            made = self._wait_for(grammar)
        except BaseException as error:
            with self._lock:
                del self._making[grammar]
            making.set_exception(error)
            raise
        with self._lock:
            del self._making[grammar]
            self._known[grammar] = made
            kept = sum(map(len, self._known))
            while len(self._known) > KEPT or (kept > KEPT_TEXT and len(self._known) > 1):
                kept -= len(self._known.popitem(last=False)[0])
        making.set_result(made)
        return made

    def check(self, grammar: str) -> None:
        """Raises RequestError if the grammar is invalid, too complex, or allows no answer."""
        matcher = self(grammar)
        row = np.zeros(-(-self._vocab // _WORD), np.uint32)
        matcher.fill(row)
        for end in self.ends:
            row[end // _WORD] &= ~np.uint32(1 << end % _WORD)
        if not (row.any() or matcher.accepting):
            raise RequestError("no answer satisfies it")

    def forget(self) -> None:
        with self._lock:
            self._known.clear()

    def error_of(self, grammar: str) -> str:
        """A grammar's error, or ""; the result is not cached."""
        try:
            self._wait_for(grammar)
        except RequestError as error:
            return str(error)
        return ""

    def begin(self) -> None:
        """Loads the tokenizer in a thread and prepares it for masks; otherwise the first grammar
        does."""
        with self._lock:
            if self._opened is None:
                self._opened = _run(self._open, "grammars")

    @property
    def _tokens(self) -> LLTokenizer:
        """Waits until the tokenizer is ready. Raises loading errors, and CapacityError after
        LOADED_S."""
        self.begin()
        assert self._opened is not None
        try:
            return self._opened.result(LOADED_S)
        except TimeoutError:
            if self._opened.done():  # loading raised it, not the wait
                raise
        raise CapacityError(
            f"the tokenizer was not ready for grammars within {LOADED_S:g} s: try again later, and "
            "check whether the engine's disk answers"
        )

    def _own(self, made: LLMatcher) -> Matcher:
        return Matcher(made.deep_copy(), self._count)

    def _wait_for(self, grammar: str) -> LLMatcher:
        """Runs a compilation in a thread, at most AT_ONCE at once, with a time limit."""
        most = MOST_S if self._most_s is None else self._most_s
        tokens = self._tokens
        if not self._slots.acquire(timeout=most):
            raise CapacityError(
                f"{AT_ONCE} other grammars are compiling, and none finished within "
                f"{most:g} s: try again later"
            )
        try:
            future = _run(lambda: _compile(tokens, grammar), "grammar")
        except BaseException:  # the thread did not start
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        with contextlib.suppress(TimeoutError):
            return future.result(most)
        raise GrammarTooSlow(f"it did not compile within {most:g} s: make it simpler")

    def _open(self) -> LLTokenizer:
        if not self.ends:
            raise RequestError("this engine has no end token, which structured outputs need")
        wrapped = _Tokens(self._load(), self._vocab, self.ends)
        made = LLTokenizer(wrapped, eos_token=list(self.ends), slices=list(SLICES))
        self._count = made.vocab_size
        return made


class _Tokens(TokenizerWrapper):
    """A tokenizer in llguidance's interface. Marks of thoughts and calls are not text: only their
    own tokens produce them."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: tuple[int, ...]) -> None:
        # the library's own class would tokenise a sample text
        self._tokenizer, self.is_tokenizer_wrapper, self.bos_token_id = tokenizer, True, None
        count = min(len(tokenizer), vocab)
        self.eos_token_id = eos[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(count)]
        self.special_token_ids = sorted(
            i for i in tokenizer.special | set(tokenizer.marks) | set(eos) if i < count
        )
        barred = set(self.special_token_ids)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in barred}
        self._letters = [self._ids.setdefault(bytes([b]), eos[0]) for b in range(256)]
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of ordinary tokens that together are exactly these bytes.

        llguidance calls it at each step for all forced text, and uses the first token. The rest of
        a long text becomes byte tokens, which is fast.
        """
        data = text.encode() if isinstance(text, str) else text
        cut = min(len(data), _HEAD)
        while cut < len(data) and data[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
            cut -= 1
        return [*self._encode(data[:cut]), *map(self._letters.__getitem__, data[cut:])]

    def _encode(self, data: bytes) -> list[int]:
        """As the tokenizer, except for marks and special tokens, which a model must not produce
        here."""
        try:
            ids = self._tokenizer.encode(data.decode())
        except UnicodeDecodeError:
            return self._pieces(data)
        parts = [self._tokenizer.token_bytes(i) for i in ids]
        if b"".join(parts) != data:  # the tokenizer normalises text
            return self._pieces(data)
        return [i for part in parts for i in self._pieces(part)]

    def _pieces(self, data: bytes) -> list[int]:
        """The longest matching tokens from left to right."""
        found, at = [], 0
        while at < len(data):
            most = min(self._longest, len(data) - at)
            sizes = range(most, 1, -1)
            size = next((n for n in sizes if data[at : at + n] in self._ids), 1)
            found.append(self._ids[data[at : at + size]])
            at += size
        return found


def _compile(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    limits = LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
    made = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not made.is_error():
        made.compute_bitmask()  # copies share the tables that this builds
    if made.is_error():
        raise RequestError(_plain(made.get_error()))
    return made


def _plain(error: str) -> str:
    """The library's message in one line, without the text that it quotes."""
    words = re.split(r"\n\s*\d+ \| |\n?<", error)[0]
    words = re.sub(r"^at 1\(\d+\): |failed to compile JSON schema: ", "", words)
    if "regex parse error" in words:
        words = f"regex: {words.rpartition('error: ')[2]}"
    if missing := re.search(r"Unimplemented keys: \[(.*)\]", words):
        words = f"{missing[1]} cannot be enforced token by token: leave it out"
    for says, means in _WORDS:
        if says in words:
            words = means
    return " ".join(words.split())[:_LONGEST]


def _run(work: Callable[[], T], name: str) -> Future[T]:
    """Runs `work` in a thread with a large stack."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        finally:
            threading.stack_size(before)
    return future


_STACK_LOCK = threading.Lock()
