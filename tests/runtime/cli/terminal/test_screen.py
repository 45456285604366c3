"""What a chat shows: Markdown by whole blocks however it comes, and no control sequences."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from spark_engine.runtime.cli.terminal.printable import printable
from spark_engine.runtime.cli.terminal.screen import Screen, whole_blocks

PIECES = ["a b", "\n", "\n\n", "- x", "  y", "```", "```py\n", "~~~", "# h", "1. z", "**b**", " "]
BLOCKS = [
    ("one\n\ntwo", "one\n\n"),
    ("one\ntwo", ""),
    ("one\n\n", ""),
    ("one\n\n  more of it", ""),
    ("- a\n\n  b\n\nc", "- a\n\n  b\n\n"),
    ("x\n\n```\na\n\nb\n\nc", "x\n\n"),
    ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
    ("````\n```\n\nb\n````\n\nc", "````\n```\n\nb\n````\n\n"),
    ("~~~\n```\n\nb", ""),
    ("```py\nx = 1\n\n```y\n\nz", ""),
]


def _screen(terminal: bool = False) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=60, height=12, force_terminal=terminal, color_system=None)
    return Screen(console), out


@pytest.mark.parametrize(("text", "whole"), BLOCKS)
def test_blocks_end_where_nothing_can_change_them(text: str, whole: str) -> None:
    assert text[: whole_blocks(text)] == whole


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_more_text_changes_no_whole_block(text: str) -> None:
    cuts = [whole_blocks(text[:i]) for i in range(len(text) + 1)]
    assert cuts == sorted(cuts)
    for cut in set(cuts):  # what is printed for good is a beginning of what is printed in the end
        rest = whole_blocks(text[cut:])
        assert rest == 0 or cut + rest in cuts


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(PIECES), max_size=10))
def test_what_is_shown_does_not_depend_on_how_it_came(pieces: list[str]) -> None:
    shown = []
    for parts in (pieces, list("".join(pieces))):
        screen, out = _screen()
        for part in parts:
            screen.content(part)
        screen.end()
        shown.append(out.getvalue())
    assert shown[0] == shown[1]


def test_markdown_is_rendered_and_a_thought_is_set_apart() -> None:
    screen, out = _screen()
    screen.thought("Let me *see*.")
    screen.content("# Yes\n\n- **one**\n\n[here](http://x.y)")
    screen.end()
    screen.end()
    text = out.getvalue()
    assert "Let me *see*." in text and "**" not in text and "• one" in text
    assert "http://x.y" in text, "where a link leads is to be seen"
    assert text.index("see") < text.index("Yes")


def test_no_text_of_a_model_is_obeyed_by_a_terminal() -> None:
    evil = "a\x1b]0;title\x07b\x9b31mc\rd\x7f\x00\te\n"
    assert printable(evil) == "a␛]0;title␇b\ufffd31mc␍d␡␀\te\n"
    for terminal in (False, True):
        for grow in ("thought", "content", "note", "error"):
            screen, out = _screen(terminal)
            getattr(screen, grow)("x\x1b]0;title\x07 \x1b[2J [bold]y[/bold]")
            screen.end()
            shown = out.getvalue()
            assert "\x1b]" not in shown and "\x1b[2J" not in shown and "\x07" not in shown
            assert "[bold]y[/bold]" in shown, "what looks like rich's own marks is text"


def test_a_block_longer_than_the_screen_shows_its_end_while_it_grows() -> None:
    screen, out = _screen(terminal=True)
    screen.content("\n".join(f"line{i}" for i in range(100)))
    assert "line99" in out.getvalue() and "line50" not in out.getvalue()
    screen.end()
    assert "line50" in out.getvalue()
