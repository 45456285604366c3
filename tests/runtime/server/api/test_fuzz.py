"""Whatever a tool makes of our own OpenAPI document, no answer is a server's error.

`make fuzz` tries two hundred times as much.
"""

from __future__ import annotations

import json

import schemathesis
from hypothesis import HealthCheck, settings

from tests.runtime.server.api.api_client import THOUGHT, ApiClient

FUZZ = "fuzz"  # the profile of `make fuzz`
EXAMPLES = 3

SERVER = ApiClient(THOUGHT + "Hello", context=512)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", SERVER.app)


def _settings() -> settings:
    fuzzing = settings.get_current_profile_name() == FUZZ
    most = settings.default.max_examples if fuzzing else EXAMPLES
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck))


@SCHEMA.parametrize()
@_settings()
def test_no_body_is_a_servers_error(case: schemathesis.Case) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and response.content:
        assert json.loads(response.content)["error"]["message"]
