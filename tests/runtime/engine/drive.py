"""Runs engines until nothing is left to do."""

from collections.abc import Callable

from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.request import Event, Request


def drain(
    engine: Engine, *requests: Request, after: Callable[[], object] = lambda: None
) -> dict[int, list[Event]]:
    """The events from here on, by request, of these and of those before; `after` each step."""
    events: dict[int, list[Event]] = {engine.submit(one): [] for one in requests}
    while not engine.idle:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        after()
    return events


def tokens_of(events: list[Event]) -> list[int]:
    return [e.token for e in events if e.token is not None]


def said(engine: Engine, *requests: Request) -> list[list[int]]:
    """The tokens of each."""
    return [tokens_of(events) for events in drain(engine, *requests).values()]
