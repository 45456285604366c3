"""An engine folder that is built again while it is served, or while it is being loaded: what runs
continues, and what starts again never mixes the two."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_engine.errors import EngineError
from spark_engine.manifest import Manifest
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.engine_client import engine_folder, supervisor, worker
from spark_engine.runtime.server.engine_client.client import EngineClient, Mailbox
from spark_engine.runtime.server.engine_client.supervisor import Supervision
from spark_engine.runtime.server.process import server
from spark_engine.runtime.server.process.open_service import worker_command
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.prompts import text_files
from tests.patient import until
from tests.runtime import small_engine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two engines that differ in what a request may ask for."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    return (
        small_engine.build(first, tokenizer=False),
        small_engine.build(second, tokenizer=False, context=128),
    )


@pytest.fixture
def folder(built: tuple[Path, Path], tmp_path: Path) -> Iterator[Path]:
    """The first, where it may be replaced."""
    yield Path(shutil.copytree(built[0], tmp_path / "engine"))


def swap(folder: Path, other: Path) -> None:
    """As a build does: whole, by names."""
    staging = folder.with_name("staging")
    shutil.copytree(other, staging)
    folder.rename(folder.with_name("old"))
    staging.rename(folder)
    shutil.rmtree(folder.with_name("old"))


async def answer(client: EngineClient) -> list[int]:
    box: Mailbox = asyncio.Queue()
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    client.submit([Request((5, 6), params)], box, small_engine.SLOTS)
    tokens = list[int]()
    while len(tokens) < 4:
        events = await asyncio.wait_for(box.get(), 60)
        if isinstance(events, list):
            tokens += [event.token for event in events if event.token is not None]
    return tokens


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[EngineClient]:
    command = worker_command(folder, EngineOptions())
    client = EngineClient(command, how=Supervision(dumps=folder.parent))
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def kill(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


async def test_what_runs_continues_and_its_restart_is_not_the_other_engine(
    built: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    async with started(folder) as client:
        first = await answer(client)
        swap(folder, built[1])
        assert await answer(client) == first and len(first) == 4
        kill(client)
        await asyncio.wait_for(client.died.wait(), 60)
    assert "was built again while it was served" in client.reason
    assert "start the server again" in client.reason
    assert client.exit_code == 1, "a systemd unit starts the server again, with the new engine"


async def test_the_same_engine_built_again_is_served_on(
    built: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    async with started(folder) as client:
        first = await answer(client)
        swap(folder, built[0])
        kill(client)
        await until(lambda: client.restarts and not client.unhealthy_reason())
        assert await answer(client) == first


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_is_replaced_while_it_is_loaded_is_loaded_again(
    built: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    closed: list[bool] = []

    def opened(*_: object) -> Any:
        swap(folder, built[1])
        if fails:
            raise EngineError("weights were changed")
        sizes = None
        return type("Open", (), {"close": lambda self: closed.append(True), "sizes": sizes})()

    monkeypatch.setattr(Engine, "open", opened)
    with pytest.raises(worker.Replaced, match="while it was being loaded: start again"):
        worker.open_engine(folder, EngineOptions(), NoTrace())
    assert closed == [True] * (not fails)


def test_one_that_is_damaged_says_so_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object) -> Any:
        raise EngineError("weights were changed")

    monkeypatch.setattr(Engine, "open", opened)
    with pytest.raises(EngineError, match="weights were changed") as found:
        worker.open_engine(folder, EngineOptions(), NoTrace())
    assert not isinstance(found.value, worker.Replaced)


def test_a_server_with_texts_of_another_engine_does_not_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is read while the engine is loaded."""
    read: Any = engine_folder.find_manifest

    def before(path: Path) -> Manifest:
        found: Manifest = read(path)
        other = replace(found.fingerprint, all="what was there a moment before")
        return replace(found, fingerprint=other)

    monkeypatch.setattr(engine_folder, "find_manifest", before)
    does_not_start(folder)


def does_not_start(folder: Path) -> None:
    command = worker_command(folder, EngineOptions())
    with pytest.raises(EngineError, match="while it was being loaded: start again"):
        asyncio.run(server.serve(command, folder, ServerOptions(port=0)))


def test_a_server_does_not_start_with_texts_that_were_replaced_after_the_engine_was_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine process may be done before the tokenizer is read."""
    read = text_files.read_tokenizer

    def after(path: Path) -> object:
        manifest = path / "manifest.json"
        (path / "other").write_bytes(manifest.read_bytes())
        (path / "other").rename(manifest)
        return read(path)

    monkeypatch.setattr(text_files, "read_tokenizer", after)
    does_not_start(folder)
