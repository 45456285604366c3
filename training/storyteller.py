"""Tell one story: draw a plot, a cast and a setting, expand the beats, keep the facts for
questions.

Reads the plots (stories/*.json) and the lexicon; knows nothing about chat or tokens.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from training.grammar import Plot, Scene, expand
from training.lexicon import (
    ANIMALS,
    BOYS,
    CHILD,
    COLORS,
    DETAILS,
    EYES,
    FOODS,
    GENERAL_ASKS,
    GIRLS,
    HELPERS,
    LIKES,
    LIVED,
    MACROS,
    NUMBERS,
    PET_NAMES,
    PLACES,
    TOYS,
    TRAITS,
    WEATHER,
)

STORIES = Path(__file__).parent / "stories"
THEMES = ("friends", "home", "nature", "courage", "work", "learning", "animals", "wonder")


def read_plots(name: str) -> tuple[Plot, ...]:
    """The plots of stories/NAME.json; its keys are the fields of Plot."""
    rows = json.loads((STORIES / f"{name}.json").read_text(encoding="utf-8"))
    return tuple(
        Plot(
            name=row["name"],
            theme=row["theme"],
            cast=row["cast"],
            slots={slot: tuple(options) for slot, options in row["slots"].items()},
            beats=tuple(row["beats"]),
            asks=tuple(row["asks"]),
            summary=row["summary"],
        )
        for row in rows
    )


PLOTS = tuple(plot for name in THEMES for plot in read_plots(name))  # a seed depends on the order
GENDERS = MappingProxyType(
    {"f": ("she", "her", "her", "herself"), "m": ("he", "his", "him", "himself")}
)
TITLES = (
    "{NF} and {NG}",
    "{AF}",
    "A Day for {NF}",
    "The Story of {NF}",
    "{NF}'s Day",
    "{AF} and {AG}",
)


@dataclass(frozen=True)
class Story:
    """A finished story with checkable facts."""

    plot: str
    theme: str
    title: str
    text: str
    asks: tuple[tuple[str, str], ...]
    summary: str
    subject: str
    hero_kind: str


def cast_player(tag: str, kind: str, scene: Scene) -> None:
    """Put one player's name, kind, pronouns and trait into the scene; slot names end in `tag`."""
    rng, slots = scene.rng, scene.slots
    gender = rng.choice("fm")
    if kind == "x":
        kind = rng.choice("cca")
    taken = set(slots.values())
    if kind == "c":
        name = rng.choice([n for n in (GIRLS if gender == "f" else BOYS) if n not in taken])
        noun = "girl" if gender == "f" else "boy"
    else:
        name = rng.choice([n for n in PET_NAMES if n not in taken])
        noun = rng.choice([n for n in ANIMALS if n not in taken])
    he, his, him, himself = GENDERS[gender]
    home, sound, food = ANIMALS.get(noun, CHILD)
    full = f"{name} the {noun}" if noun in ANIMALS else name
    values = (name, noun, he, his, him, himself, rng.choice(TRAITS), full, home, sound, food)
    names = ("N", "K", "he", "his", "him", "self", "T", "A", "home", "sound", "eats")
    slots.update({key + tag: value for key, value in zip(names, values, strict=True)})


def set_scene(plot: Plot, rng: random.Random) -> Scene:
    """All slots of a plot: macros, cast, setting, and the plot's own."""
    scene = Scene(rng, dict(MACROS))
    slots = scene.slots
    for tag, kind in zip("FG", plot.cast, strict=True):
        cast_player(tag, kind, scene)
    place = rng.choice(list(PLACES))
    helper = rng.choice(list(HELPERS))
    at, spots = PLACES[place]
    slots.update(zip(("s1", "s2", "s3"), rng.sample(spots, 3), strict=True))
    slots.update(
        P=place,
        at=at,
        H=helper,
        heH=HELPERS[helper],
        W=rng.choice(WEATHER),
        lived=rng.choice(LIVED),
    )
    slots["hisH"] = "her" if slots["heH"] == "she" else "his"
    slots.update(
        col=rng.choice(COLORS), toy=rng.choice(TOYS), O="{col} {toy}", food=rng.choice(FOODS)
    )
    slots.update(like=rng.choice(LIKES), eyes=rng.choice(EYES))
    slots["n"] = rng.choice(NUMBERS[1:6])
    for key, options in plot.slots.items():
        keys, values = key.split(" / "), rng.choice(options).split(" / ")
        slots.update(zip(keys, values, strict=True))
    return scene


def general_asks(scene: Scene) -> list[tuple[str, str]]:
    """Questions that fit every plot."""
    return [(expand(ask, scene), expand(answer, scene)) for ask, answer in GENERAL_ASKS]


def tell(rng: random.Random, plot: Plot | None = None) -> Story:
    """Tell one story of the given plot, or of any."""
    plot = plot or rng.choice(PLOTS)
    scene = set_scene(plot, rng)
    detail = rng.choice(DETAILS) + " " if rng.random() < 0.4 else ""
    beats = [expand(beat, scene) for beat in ("{open} " + detail + plot.beats[0], *plot.beats[1:])]
    asks = (
        [(expand("What did {NF} like?", scene), expand("{NF} liked {like}.", scene))]
        if detail
        else []
    )
    for ask in plot.asks:
        question, _, answer = ask.partition("? ")
        asks.append((expand(question + "?", scene), expand(answer, scene)))
    subjects = (
        "{KF:a} named {NF}",
        "{KF:a} and {KG:a}",
        "{NF} and {NG}",
        "{KF:a}",
        "{KF:a}",
        plot.theme,
        "{AF}",
    )
    return Story(
        plot=plot.name,
        theme=plot.theme,
        title=expand(rng.choice(TITLES), scene),
        text="\n".join(beats),
        asks=(*asks, *general_asks(scene)),
        summary=expand(plot.summary, scene),
        subject=choose_subject(rng.choice(subjects), scene),
        hero_kind=scene.slots["KF"],
    )


def choose_subject(pattern: str, scene: Scene) -> str:
    """What a reader might have asked for: 'a fox named Pip' (no capital at the start unless it is a
    name).
    """
    subject = expand(pattern, scene)
    return (
        subject[0].lower() + subject[1:]
        if pattern[:3] != "{NF" and pattern[:3] != "{AF"
        else subject
    )
