"""A replica's process: secrets must not be visible to other users."""

from spark_engine.runtime.replicas.server_process import ServerProcess
from spark_engine.runtime.server.process.options import ServerOptions


def test_no_key_is_on_the_command_line() -> None:
    child = ServerProcess("/nowhere", ServerOptions(host="127.0.0.1", api_key="sk-secret"))
    try:
        words = child._process.args
        assert isinstance(words, list) and "/nowhere" in words
        assert not any("secret" in str(word) for word in words)
    finally:
        child.stop(0)
