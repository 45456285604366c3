"""A rank's handling of a first packet from a rank 0 of another version."""

import socket
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from spark_engine.runtime.cli import rank_process
from spark_engine.runtime.ranks.channel import HEAD, INLINE, read_answer
from spark_engine.runtime.ranks.messages import ANSWER, RankFailed
from spark_engine.runtime.ranks.spawn import RankChannels, RankSpec
from tests.runtime.ranks.test_group import NoCalls


@pytest.mark.parametrize("more", [[], [1, None, True, {"new": 1}, "more", 2, 3, 4, 5]])
def test_another_version_is_refused_with_what_to_install(
    more: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With fewer or other fields: an undecodable packet would make the rank restart forever."""
    mine, theirs = socket.socketpair()
    monkeypatch.setattr(
        rank_process, "connect_rank", lambda seat: RankChannels(theirs, cast(Any, NoCalls()))
    )
    monkeypatch.setattr(rank_process, "_end_with", lambda parent: None)
    monkeypatch.setattr(rank_process, "_leave_with_rank_0", lambda receiver: None)
    monkeypatch.setattr(rank_process, "manifest_digest", lambda path: "same")
    packet = msgspec.msgpack.encode(["Begin", "same", "0.0.1", *more])
    seat = msgspec.json.encode(RankSpec(str(tmp_path), 1, 2, hosts=("a", "b"))).decode()
    with mine, theirs:
        mine.sendall(HEAD.pack(len(packet), INLINE) + packet)
        assert rank_process.main([seat]) == 2  # an exit code that is not retried
        answer = ANSWER.decode(read_answer(mine) or b"")
    assert isinstance(answer, RankFailed) and answer.user and not answer.passing
    own = version("spark-engine")
    assert f"runs spark-engine {own}, rank 0 0.0.1: install one version" in answer.message


def test_an_answer_that_no_rank_gives_is_an_end() -> None:
    """The sender is not a rank; the watching thread must survive its message."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(HEAD.pack(1 << 63, INLINE),))
        sender.start()
        assert read_answer(mine) is None
        sender.join()
