"""Stop strings: which of several counts, and what is held back."""

import pytest

from spark_engine.runtime.text.text_stream import StopMatcher, first_match, partial_match


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("abcd", ("abcd", "bc"), (1, 3)),  # completed first, though it starts later
        ("abcd", ("bc", "abcd"), (1, 3)),
        ("xabc", ("c", "abc"), (1, 4)),  # completed together: the longest
        ("xabc", ("d",), None),
        ("abab", ("ab",), (0, 2)),
    ],
)
def test_the_first_to_be_completed_counts(
    text: str, stops: tuple[str, ...], found: tuple[int, int] | None
) -> None:
    assert first_match(text, stops) == found
    whole, cut = StopMatcher(stops), StopMatcher(stops)
    assert whole.push(text) + whole.flush() == (text if found is None else text[: found[0]])
    assert "".join(cut.push(c) for c in text) + cut.flush() == (text[: found[0]] if found else text)
    assert whole.matched == cut.matched == (None if found is None else text[slice(*found)])


def test_no_more_is_held_than_may_become_a_stop() -> None:
    assert partial_match("xxab", ("abc", "bd")) == 2
    assert partial_match("xxabc", ("abc",)) == 0  # a complete one is found, not held back
    assert partial_match("xx", ("abc",)) == 0
