"""The error that a client gets for an exception."""

from spark_engine.errors import CapacityError
from spark_engine.runtime.server.replies.errors import error_response


def test_a_lack_of_capacity_is_to_be_retried_and_no_bug() -> None:
    status, body = error_response(CapacityError("2 other grammars are compiled already"))
    assert status == 503 and body["error"]["type"] == "service_unavailable"
