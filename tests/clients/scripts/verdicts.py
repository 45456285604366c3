"""What a client's script tries, one feature after the other, and the verdicts as JSON.

Runs in every client's environment, so it imports the standard library alone. A script is called
as `with_NAME.py URL MODEL`, where URL is the server's without `/v1`; its last line of output is
`{"feature": "" | "what failed"}`.
"""

import asyncio
import inspect
import json
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from asked import ANSWER

Try = Callable[[], Any]


class Trial:
    """The features of one client, in their order."""

    def __init__(self) -> None:
        self._tries: dict[str, Try] = {}

    def __call__(self, feature: str) -> Callable[[Try], Try]:
        """Adds a function that raises where the feature does not work."""

        def add(work: Try) -> Try:
            assert feature not in self._tries, feature
            self._tries[feature] = work
            return work

        return add

    def says(self, feature: str, *asks: Try) -> None:
        """Adds a feature: each gives the text of the sum."""
        self(feature)(lambda: [same(ask(), ANSWER) for ask in asks])

    def gives(self, feature: str, *asks: Try) -> None:
        """Adds a feature: each gives something."""
        self(feature)(lambda: [holds(ask()) for ask in asks])

    def calls(self, feature: str, *asks: Try) -> None:
        """Adds a feature: each gives a value, or arguments of a call, of the schema `WEATHER`."""
        self(feature)(lambda: [is_weather(ask()) for ask in asks])

    def eight(self, ask: Callable[[str], Awaitable[str]]) -> None:
        """Adds the feature of eight sums that are asked for at once."""

        async def work() -> None:
            found = await asyncio.gather(*(ask(f"What is {i} plus 4?") for i in range(8)))
            same(found, [f"{i} + 4 = {i + 4}." for i in range(8)])

        self("asynchronous, eight at once")(work)

    def sees(self, *asks: Callable[[bool], int]) -> None:
        """Adds the feature of images: each gives the tokens of a prompt, without or with one."""
        # the image's token, those around it, and a line's end at most
        self("images")(lambda: [holds(3 <= ask(True) - ask(False) <= 4, ask(True)) for ask in asks])

    def run(self) -> None:
        """Tries all, and prints the verdicts. A name as third argument tries that one alone."""
        only = sys.argv[3:]
        found = {}
        for feature, work in self._tries.items():
            if only and feature not in only:
                continue
            try:
                if inspect.iscoroutinefunction(work):
                    asyncio.run(work())
                else:
                    work()
                found[feature] = ""
            except Exception as problem:  # a verdict, whatever it is
                if only:
                    traceback.print_exc()
                found[feature] = f"{type(problem).__name__}: {problem}"[:600]
        print(json.dumps(found), flush=True)


def same(found: Any, wanted: Any) -> None:
    """Raises where they differ."""
    if found != wanted:
        raise AssertionError(f"{found!r:.200} is not {wanted!r:.200}")


def holds(true: Any, *said: Any) -> None:
    """Raises with what was said where something is not so."""
    if not true:
        raise AssertionError(" ".join(f"{part!r:.300}" for part in said) or "it is not so")


def is_weather(arguments: Any) -> None:
    """Raises where arguments of a call, or an answer, are not of the schema `WEATHER`."""
    given = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    same(set(given), {"city", "days"})
    holds(given["city"] in ("Paris", "Oslo", "Rome"), given)
    holds(isinstance(given["days"], int) and 1 <= given["days"] <= 7, given)


def refused(kind: type[BaseException], call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The error of this kind in which the call ends."""
    try:
        call(*given, **named)
    except kind as error:
        return error
    raise AssertionError(f"{given} {named} was taken")


def run_tool(name: str, flags: list[str], options: Mapping[str, object], **how: Any) -> None:
    """Runs a program of the environment."""
    words = [str(word) for pair in options.items() for word in pair]
    command = [Path(sys.executable).with_name(name), *flags, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **how)
    same((done.returncode, (done.stdout + done.stderr)[-300:] if done.returncode else ""), (0, ""))
