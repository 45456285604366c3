"""What a client's script tries, one feature after the other, and the verdicts as JSON.

Runs in every client's environment, so it imports the standard library alone. A script is called
as `with_NAME.py URL MODEL`, where URL is the server's without `/v1`; its last line of output is
`{"feature": "" | "what failed"}`.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL, MODEL = (sys.argv[1:] + ["http://127.0.0.1:8000", "tiny"])[:2]
V1 = f"{URL}/v1"
KEY = "any"  # the server asks for none; clients want one
SUM = "What is 3 plus 4?"  # the embedded model knows
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PNG = (  # one pixel, which becomes 32 x 32: one token
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPj/HwADBwIAMCbHYQAAAABJRU5E"
    "rkJggg=="
)
PICTURE = f"data:image/png;base64,{PNG}"
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
