"""Operating a server: other keys, limits, the log of a real process."""

import asyncio
import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from spark_engine.errors import EngineError, OptionError
from spark_engine.interface import Limits
from spark_engine.runtime.server.engine_client.client import EngineClient
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.process import http_server, open_service
from spark_engine.runtime.server.process import server as module
from spark_engine.runtime.server.process.open_service import shorten
from tests import patient
from tests.patient import wait
from tests.runtime import native_folder
from tests.runtime.server.process.test_server import Running, _server

OLD, NEW = '[[key]]\nname = "ann"\nkey = "old"\n', '[[key]]\nname = "ann"\nkey = "new"\n'
BODY = {"prompt": "x", "max_tokens": 4}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(OLD)
    return path


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, keys: Path) -> Iterator[Running]:
    options = {"log_format": "json", "access_log": True, "max_model_len": 40, "max_body_mib": 1}
    with _server(tokenizer_folder, keys.parent / "log", api_keys=str(keys), **options) as running:
        yield running


def _post(server: Running, key: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", "x-request-id": "mine"}
    return patient.post(server.url + "/v1/completions", json=BODY | more, headers=headers)


def _rows(keys: Path) -> list[dict[str, Any]]:
    whole = (keys.parent / "log").read_text().rpartition("\n")[0]  # one may be half written
    lines = whole.splitlines()
    return [json.loads(line) for line in lines]


def test_every_line_of_the_log_is_json_and_names_its_request(server: Running, keys: Path) -> None:
    assert _post(server, "old").status_code == 200
    wait(lambda: any(row.get("path") == "/v1/completions" for row in _rows(keys)), "the line")
    row = [row for row in _rows(keys) if row.get("path") == "/v1/completions"][-1]
    assert (row["key"], row["id"], row["status"], row["tokens"]) == ("ann", "mine", 200, 4)
    assert 0 <= row["queued"] <= row["first"] <= row["seconds"] < 100
    assert any(row["message"].startswith("serving ") for row in _rows(keys))


def test_a_hangup_reads_the_keys_again(server: Running, keys: Path) -> None:
    keys.write_text("[[key")
    server.process.send_signal(signal.SIGHUP)
    wait(lambda: any("stay as they were" in row["message"] for row in _rows(keys)), "the words")
    assert (_post(server, "old").status_code, _post(server, "new").status_code) == (200, 401)
    keys.write_text(NEW)
    server.process.send_signal(signal.SIGHUP)
    wait(lambda: _post(server, "new").status_code == 200, "the new key")
    assert _post(server, "old").status_code == 401
    keys.write_text(OLD)
    server.process.send_signal(signal.SIGHUP)
    wait(lambda: _post(server, "old").status_code == 200, "the old key")


def test_a_hangup_while_the_engine_is_loaded_ends_nothing(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemctl reload` does not wait for a server that starts."""
    path, known = tmp_path / "keys", list[bool]()
    path.write_text(OLD)
    options = module.ServerOptions(port=0, api_keys=str(path))

    class Loading(EngineClient):
        async def begin(self, early: object) -> None:
            pass

        async def loaded(self) -> EngineInfo:
            path.write_text(NEW)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            raise EngineError("enough")

    class Kept(module.Keyring):
        def reload(self) -> bool:
            known.append(super().reload())
            return known[-1]

    monkeypatch.setattr(open_service, "EngineClient", Loading)
    monkeypatch.setattr(module, "Keyring", Kept)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # else it would end this process
    with pytest.raises(EngineError, match="enough"):
        asyncio.run(module.serve((), tokenizer_folder.parent, options))
    signal.signal(signal.SIGHUP, before)
    assert known == [True]


def test_a_request_reaches_no_more_than_it_may(server: Running) -> None:
    answer = _post(server, "old", prompt=[5] * 30, max_tokens=100).json()
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = _post(server, "old", prompt=[5] * 40)
    assert refused.status_code == 400 and "40" in refused.json()["error"]["message"]
    headers = {"Authorization": "Bearer old"}
    models = patient.get(server.url + "/v1/models", headers=headers).json()
    assert models["data"][0]["max_model_len"] == 40
    large = _post(server, "old", user="x" * (1 << 20))
    assert large.status_code == 413 and f"over {1 << 20} bytes" in large.text


def test_no_engine_is_longer_than_it_was_built() -> None:
    info = EngineInfo("e", Limits(max_seqs=1, max_context=128, pages=1, vocab=9), (1,))
    assert shorten(info, None) is info
    assert shorten(info, 50).limits.max_context == 50
    for most in (1, 65):
        with pytest.raises(OptionError, match=f"--max-model-len is {most}; .* 2 to 64 tokens"):
            shorten(info, most)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 1 << 20}, "--max-model-len is 1048576"),
        ({"traces": "localhost:4318"}, "--otlp-traces-endpoint is 'localhost:4318'"),
    ],
)
def test_what_no_engine_is_served_with_is_refused_before_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    native_folder.write(tmp_path)
    monkeypatch.setattr(module.leaving, "run", lambda serving: pytest.fail("it is loaded"))
    with pytest.raises(OptionError, match=words):
        module.run(tmp_path, module.ServerOptions(**options))


def test_what_is_loaded_is_left_out_of_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection of it holds the event loop up for 50 ms and more."""
    frozen: list[int] = []

    async def startup(*_: object) -> None:
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(uvicorn.Server, "startup", startup)

    async def start() -> None:
        endpoints = SimpleNamespace(models=None, service=SimpleNamespace(client=None))
        made = uvicorn.Config("none"), endpoints, None, "tiny"
        await http_server._Server(*made).startup()  # type: ignore[arg-type]

    gc.unfreeze()
    try:
        asyncio.run(start())
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
