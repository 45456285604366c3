"""Words the stories draw on: names, animals, places, things, and phrases shared by many plots.

Reads words/lexicon.json: what a seed draws depends on its order. Knows no plot.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

WORDS = Path(__file__).parent / "words"
Pairs = tuple[tuple[str, str], ...]


def read_words(name: str) -> dict[str, Any]:
    """The entries of words/NAME.json, in its order."""
    found: dict[str, Any] = json.loads((WORDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def pairs(rows: list[list[str]]) -> Pairs:
    """Rows of two strings."""
    return tuple((left, right) for left, right in rows)


_READ = read_words("lexicon")
GIRLS = tuple(_READ["girls"])
BOYS = tuple(_READ["boys"])
PET_NAMES = tuple(_READ["pet_names"])
# kind: home, the sound it makes, favourite food
ANIMALS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {kind: (home, sound, food) for kind, (home, sound, food) in _READ["animals"].items()}
)
CHILD: tuple[str, str, str] = tuple(_READ["child"])  # the same of a child
# place: how one is there, five spots in it
PLACES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {place: (at, tuple(spots)) for place, (at, spots) in _READ["places"].items()}
)
COLORS = tuple(_READ["colors"])
TOYS = tuple(_READ["toys"])
WEATHER = tuple(_READ["weather"])
TRAITS = tuple(_READ["traits"])
FOODS = tuple(_READ["foods"])
NUMBERS = tuple(_READ["numbers"])
HELPERS: Mapping[str, str] = MappingProxyType(_READ["helpers"])  # helper: its pronoun
LIVED = tuple(_READ["lived"])
LIKES = tuple(_READ["likes"])
DETAILS = tuple(_READ["details"])
EYES = tuple(_READ["eyes"])
MACROS: Mapping[str, str] = MappingProxyType(_READ["macros"])
GENERAL_ASKS = pairs(_READ["general_asks"])  # (question, answer) that fit every plot
