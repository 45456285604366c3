"""The table of options: each row fills a field and has that field's default and a help text."""

import dataclasses
from typing import Any

import pytest
from click.testing import CliRunner

from spark_engine.errors import OptionError
from spark_engine.runtime.cli.options.option import Group, Mode, Option, defaults, why_idle
from spark_engine.runtime.cli.options.run_options import (
    OPTIONS,
    body,
    engine_options,
    server_options,
)
from spark_engine.runtime.cli.spark_run import main
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.policy.pacing import Pace, PrefillPolicy
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.server.process.options import ServerOptions

NOTHING: dict[str, Any] = {row.name: row.default for row in OPTIONS}


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.flag)
def test_a_row_is_whole(row: Option) -> None:
    assert row.flag.startswith("--") and row.help.endswith(".") and len(row.help) <= 120
    assert sum(row.flag == other.flag for other in OPTIONS) == 1
    if row.fills is not None:
        assert row.fills[1] in defaults(row.fills[0])
        assert sum(row.fills == other.fills for other in OPTIONS) == 1
    assert row.needs is None or row.needs[0] in {other.flag for other in OPTIONS}


def test_without_options_every_class_is_as_by_default() -> None:
    assert server_options(NOTHING) == ServerOptions()
    assert engine_options(NOTHING) == EngineOptions()
    assert body(NOTHING) == Body()


def test_values_reach_their_fields() -> None:
    given = {"port": 9, "served_model_name": ("a", "b"), "request_timeout": 2.5, "no_graphs": True}
    more = {"policy": "latency", "itl_ms": 20.0, "cache_gib": 0.5, "drafts": 2, "api_key": "k"}
    more["fixed_drafts"] = True
    made = server_options(NOTHING | given | more)
    want = ServerOptions(port=9, names=("a", "b"), timeout_s=2.5, api_key="k", engine=made.engine)
    assert made == want
    policy = PrefillPolicy(Pace.LATENCY, 20.0)
    drafts: Any = {"drafts": 2, "fixed_drafts": True}
    assert made.engine == EngineOptions(policy, cache_bytes=1 << 29, graphs=False, **drafts)
    assert engine_options(NOTHING | {"drafts": 0}).drafts == 0, "which is not None"
    assert body(NOTHING | {"temperature": 0.0, "stop": ("x",)}) == Body(temperature=0.0, stop=["x"])


def test_every_field_of_a_server_can_be_said_or_is_known_not_to() -> None:
    """A field that a helper of the server adds has a row, or is one of these."""
    said = {row.fills[1] for row in OPTIONS if row.fills and row.fills[0] is ServerOptions}
    fields = {field.name for field in dataclasses.fields(ServerOptions)}
    assert fields - said == {"chat", "engine", "grace_s"}


def test_why_an_option_does_nothing() -> None:
    row = Option("--x", Group.SERVER, "X.")
    assert why_idle(row, Mode.SERVE, {}) is None
    assert "instead of --prompt-ids" in str(why_idle(row, Mode.PROMPT_IDS, {}))
    both = Option("--x", Group.ANSWER, "X.", modes=frozenset({Mode.CHAT, Mode.PROMPT}))
    assert why_idle(both, Mode.PROMPT_IDS, {}) == "with --prompt-ids; it is for --prompt and --chat"
    terminal = why_idle(both, Mode.TERMINAL, {})
    assert terminal == "with a chat on the terminal; it is for --prompt and --chat"
    needing = Option("--x", Group.ANSWER, "X.", needs=("--some-y", "which shows it"))
    assert why_idle(needing, Mode.CHAT, {"some_y": True}) is None
    words = "without --some-y, which shows it: add --some-y"
    assert why_idle(needing, Mode.CHAT, {"some_y": False}) == words


@pytest.mark.parametrize("flag", ["--request-timeout", "--drain-timeout"])
def test_no_time_is_below_0(flag: str) -> None:
    done = CliRunner().invoke(main, ["--serve", flag, "-1"])
    assert done.exit_code == 2 and f"Invalid value for '{flag}'" in done.output


def test_what_no_browser_comes_from_is_no_origin() -> None:
    (row,) = [one for one in OPTIONS if one.flag == "--cors-origin"]
    assert row.turn is not None
    good = ("*", "https://a.example", "http://localhost:8080", "http://[::1]:80", "http://10.0.0.1")
    assert row.turn(list(good)) == good
    for bad in ("foo", "https://a.example/", "ftp://a", "http://a:b", "", "https://"):
        with pytest.raises(OptionError, match="a browser's origin is like"):
            row.turn([bad])
