"""Chat turns with checkable answers: sums, comparing, sorting, counting, small facts, and stories
with questions.

Knows what is asked and the right answer (and, for thinking mode, a few words of working); knows
nothing of the template or of tokens. `is_held_out` says which sums are never shown in training.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from training import facts
from training.grammar import with_article
from training.lexicon import BOYS, GIRLS
from training.storyteller import Story, tell

HELD_OUT_IN = 10
NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)


@dataclass(frozen=True)
class Exchange:
    """One question, its answer, and the thought that leads there ("" when there is nothing to think
    about).
    """

    ask: str
    answer: str
    thought: str = ""


@dataclass(frozen=True)
class Chat:
    """A conversation: a kind, a system message ("" for none) and exchanges in order."""

    kind: str
    system: str
    exchanges: tuple[Exchange, ...]


def is_held_out(a: int, op: str, b: int) -> bool:
    """Every tenth sum or difference with a two-digit number, by a hash; a+b and b+a go together."""
    if op == "*" or max(a, b) < 10:
        return False
    low, high = (min(a, b), max(a, b)) if op == "+" else (a, b)
    digest = hashlib.blake2b(f"{low}{op}{high}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % HELD_OUT_IN == 0


def draw_sum(rng: random.Random, held_out: bool = False) -> tuple[int, str, int, int]:
    """(a, op, b, result) with op in + - *; from the training part, or from the held-out part."""
    while True:
        op = rng.choice("++++---*")
        top = 12 if op == "*" else rng.choice((20, 99, 99, 99))
        a, b = rng.randint(0, top), rng.randint(0, top)
        if op == "-":
            a, b = max(a, b), min(a, b)
        if is_held_out(a, op, b) == held_out:
            return a, op, b, {"+": a + b, "-": a - b, "*": a * b}[op]


def ask_sum(rng: random.Random, a: int, op: str, b: int) -> str:
    """A question for a sum."""
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    templates = [
        f"What is {a} {op} {b}?", f"What is {a} {word} {b}?", f"{a} {op} {b} =", f"How much is {a} {word} {b}?",
        f"How much is {a} {op} {b}?", f"{a}{op}{b}=", f"Please tell me: what is {a} {op} {b}?", f"{a} {op} {b}?",
        f"Can you work out {a} {op} {b}?", f"What is {a}{op}{b}?",
    ]  # fmt: skip
    if op == "+":
        templates.append(f"Add {a} and {b}.")
    if op == "-":
        templates.append(f"Take {b} away from {a}.")
    return rng.choice(templates)


def think_sum(a: int, op: str, b: int) -> str:
    """The working of a sum, digit by digit, as a child would write it."""
    if op == "*":
        if 0 in (a, b):
            return f"Anything times 0 is 0. So {a} * {b} = 0."
        steps = ", ".join(str(b * i) for i in range(1, a + 1))
        return f"{a} times {b}: count by {b}. {steps}."
    (a1, a0), (b1, b0) = divmod(a, 10), divmod(b, 10)
    if op == "+":
        low = a0 + b0
        carry, digit = divmod(low, 10)
        head = (
            f"{a0} + {b0} = {low}, write {digit}, carry {carry}."
            if carry
            else f"{a0} + {b0} = {low}, no carry."
        )
        return f"Ones: {head} Tens: {a1} + {b1}{' + 1' if carry else ''} = {a1 + b1 + carry}. So {a + b}."
    borrow = int(a0 < b0)
    digit = a0 + 10 * borrow - b0
    head = (
        f"{a0 + 10} - {b0} = {digit}, borrow 1." if borrow else f"{a0} - {b0} = {digit}, no borrow."
    )
    return f"Ones: {head} Tens: {a1} - {b1}{' - 1' if borrow else ''} = {a1 - b1 - borrow}. So {a - b}."


def sum_exchange(rng: random.Random, held_out: bool = False) -> Exchange:
    """A sum, its answer and its working."""
    a, op, b, result = draw_sum(rng, held_out)
    return Exchange(ask_sum(rng, a, op, b), f"{a} {op} {b} = {result}.", think_sum(a, op, b))


def word_sum(rng: random.Random) -> Exchange:
    """A sum in words."""
    name, thing = rng.choice(GIRLS + BOYS), rng.choice(facts.COUNTABLE)
    while True:
        a, b = rng.randint(2, 20), rng.randint(1, 15)
        op = rng.choice("+-")
        a, b = (max(a, b), min(a, b)) if op == "-" else (a, b)
        if not is_held_out(a, op, b):
            break

    def some(count: int) -> str:
        return f"{count} {thing}{'' if count == 1 else 's'}"

    if op == "+":
        how = rng.choice((f"gets {b} more", f"finds {b} more", f"buys {b} more"))
        ask = f"{name} has {some(a)} and {how}. How many {thing}s does {name} have now?"
        return Exchange(
            ask, f"{a} + {b} = {a + b}. {name} has {some(a + b)} now.", think_sum(a, op, b)
        )
    how = rng.choice((f"gives away {b}", f"loses {b}", f"sells {b}"))
    ask = f"{name} has {some(a)} and {how}. How many {thing}s are left?"
    verb = "is" if a - b == 1 else "are"
    return Exchange(
        ask, f"{a} - {b} = {a - b}. There {verb} {some(a - b)} left.", think_sum(a, op, b)
    )


def compare(rng: random.Random) -> Exchange:
    """Which of two numbers is bigger or smaller."""
    a, b = rng.sample(range(100), 2)
    word = rng.choice(("bigger", "smaller"))
    best, rest = (max(a, b), min(a, b)) if word == "bigger" else (min(a, b), max(a, b))
    ask = rng.choice((f"Which number is {word}, {a} or {b}?", f"Which is {word}: {a} or {b}?"))
    return Exchange(ask, f"{best} is {word} than {rest}.", f"{max(a, b)} comes after {min(a, b)}.")


def sort_numbers(rng: random.Random) -> Exchange:
    """Numbers in order."""
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    shown = ", ".join(map(str, numbers))
    ask = rng.choice((f"Sort these numbers: {shown}.", f"Put these numbers in order: {shown}."))
    ordered = sorted(numbers)
    return Exchange(
        ask,
        ", ".join(map(str, ordered)) + ".",
        f"The smallest is {ordered[0]}, the biggest is {ordered[-1]}.",
    )


def count(rng: random.Random) -> Exchange:
    """Counting up or down."""
    start, steps = rng.randint(0, 90), rng.randint(3, 9)
    if rng.random() < 0.3:
        start = max(start, steps)
        numbers = range(start, start - steps - 1, -1)
        return Exchange(
            f"Count down from {start} to {start - steps}.", ", ".join(map(str, numbers)) + "."
        )
    numbers = range(start, start + steps + 1)
    return Exchange(f"Count from {start} to {start + steps}.", ", ".join(map(str, numbers)) + ".")


def neighbor_number(rng: random.Random) -> Exchange:
    """The number after or before."""
    number, step = rng.randint(1, 98), rng.choice((1, -1))
    word = "after" if step > 0 else "before"
    return Exchange(
        f"Which number comes {word} {number}?", f"{number + step} comes {word} {number}."
    )


def small_fact(rng: random.Random) -> Exchange:
    """One of the tables of facts.py."""
    kind = rng.randrange(8)
    if kind == 0:
        a, b = rng.sample(rng.choice(facts.OPPOSITES), 2)
        return Exchange(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.")
    if kind == 1:
        a, b = rng.choice(facts.BABIES)
        return Exchange(f"What is a baby {a} called?", f"A baby {a} is called {with_article(b)}.")
    if kind == 2:
        a, b = rng.choice(facts.SOUNDS)
        return Exchange(
            f"What sound does {with_article(a)} make?", f"{with_article(a).capitalize()} says {b}."
        )
    if kind == 3:
        a, b = rng.choice(facts.CAPITALS)
        return Exchange(
            f"What is the capital of {a}?",
            f"The capital of {a} is {b}.",
            f"{b} is the capital of {a}.",
        )
    if kind == 4:
        a, b = rng.choice(facts.LEGS)
        return Exchange(
            f"How many legs does {with_article(a)} have?",
            f"{with_article(a).capitalize()} has {b} legs.",
        )
    if kind == 5:
        a, b = rng.choice(facts.COLOR_OF)
        return Exchange(f"What color is {a}?", f"{a.capitalize()} is {b}.")
    if kind == 6:
        word = rng.choice(facts.SPELL)
        return Exchange(f"How do you spell {word}?", f"{word} is spelled {'-'.join(word)}.")
    thing = rng.choice(list(facts.MEANINGS))
    return Exchange(
        rng.choice((f"What is {thing}?", f"Tell me what {thing} is.")), facts.MEANINGS[thing]
    )


def calendar(rng: random.Random) -> Exchange:
    """The day or month after or before."""
    names = rng.choice((facts.DAYS, facts.MONTHS))
    at, step = rng.randrange(len(names)), rng.choice((1, -1))
    word, unit = ("after" if step > 0 else "before"), ("day" if names is facts.DAYS else "month")
    answer = f"{names[(at + step) % len(names)]} comes {word} {names[at]}."
    return Exchange(f"Which {unit} comes {word} {names[at]}?", answer)


def grouping(rng: random.Random) -> Exchange:
    """Name some of a group, or say whether something belongs to one."""
    group = rng.choice(list(facts.GROUPS))
    if rng.random() < 0.5:
        number = rng.randint(2, 5)
        chosen = rng.sample(facts.GROUPS[group], number)
        answer = ", ".join(chosen[:-1]).capitalize() + " and " + chosen[-1] + "."
        return Exchange(f"Name {NUMBER_WORDS[number]} {group}s.", answer)
    own = rng.choice([name for name in facts.GROUPS if name != "color"])
    word = rng.choice(facts.GROUPS[own])
    ask = f"Is {with_article(word)} {with_article(group)}?"
    if word in facts.GROUPS[group]:
        return Exchange(ask, f"Yes, {with_article(word)} is {with_article(group)}.")
    return Exchange(
        ask, f"No, {with_article(word)} is not {with_article(group)}. It is {with_article(own)}."
    )


def small_talk(rng: random.Random) -> Exchange:
    """Politeness."""
    asks, answers = rng.choice(facts.SMALL_TALK)
    return Exchange(
        rng.choice(asks.split("|")), rng.choice(answers.split("|")), "The user is being friendly."
    )


def ask_story(rng: random.Random, story: Story) -> Exchange:
    """A wish for a story, and the story."""
    template = rng.choice((
        "Tell me a story about {}.", "Write a short story about {}.", "Can you tell me a story about {}?",
        "I want to hear a story about {}.", "A story about {}, please.", "Tell me a short story about {}.",
        "Please tell me a story about {}.", "Write a story about {}.",
    ))  # fmt: skip
    ask = template.format(story.subject)
    if rng.random() < 0.12:
        ask = rng.choice(
            (
                "Tell me a story.",
                "Tell me a short story.",
                "I want to hear a story.",
                "A story, please!",
            )
        )
    return Exchange(ask, story.text, f"I will tell a story about {story.subject}. {story.summary}")


def story_chat(rng: random.Random) -> Chat:
    """A story on request, then perhaps questions about it, or a request for a summary."""
    story = tell(rng)
    turns = [ask_story(rng, story)]
    for ask, answer in rng.sample(story.asks, rng.choice((0, 0, 1, 2))):
        turns.append(Exchange(ask, answer, story.summary))
    return Chat("story", "", tuple(turns))


def story_questions(rng: random.Random) -> Chat:
    """A story in the question, then questions about it."""
    story = tell(rng)
    chosen = rng.sample(story.asks, min(len(story.asks), rng.choice((1, 2, 3, 4))))
    first, *rest = [Exchange(ask, answer, story.summary) for ask, answer in chosen]
    if rng.random() < 0.2:
        ask = rng.choice(
            (
                "What is this story about?",
                "Tell me in one sentence what happens.",
                "Give a short summary.",
            )
        )
        first, rest = Exchange(ask, story.summary), [first, *rest]
    lead = rng.choice(("Read this story.", "Here is a story.", "Listen to this story."))
    first = Exchange(f"{lead}\n{story.text}\n{first.ask}", first.answer, first.thought)
    return Chat("questions", "", (first, *rest))


def story_finished(rng: random.Random) -> Chat:
    """A story that the user starts and the model finishes."""
    story = tell(rng)
    beats, at = story.text.split("\n"), rng.choice((1, 2))
    ask = rng.choice(facts.FINISH)
    return Chat(
        "finish",
        "",
        (Exchange(ask + "\n" + "\n".join(beats[:at]), "\n".join(beats[at:]), story.summary),),
    )


SHORT_KINDS: tuple[tuple[float, Callable[[random.Random], Exchange]], ...] = (
    (10.0, sum_exchange), (1.5, word_sum), (0.8, compare), (0.8, sort_numbers), (0.5, count), (0.3, neighbor_number),
    (2.0, small_fact), (0.4, calendar), (0.8, grouping), (1.2, small_talk),
)  # fmt: skip


def short_chat(rng: random.Random) -> Chat:
    """One to six short questions of mixed kinds, mostly sums."""
    weights = [weight for weight, _ in SHORT_KINDS]
    makers = rng.choices(
        [maker for _, maker in SHORT_KINDS], weights, k=rng.choice((1, 1, 2, 3, 4, 6))
    )
    return Chat("short", "", tuple(maker(rng) for maker in makers))


def chat(rng: random.Random, short_share: float = 0.45) -> Chat:
    """Any conversation; sometimes with a system message in front."""
    made = short_chat(rng) if rng.random() < short_share else long_chat(rng)
    system = rng.choice(facts.SYSTEMS) if rng.random() < 0.15 else ""
    return Chat(made.kind, system, made.exchanges)


def long_chat(rng: random.Random) -> Chat:
    """A conversation with a story in it."""
    share = rng.random()
    if share < 0.6:
        return story_chat(rng)
    return story_questions(rng) if share < 0.93 else story_finished(rng)
