"""The log under a flood: one line a second of a kind, and what was left out is counted."""

import logging

from spark_engine.runtime.server.operation.log_limit import OnePerKind, limited_log


def test_one_line_a_second_of_a_kind() -> None:
    now = [100.0]
    lines: list[str] = []
    log = logging.Logger("server")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(OnePerKind(lambda: now[0]))
    log.addHandler(handler)
    for i in range(1000):
        log.warning("bad request from %d", i)
        log.error("no descriptor\nsocket 0x%x", i)
    log.info("bad request from %d", 7)  # another level is another kind
    assert lines == ["bad request from 0", "no descriptor\nsocket 0x0", "bad request from 7"]
    now[0] += 1.0
    log.warning("bad request from %d", 5)
    log.warning("bad request from %d", 6)
    assert lines[3:] == ["bad request from 5 (999 more like this)"]


def test_kinds_are_forgotten_before_they_fill_the_memory() -> None:
    quiet = OnePerKind(lambda: 0.0)
    for i in range(5000):
        assert quiet.filter(logging.makeLogRecord({"msg": f"made elsewhere {i}", "name": "x"}))
    assert len(quiet._seen) <= 1000


def test_the_limit_ends_with_the_server() -> None:
    """Handlers of the root logger outlive a server that ran in this process."""
    handlers = logging.getLogger().handlers
    assert handlers, "pytest's own"
    before = [list(handler.filters) for handler in handlers]
    with limited_log():
        assert all(isinstance(handler.filters[-1], OnePerKind) for handler in handlers)
    assert [list(handler.filters) for handler in handlers] == before
