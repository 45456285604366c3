"""The little grammar the stories are written in, and the cast of a story.

Knows how to expand a pattern; knows no plot and no word list. A pattern is text with
  [a|b|]   one of the branches (they may nest, and may be empty),
  {x}      the slot or macro x, itself expanded,
  {x:a}    the same with "a" or "an" before it,
  {x:c}    the same with a capital letter.
All chance comes from the random.Random that is passed in, so a seed fixes the text.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

INNERMOST = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{([A-Za-z0-9_]+)(?::([ac]))?\}")
QUESTION = re.compile(
    r"(and |but )?(what|who|whose|why|where|when|how|which|is|are|do|does|did|can|may|will|shall"
    r"|have you|has|were|was|am|could|would)\b"
)
_MOODS = "kind|lovely|nice|sweet|silly|clever|strange|ugly|wonderful|dull|good|beautiful"
_PERSON = "who[a-z]*"
_EXCLAIMS = (
    "what an? ", "what did i", f"how ({_MOODS})", "whoever", "do not", "do you see that$", "when ",
    f"{_PERSON} (found|comes)",
)  # fmt: skip
EXCLAMATION = re.compile(f"({'|'.join(_EXCLAIMS)})")
VOWEL_SOUND = re.compile(r"(?!uni|one\b|use)[aeiou]|hour|honest", re.IGNORECASE)


@dataclass(frozen=True)
class Plot:
    """One plot: beats in order, questions with their answers, and a one-sentence summary.

    `slots` maps a name, or several split by " / ", to alternatives split alike, so that words
    that belong together are drawn together. `cast` gives the two players: c child, a animal,
    x either.
    """

    name: str
    theme: str
    cast: str
    slots: Mapping[str, tuple[str, ...]]
    beats: tuple[str, ...]
    asks: tuple[str, ...]
    summary: str


@dataclass
class Scene:
    """The slots of one story."""

    rng: random.Random
    slots: dict[str, str] = field(default_factory=dict)


def with_article(word: str) -> str:
    """'apple' -> 'an apple'."""
    return ("an " if VOWEL_SOUND.match(word) else "a ") + word


def choose(pattern: str, rng: random.Random) -> str:
    """Resolve every [a|b] of the pattern, innermost first."""
    while match := INNERMOST.search(pattern):
        branch = rng.choice(match.group(1).split("|"))
        pattern = pattern[: match.start()] + branch + pattern[match.end() :]
    return pattern


def fill(pattern: str, scene: Scene, depth: int = 0) -> str:
    """Resolve choices and slots, without touching spaces or capitals."""
    if depth > 8:
        raise ValueError(f"the slots of {pattern!r} refer to one another in a circle")

    def one(match: re.Match[str]) -> str:
        name, form = match.group(1), match.group(2)
        if name not in scene.slots:
            raise KeyError(f"no slot {name!r} for the pattern {pattern!r}")
        value = fill(scene.slots[name], scene, depth + 1)
        if form == "a":
            return with_article(value)
        return value[0].upper() + value[1:] if form == "c" and value else value

    return SLOT.sub(one, choose(pattern, scene.rng))


def is_question(sentence: str) -> bool:
    """Whether a spoken sentence asks something, judged by its first word (and the word after a
    comma).
    """
    lead = re.split(r"[,:] ", sentence.strip().lower())[-1]
    for clause in (sentence.strip().lower(), lead):
        if QUESTION.match(clause) and not EXCLAMATION.match(clause):
            return True
    return False


def mark_speech(match: re.Match[str]) -> str:
    """Give each sentence inside quotation marks the mark it needs: a question mark or not."""
    speech, after = match.group(1), match.group(2)

    def one(part: re.Match[str]) -> str:
        sentence, mark = part.group(1), part.group(2)
        last = part.end() == len(speech)
        if is_question(sentence):
            return sentence + "?"
        if mark == "?" and len(sentence.split()) > 2:
            return sentence + ("," if last and after.strip() else ".")
        return sentence + mark

    return '"' + re.sub(r"([^.!?]+?)([.!?]|,$)", one, speech) + '"' + after


def expand(pattern: str, scene: Scene) -> str:
    """Resolve a pattern into finished sentences: single spaces, capitals at sentence starts."""
    text = re.sub(r"  +", " ", fill(pattern, scene))
    text = re.sub(r" +([.,!?])", r"\1", text).strip()
    text = re.sub(r'([a-z])"\.', r'\1."', text)
    text = re.sub(r'"([^"]*)"( .|$|\n|)', mark_speech, text)
    text = re.sub(r'((?:^|[.!?,:]"? )")([a-z])', lambda m: m[1] + m[2].upper(), text)
    return re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)


def phrasings(pattern: str, slots: Mapping[str, str], depth: int = 0) -> int:
    """The number of wordings of a pattern, macros included; at most 10**9."""
    groups = top_groups(pattern)
    number = math.prod(sum(phrasings(branch, slots, depth) for branch in group) for group in groups)
    flat = pattern
    for group in groups:
        flat = flat.replace("[" + "|".join(group) + "]", "", 1)
    for slot in SLOT.finditer(flat):
        if depth < 4 and slot.group(1) in slots:
            number *= phrasings(slots[slot.group(1)], slots, depth + 1)
    return min(number, 10**9)


def top_groups(pattern: str) -> list[list[str]]:
    """The outermost [..|..] groups of a pattern, each as its list of branches."""
    groups: list[list[str]] = []
    level = 0
    branch_starts: list[int] = []
    for at, char in enumerate(pattern):
        if char == "[":
            level += 1
            if level == 1:
                branch_starts = [at + 1]
        elif char == "|" and level == 1:
            branch_starts.append(at + 1)
        elif char == "]":
            level -= 1
            if level == 0:
                ends = [start - 1 for start in branch_starts[1:]] + [at]
                pairs = zip(branch_starts, ends, strict=True)
                groups.append([pattern[start:end] for start, end in pairs])
    if level:
        raise ValueError(f"brackets do not close in {pattern!r}")
    return groups
