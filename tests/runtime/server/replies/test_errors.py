"""The error that a client gets for an exception."""

from __future__ import annotations

from spark_engine.errors import CapacityError
from spark_engine.runtime.server.replies.errors import error_response


def test_what_has_no_room_now_is_to_come_again_and_no_bug() -> None:
    status, body = error_response(CapacityError("2 other grammars are compiled already"))
    assert status == 503 and body["error"]["type"] == "service_unavailable"
