"""Stop strings: which of several counts, and what is held back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.runtime.text.text_stream import StopMatcher


def _reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: stops as soon as the text so far ends with a stop string, the longest
    of them."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], text[min(starts) : end]
    return text, None


@given(
    text=st.text("abE", max_size=14),
    stops=st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_the_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges, matcher = [0, *cuts, len(text)], StopMatcher(stops)
    said = [matcher.push(text[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert ("".join(said) + matcher.flush(), matcher.matched) == _reference_stop(text, stops)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("abc<") == "abc"
    assert matcher.push("/") == ""
    assert matcher.push("x") == "</x"
    assert matcher.push("</s>tail") == ""
    assert matcher.matched == "</s>"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
