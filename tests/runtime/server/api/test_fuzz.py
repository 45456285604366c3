"""Whatever a tool makes of our own OpenAPI document, no answer is a server's error.

`make fuzz` tries two hundred times as much.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings

from spark_engine.runtime.server.prompts.contract import Blobs, JobKind, Result
from tests.loop_watch import LIMIT_S, watched
from tests.runtime.fake_client import Inline
from tests.runtime.server.api.api_client import THOUGHT, ApiClient

FUZZ = "fuzz"  # the profile of `make fuzz`
EXAMPLES = 3


class Threaded(Inline):
    """Reads bodies in a thread, as a server does in other processes: what is left to the event loop
    is measured."""

    async def run(
        self, kind: JobKind, blobs: Sequence[Blobs], owner: str = "", fetched: Any = ()
    ) -> tuple[Result, list[bytes]]:
        return await asyncio.to_thread(self.do, kind, blobs, fetched)


SERVER = ApiClient(THOUGHT + "Hello", context=512)
SERVER.service._pool = Threaded(SERVER.service._pool.handler)  # type: ignore[attr-defined]
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", SERVER.app)


def _settings() -> settings:
    fuzzing = settings.get_current_profile_name() == FUZZ
    most = settings.default.max_examples if fuzzing else EXAMPLES
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck))


@SCHEMA.parametrize()
@_settings()
def test_no_body_is_a_servers_error(case: schemathesis.Case) -> None:
    with watched() as longest:
        response = case.call()
    assert longest.seconds < LIMIT_S, longest
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and response.content:
        assert json.loads(response.content)["error"]["message"]
