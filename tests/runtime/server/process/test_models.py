"""Several models at one address: scripted engines in real processes, of which one fits."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from spark_engine.errors import CapacityError, OptionError
from spark_engine.manifest import NATIVE
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.server.engine_client import on_demand
from spark_engine.runtime.server.engine_client.engine_folder import split_names
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.process import models as module
from spark_engine.runtime.server.process.models import ServedModel, open_models, plan_models
from spark_engine.runtime.server.process.open_service import worker_command
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.prompts.limits import SMALL_BODY
from spark_engine.runtime.server.service.models import Models
from tests.repository import PATH
from tests.runtime import fake_engine, small_tokenizer

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@asynccontextmanager
async def _served(folder: Path) -> AsyncIterator[tuple[Models, httpx.AsyncClient]]:
    """a and b, of which one fits; one that is killed while it starts, and one without files."""
    tokenizer = small_tokenizer.write(folder / "tokenizer")
    info = fake_engine.open_fake(tokenizer)[0]
    fake = (sys.executable, fake_engine.__file__, "worker", str(tokenizer))
    commands = {
        "a": fake,
        "b": fake,
        "killed": (sys.executable, "-c", KILLED),
        "corrupt": worker_command(folder / "none", EngineOptions()),
    }
    options = ServerOptions(max_queue=16, dumps=str(folder))
    rows = [
        ServedModel(folder, command, info, replace(options, names=(name,)), 6)
        for name, command in commands.items()
    ]
    async with open_models(rows, {"host": 10}) as models:
        app = create_app(Endpoints(models))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", timeout=90
        ) as client:
            yield models, client


async def test_models_at_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setattr(on_demand, "FIRST_PAUSE_S", 30.0)
    async with _served(tmp_path) as (models, client):
        await _names(client)
        await _switching(models, client)
        await _faults(models, client)
        await _shared(client)
        await _metrics(client)


def _body(model: str | None, text: str = "What is 40 plus 2?", **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body)


async def _states(client: httpx.AsyncClient) -> dict[str, str]:
    return {row["id"]: row["state"] for row in (await client.get("/v1/models")).json()["data"]}


async def _names(client: httpx.AsyncClient) -> None:
    states = dict.fromkeys(("a", "b", "killed", "corrupt"), "unloaded") | {"a": "loaded"}
    assert await _states(client) == states
    unknown = await _ask(client, _body("c"))
    assert unknown.status_code == 404
    words = "model 'c' is not served here; there is a, b, killed, corrupt"
    assert unknown.json()["error"]["message"] == words
    assert (await client.get("/v1/models/c")).json()["error"]["message"] == words
    assert (await client.get("/v1/models/b")).json()["state"] == "unloaded"
    assert (await _ask(client, _body(None))).json()["model"] == "a", "by default the first"
    malformed = await client.post("/v1/chat/completions", content=b'{"model": 5')
    assert malformed.status_code == 400
    counted = await client.post("/tokenize", json={"model": "b", "prompt": "a bear"})
    assert counted.json()["count"] > 0
    assert (await _states(client)) == states, "none of these needs another engine"
    health = await client.get("/health")
    assert health.json() == {"status": "ok", "models": {"loaded": 1, "unloaded": 3}}
    assert (await client.get("/ready")).status_code == 200


async def _switching(models: Models, client: httpx.AsyncClient) -> None:
    """Requests for both at once: each is answered, by its model. A large body finds its model."""
    large = "a bear " * (SMALL_BODY // 7 + 1)
    cut = _body("b", prompt=large, truncate_prompt_tokens=20) | {"messages": []}
    work = [_ask(client, _body(name)) for name in "abab"]
    work.append(client.post("/v1/completions", json=cut))
    work.append(client.post("/v1/messages", json=_body("b")))
    found = await asyncio.gather(*work)
    assert [(r.status_code, r.json()["model"]) for r in found] == [(200, m) for m in "ababbb"]
    assert sum(one.client.loads for one in models.services) >= 2


async def _faults(models: Models, client: httpx.AsyncClient) -> None:
    """Engines that do not start, while another model is asked; one that dies while it serves."""
    names = ("killed", "corrupt", "a", "killed")
    found = await asyncio.gather(*(_ask(client, _body(name)) for name in names))
    assert [r.status_code for r in found] == [503, 503, 200, 503]
    for name, answer in zip(names, found, strict=True):
        if name != "a":
            error = answer.json()["error"]
            assert error["code"] == "model_not_loaded" and f"model {name} " in error["message"]
            assert answer.headers["retry-after"] == "1"
    states = await _states(client)
    assert states["killed"] == states["corrupt"] == "failed"
    health = await client.get("/health")
    assert health.status_code == 200 and health.json()["models"]["failed"] == 2
    assert (await _ask(client, _body("a"))).status_code == 200
    loaded = next(one for one in models.services if one.client.running)
    assert loaded.client.pid is not None
    os.kill(loaded.client.pid, signal.SIGKILL)
    answers = await asyncio.gather(*(_ask(client, _body(loaded.names[0])) for _ in range(3)))
    assert [r.status_code for r in answers] == [200] * 3, "sent again to the next process"


async def _shared(client: httpx.AsyncClient) -> None:
    """A response is found whichever model made it, and another model continues it."""
    body = {"model": "b", "input": "Hi", "max_output_tokens": 4}
    made = (await client.post("/v1/responses", json=body)).json()
    assert made["model"] == "b"
    assert (await client.get(f"/v1/responses/{made['id']}")).json()["id"] == made["id"]
    more = body | {"model": "a", "previous_response_id": made["id"]}
    assert (await client.post("/v1/responses", json=more)).json()["model"] == "a"
    reports = [await client.get(f"/report?model={name}") for name in "ab"]
    assert [r.status_code for r in reports] == [200, 200]
    assert (await client.get("/report?model=c")).status_code == 404


async def _metrics(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families), "each family is there once"
    rows = {
        (s.name, s.labels.get("model_name")): s.value
        for f in families
        for s in f.samples
        if "finished_reason" not in s.labels
    }
    for name in "ab":
        assert rows["spark:generation_tokens_total", name] >= 8
        assert rows["vllm:e2e_request_latency_seconds_count", name] >= 3
        live = (await client.get(f"/page/live?model={name}")).json()
        assert live["generated"] == rows["spark:generation_tokens_total", name]
        assert live["first"][-1][1] == rows["vllm:time_to_first_token_seconds_count", name]
    assert rows["spark:generation_tokens_total", "killed"] == 0
    assert sum(rows["spark:engine_loaded", m] for m in ("a", "b", "killed", "corrupt")) == 1
    assert rows["spark:engine_loads_total", "a"] >= 2 <= rows["spark:engine_loads_total", "b"]
    memory = "spark_engine_process_resident_memory_bytes"
    assert [m for n, m in rows if n == memory] == ["a"], "only a process that runs"


def _manifest(total: int, executor: str = "ort", ranks: int = 1, vision: bool = False) -> Any:
    memory = SimpleNamespace(total=total, kv=30, states=10)
    return SimpleNamespace(
        memory=memory, executor=executor, ranks=ranks, vision=vision or None, name="built"
    )


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`plan_models` over manifests, with 100 free bytes of the host and 5 GiB of the GPU."""

    def planned(given: dict[str, Any], shared: bool = False, **options: Any) -> Any:
        folders = {name: Path(name or "engines/x") for name in given}
        by_folder = {folders[name]: manifest for name, manifest in given.items()}
        monkeypatch.setattr(module, "read_manifest", by_folder.__getitem__)
        monkeypatch.setattr(module, "read_info", lambda _: EngineInfo("built", None, ()))  # type: ignore[arg-type]
        monkeypatch.setattr(module, "prepare", lambda folder, options: ((str(folder),), options))
        free = SimpleNamespace(usable=5 << 30 if shared else 100, shared=shared)
        monkeypatch.setattr(module, "host_budget", lambda *_: free)
        monkeypatch.setattr(module, "_free_on_gpu", lambda: 5 << 30)
        return plan_models(folders, ServerOptions(**options))

    return planned


def test_the_plan_of_several_engines(plan: Callable[..., Any]) -> None:
    """On the host with swap copies, and for all ranks; on a GPU with a cache, and the context."""
    rows, budgets = plan({"a": _manifest(50), "two": _manifest(5, ranks=2)})
    assert [row.needs for row in rows] == [50 + 40, 2 * 45] and budgets == {"host": 100}
    assert [row.options.names for row in rows] == [("a",), ("two",)]
    rows, budgets = plan({"cpu": _manifest(9), "gpu": _manifest(1 << 30, NATIVE)})
    assert [(row.memory, row.needs) for row in rows] == [("host", 49), ("gpu", 3 << 30)]
    assert budgets == {"host": 100, "gpu": 5 << 30}
    assert rows[1].options.engine.cache_bytes == 1 << 30, "what was planned is what it gets"
    rows, budgets = plan({"cpu": _manifest(9), "gpu": _manifest(1 << 30, NATIVE)}, shared=True)
    assert {row.memory for row in rows} == {"host"} and budgets == {"host": 5 << 30}
    cache = EngineOptions(cache_bytes=2 << 30)
    rows, _ = plan({"gpu": _manifest(1 << 30, NATIVE)}, engine=cache, models_bytes=4 << 30)
    assert rows[0].needs == 4 << 30
    (only,), budgets = plan({"": _manifest(9)}, names=("x", "y"), models_bytes=60)
    assert only.options.names == ("x", "y") and budgets == {"host": 60}


def test_domains_are_for_the_models_that_read_images(plan: Callable[..., Any]) -> None:
    chat = ServerOptions().chat
    given = {"a": _manifest(1), "v": _manifest(1, vision=True)}
    rows, _ = plan(given, chat=replace(chat, media_domains=("example.org",)))
    assert [row.options.chat.media_domains for row in rows] == [(), ("example.org",)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models_bytes": 20}, "a plans 0.00 GiB, and engines may take"),
        ({"names": ("x",)}, "--served-model-name is for one engine: give each its name, a=a b=b"),
        ({"engine": EngineOptions(hosts="a,b")}, "--hosts is for one engine"),
        ({"engine": EngineOptions(profile="t")}, "--profile is for one engine"),
    ],
)
def test_what_several_models_cannot_have(
    plan: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((OptionError, CapacityError), match=words):
        plan({"a": _manifest(50), "b": _manifest(9)}, **options)


def test_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    monkeypatch.chdir(odd)
    assert split_names([]) == {}
    assert split_names(["engines/27b"]) == {"": Path("engines/27b")}
    assert split_names(["x=e/27b"]) == {"x": Path("e/27b")}
    assert split_names([str(odd)]) == {"": odd}, "a folder that is called so"
    want = {"27b": Path("e/27b/"), "a=b": Path("."), "x": Path("f/27b")}
    assert split_names(["e/27b/", ".", "x=f/27b"]) == want
    with pytest.raises(OptionError, match="two models are called 27b: name one of them, as in"):
        split_names(["e/27b", "f/27b"])
    for text in ("=e/27b", "x="):
        with pytest.raises(OptionError, match=f"{text}: a model is FOLDER or NAME=FOLDER"):
            split_names([text])
