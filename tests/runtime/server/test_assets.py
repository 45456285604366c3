"""What may be asked of an engine's drafts, and what is said of them."""

from __future__ import annotations

import pytest

from spark_engine.errors import OptionError
from spark_engine.interface import Limits
from spark_engine.runtime.server.assets import check_drafts, spell_drafts

PLAIN, DRAFTING = Limits(2, 64, 2, 32), Limits(2, 64, 2, 32, drafts=3)


def test_more_drafts_than_the_engine_has_are_refused() -> None:
    for asked in (None, 0, 1, 3):
        check_drafts(asked, DRAFTING)
    for asked in (None, 0):
        check_drafts(asked, PLAIN)
    with pytest.raises(OptionError, match="--drafts is 4; this engine makes at most 3 a round"):
        check_drafts(4, DRAFTING)
    with pytest.raises(OptionError, match="--drafts is 1; this engine has no draft head"):
        check_drafts(1, PLAIN)


def test_what_is_said_at_the_start() -> None:
    said = [spell_drafts(asked, DRAFTING) for asked in (None, 3, 1, 0)]
    up_to = [" with up to 3 drafts a round"] * 2
    assert said == [*up_to, " with up to 1 draft a round", " without its drafts"]
    assert [spell_drafts(asked, PLAIN) for asked in (None, 0)] == ["", ""]
