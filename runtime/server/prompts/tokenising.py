"""Tokenises no more text than fits into an engine.

Knows the tokenizer and the engine's maximum of tokens. Knows no bodies and no engine.
"""

import re

from spark_engine.runtime.server.api.fields import too_long
from spark_engine.runtime.text.tokenizer import Tokenizer

COMPOSED = 4  # a normaliser (NFC) makes one byte of at most this many
HEAD = 8  # characters per token in the first estimate of a long text; prose has 3 to 5
SLACK = 256  # tokens that a text cut anywhere may have more than within the whole
WORD = 4096  # characters before a cut in which the end of a word is searched for
ALWAYS = 64 << 10  # characters that are always tokenised, however few tokens are needed
# White space after a word starts a new part in every byte-level tokenizer's split: text before it
# does not change tokens after it.
_BEGIN = re.compile(r"(?<=[^\W_])(?=[ \n])")


def encode_within(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Token ids of `text`. Raises BadField where there are certainly `most` or more, without
    tokenising all of it, and RequestError where it is not Unicode."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    longest = tokenizer.longest
    if size > most * longest * COMPOSED:
        raise too_long(f"{size} bytes, at most {longest} to a token", most)
    head = most * HEAD
    if len(text) > 2 * head and len(tokenizer.encode(text[:head])) > most + SLACK:
        raise too_long(f"the first {head} of {len(text)} characters are over {most} tokens", most)
    return tokenizer.encode(text)


def encode_tail(tokenizer: Tokenizer, text: str, last: int) -> list[int]:
    """The `last` token ids of `text`. Raises RequestError if the part that is read is not Unicode.

    They are the same as the whole text's, which is cut where a part starts. Only a text without
    such a place in `last` tokens and ALWAYS characters is cut anywhere.
    """
    text = text[-max(ALWAYS, last * tokenizer.longest * COMPOSED + WORD) :]
    size = last * HEAD + WORD
    while size < len(text):
        begin = _begin(text, len(text) - size)
        if begin is not None and len(ids := tokenizer.encode(text[begin:])) >= last:
            return ids[-last:]
        size *= 2
    return tokenizer.encode(text)[-last:]


def _begin(text: str, at: int) -> int | None:
    """A place up to WORD characters before `at` where tokenising may start."""
    places = [match.start() for match in _BEGIN.finditer(text, max(1, at - WORD), at)]
    return places[-1] if places else None
