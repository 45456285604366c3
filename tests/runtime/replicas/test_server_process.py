"""A replica's process: what others may read of it."""

from __future__ import annotations

from spark_engine.runtime.replicas.server_process import ServerProcess
from spark_engine.runtime.server.process.server import ServerOptions


def test_no_key_stands_on_the_command_line() -> None:
    child = ServerProcess("/nowhere", ServerOptions(host="127.0.0.1", api_key="sk-secret"))
    try:
        words = child._process.args
        assert isinstance(words, list) and "/nowhere" in words
        assert not any("secret" in str(word) for word in words)
    finally:
        child.stop(0)
