"""A port is one server's from the beginning, before that listens."""

import contextlib
import socket
import sys

import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.server.process.port import bind


@pytest.mark.skipif(sys.platform != "linux", reason="claims are Linux's abstract names")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_second_server_is_refused_while_the_first_loads(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    with contextlib.closing(bind(host, 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(OptionError, match=rf"{host}:{port} .*already in use.*--port"):
            bind(host, port)
        assert first.claim is not None, "and the first has it still"
        with pytest.raises(OptionError):
            bind(host, port)
    bind(host, port).close()


def test_a_port_with_lingering_connections_is_taken() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        first.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = first.accept()
            served.close()  # the side that closes first keeps the address for a minute
            assert client.recv(1) == b""
    with contextlib.closing(bind("127.0.0.1", port)) as again:
        assert again.getsockname()[1] == port


def test_one_that_listens_refuses_too() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OptionError, match="choose another --host or --port"):
            bind("127.0.0.1", taken.getsockname()[1])
