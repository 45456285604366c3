"""Work on a request's text in processes with limits: what is ended, what is retried, the order of
owners, and that no short job waits for another owner's long one."""

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from spark_engine.errors import EngineError
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.prompts import contract, decoded_files, limits, processes
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.decoded_files import DecodedFiles
from spark_engine.runtime.server.prompts.pool import WorkerPool
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.vision import VisionInfo
from tests.patient import until, wait
from tests.runtime.images.samples import saved
from tests.runtime.server.prompts import served_folder
from tests.runtime.server.prompts.served_folder import LOOP, MEMORY

HANGS_S = 60.0
Run = Callable[[Coroutine[Any, Any, Any]], Any]
pytestmark = pytest.mark.usefixtures("run")  # of the tests that are coroutines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder.write(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Run, WorkerPool]]:
    with served_folder.running(folder) as (runner, pool):
        yield lambda work: runner.run(asyncio.wait_for(work, HANGS_S)), pool


@pytest.fixture(autouse=True)
def run(served: tuple[Run, WorkerPool]) -> Run:
    return served[0]


@pytest.fixture
def pool(served: tuple[Run, WorkerPool], monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    monkeypatch.setattr(limits, "LOOK_S", 0.1)
    for lane in served[1].lanes:
        base, more, most = lane.cpu_s
        monkeypatch.setattr(lane, "cpu_s", (min(base, 0.3), more, min(most, 0.3)))
    return served[1]


def _body(said: Any = "hi", size: int = 0) -> list[list[bytes]]:
    """A chat's body, of at least `size` bytes."""
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 2, "junk": "x" * size}
    return [[json.dumps(body).encode()]]


async def _ask(pool: WorkerPool, said: str = "hi", owner: str = "", size: int = 0) -> Any:
    return (await pool.run(contract.JobKind.CHAT, _body(said, size), owner))[0]


async def _cancelled(jobs: list[asyncio.Future[Any]]) -> None:
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lane(pool: WorkerPool, name: str) -> Any:
    return next(lane for lane in pool.lanes if lane.name == name)


@pytest.mark.parametrize("size", [0, limits.SMALL_BODY])
async def test_a_template_without_an_end_is_ended(pool: WorkerPool, size: int) -> None:
    with pytest.raises(
        contract.TooCostly, match="reading the request took more than 0.3 s of CPU time"
    ):
        await _ask(pool, LOOP, size=size)
    assert isinstance(await _ask(pool), contract.Prepared)


async def test_memory_has_a_bound(pool: WorkerPool) -> None:
    found = await _ask(pool, MEMORY)
    assert isinstance(found, contract.BodyRefused), found
    assert "reading the request took more than 1024 MiB of memory" in found.message
    assert isinstance(await _ask(pool), contract.Prepared)


async def test_short_prompts_do_not_wait_for_long_ones(pool: WorkerPool) -> None:
    long = [asyncio.ensure_future(_ask(pool, LOOP, f"bad {i}")) for i in range(4)]
    await until(lambda: bool(_lane(pool, "long prompts").walls))
    assert isinstance(await _ask(pool, owner="good"), contract.Prepared)
    assert not all(task.done() for task in long)
    await _cancelled(long)


async def test_prompts_do_not_wait_for_grammars(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("grammars", 0.02), ("slow grammars", 0.05)):
        monkeypatch.setattr(_lane(pool, name), "cpu_s", (seconds, 0.0, seconds))
    rows = {f"p{i}": {"type": "string", "maxLength": 500 + i} for i in range(2000)}
    many = {"type": "object", "properties": rows, "required": list(rows)}
    form = contract.FormAsked(StructuredFields(guided_json=many), [], None, False, True)
    forms = [
        asyncio.ensure_future(
            pool.run(contract.JobKind.FORM, [[contract.encode(form)]], f"bad {i}")
        )
        for i in range(6)
    ]
    await until(lambda: bool(_lane(pool, "slow grammars").walls))
    assert isinstance(await _ask(pool, owner="good"), contract.Prepared)
    assert not any(task.done() for task in forms[-2:])
    found = await asyncio.gather(*forms, return_exceptions=True)
    assert all(isinstance(one, contract.TooCostly) for one in found), found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_falls_loses_no_request(pool: WorkerPool, number: int) -> None:
    await until(lambda: len(pool.workers) == sum(lane.workers for lane in pool.lanes))
    for worker in list(pool.workers):
        _signal(worker.pid, number)
    found = await asyncio.gather(*(_ask(pool) for _ in range(4)), _ask(pool, size=1 << 17))
    assert all(isinstance(one, contract.Prepared) for one in found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_forking_process_that_falls_comes_again(
    pool: WorkerPool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_engine.runtime.server.prompts.processes.HELLO_S", 0.5)
    count = sum(lane.workers for lane in pool.lanes)  # one that comes later would answer
    await until(lambda: len(pool.workers) == count and pool._forker is not None)
    assert pool._forker is not None
    first = pool._forker.pid
    os.kill(first, number)
    for worker in list(pool.workers):
        _signal(worker.pid, signal.SIGKILL)
    assert isinstance(await _ask(pool), contract.Prepared)
    assert pool._forker is not None and pool._forker.pid != first
    assert pool.unhealthy_reason() is None


async def test_a_job_that_fells_its_workers_is_refused(pool: WorkerPool) -> None:
    asking = asyncio.ensure_future(_ask(pool, LOOP, size=limits.SMALL_BODY))
    lane = _lane(pool, "long prompts")
    while not asking.done():
        if lane.walls:
            for worker in list(pool.workers):
                _signal(worker.pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
    with pytest.raises(Busy, match="failed 3 times: its process ended"):
        await asking


async def test_a_client_that_leaves_cancels_its_job(pool: WorkerPool) -> None:
    lane = _lane(pool, "long prompts")
    jobs = [asyncio.ensure_future(_ask(pool, LOOP, size=limits.SMALL_BODY)) for _ in range(5)]
    await until(lambda: len(lane.walls) == limits.LONG_WORKERS)
    assert len(lane.queue) == 3
    await _cancelled(jobs)
    assert len(lane.queue) == 0, "what waited is not started"
    await until(lambda: not lane.walls)  # what ran is ended
    assert isinstance(await _ask(pool, size=limits.SMALL_BODY), contract.Prepared)


async def test_owners_take_turns(pool: WorkerPool) -> None:
    ended: list[str] = []

    async def one(owner: str, said: str) -> None:
        await asyncio.gather(_ask(pool, said, owner, limits.SMALL_BODY), return_exceptions=True)
        ended.append(owner)

    jobs = [asyncio.ensure_future(one("bad", LOOP)) for _ in range(8)]
    await until(lambda: bool(_lane(pool, "long prompts").walls))
    await one("good", "hi")
    assert ended.count("bad") <= 4
    await _cancelled(jobs)


async def test_the_owner_with_most_jobs_waiting_loses_one(pool: WorkerPool) -> None:
    size = limits.SMALL_BODY
    jobs = [asyncio.ensure_future(_ask(pool, LOOP, "bad", size)) for _ in range(8)]
    await until(lambda: len(_lane(pool, "long prompts").walls) == limits.LONG_WORKERS)
    assert not pool.refuse_one("bad")
    assert pool.refuse_one("good")
    await asyncio.sleep(0.01)
    assert [job.done() for job in jobs] == [False] * 7 + [True]
    with pytest.raises(Busy, match="6 requests of yours wait"):
        await jobs[-1]
    await _cancelled(jobs)


async def test_health_says_that_prompts_are_stuck(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STARTS_S", 0.2)
    command, pool._command = pool._command, ("/bin/false",)
    assert pool._forker is not None
    pool._forker.kill()
    await until(lambda: pool.unhealthy_reason() is not None)
    assert "no worker" in str(pool.unhealthy_reason())
    waiting = asyncio.ensure_future(_ask(pool))
    pool._command = command
    assert isinstance(await waiting, contract.Prepared)
    assert pool.unhealthy_reason() is None
    lane = _lane(pool, "prompts")
    await until(lambda: not lane.walls)  # the answer comes before its worker is free again
    assert lane.stuck_s() == 0.0
    lane.queue.put("", "a task that no worker takes")
    lane.since -= limits.STUCK_S + 1.0
    assert "none ended for" in str(pool.unhealthy_reason())
    lane.queue.remove("", "a task that no worker takes")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "the chat template does not compile"),
        ("{{ ('a' * 10 ** 11)|length }}", "tokenizer and chat template take more than 4096 MiB"),
    ],
)
def test_a_template_is_loaded_with_limits(tmp_path: Path, template: str, words: str) -> None:
    served_folder.write(tmp_path, template)
    with pytest.raises(EngineError, match=words), served_folder.running(tmp_path):
        pass


def test_no_process_outlives_its_parent(folder: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from tests.runtime.server.prompts import test_pool, served_folder
async def main():
    pool = await served_folder._started(Path({str(folder)!r}))
    job = asyncio.ensure_future(test_pool._ask(pool, served_folder.LOOP, size=1 << 17))
    await test_pool.until(lambda: bool(test_pool._lane(pool, "long prompts").walls))
    print(pool._forker.pid, *(worker.pid for worker in pool.workers), flush=True)
    await job
asyncio.run(main())
"""
    root = str(Path(__file__).parents[4])
    paths = [os.environ.get("PYTHONPATH", ""), root]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    assert len(pids) > 1
    wait(lambda: not any(_runs(pid) for pid in pids), "the end of all")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of an engine that reads images, also from a.org."""
    half = (0.5, 0.5, 0.5)
    vision = VisionInfo(16, 2, 1 << 10, 1 << 24, half, half, 400, 401, 402)
    limits_ = replace(served_folder.INFO.limits, max_context=4096, pages=4096, image_rows=4096)
    info = msgspec.structs.replace(served_folder.INFO, vision=vision, limits=limits_)
    setup = contract.Setup(info, ("fake",), ChatOptions(media_domains=("a.org",)), False, 8)
    monkeypatch.setattr(served_folder, "SETUP", setup)


def _image(file: bytes, detail: str = "auto") -> dict[str, Any]:
    url = f"data:;base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


@pytest.mark.usefixtures("seeing")
def test_images_are_decoded_in_the_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow within their limits of memory; what is fetched arrives as further blobs."""
    file = saved(Image.effect_noise((1600, 1200), 30).convert("RGB"), "JPEG")
    body = _body([_image(file), {"type": "image_url", "image_url": "https://a.org/x"}])[0]
    with served_folder.running(folder) as (runner, pool):
        for most in (1 << 16, 1 << 24):
            monkeypatch.setattr(limits, "SMALL_BODY", most)  # both lanes
            wanted, _ = runner.run(pool.run(contract.JobKind.CHAT, [body]))
            assert wanted == contract.Fetch(("https://a.org/x",))
            more = (contract.Fetched("https://a.org/x"),)
            work = pool.run(contract.JobKind.CHAT, [body, [file]], fetched=more)
            found, blobs = runner.run(work)
            assert isinstance(found, contract.Prepared), found
            first, second = found.prompts[0].images
            assert (first.rows, first.columns, first.digest) == (38, 50, second.digest)
            assert blobs[1] == blobs[2] and len(blobs[1]) == 38 * 50 * 32 * 32 * 3
            more = (contract.Fetched("https://a.org/x", "it is gone"),)
            found, blobs = runner.run(pool.run(contract.JobKind.CHAT, [body, [b""]], fetched=more))
            assert isinstance(found, contract.BodyRefused)
            assert found.param == "messages[0].content[1].image_url" and "gone" in found.message


@pytest.mark.usefixtures("seeing")
def test_an_image_of_a_history_is_decoded_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes of its file: a pixel, EXIF data or a detail make another one."""
    monkeypatch.setattr(limits, "SMALL_BODY", 100)
    noise = Image.effect_noise((64, 96), 30).convert("RGB")
    other, turned = noise.copy(), Image.Exif()
    other.putpixel((5, 5), (0, 0, 1))
    turned[0x0112] = 6

    def part(image: Image.Image, detail: str = "auto", **how: Any) -> dict[str, Any]:
        return _image(saved(image, "PNG", **how), detail)

    whole = part(noise)
    bad = {"type": "image_url", "image_url": whole["image_url"]["url"][:-40]}
    parts = [whole, part(other), part(noise, exif=turned), part(noise, "low"), whole]
    parts += [part(noise, compress_level=0), part(noise.resize((1000, 900)))]
    sent, worker_answers, ask = [], [], processes.WorkerProcess.ask

    async def noted(self: Any, header: bytes, blobs: Any) -> Any:
        answer, found = await ask(self, header, blobs)
        sent.append(contract.decode_job(header).seen)
        worker_answers.append([*found])
        return answer, found

    monkeypatch.setattr(processes.WorkerProcess, "ask", noted)
    with served_folder.running(folder) as (runner, pool):

        def read(*content: Any) -> tuple[Any, list[bytes]]:
            found, blobs = runner.run(pool.run(contract.JobKind.CHAT, _body([*content])))
            return found, blobs[1:]

        alone = {}
        for i, one in enumerate(parts):
            pool._decoded = DecodedFiles()
            found, alone[i] = read(one)
            assert sent[-1] == () and worker_answers[-1][1:] == alone[i]
        pool._decoded = DecodedFiles()
        order = random.Random(3)
        for _ in range(8):
            chosen = order.choices(range(len(parts)), k=4)
            found, pixels = read(*(parts[i] for i in chosen))
            assert pixels == [alone[i][0] for i in chosen]
            digests = [image.digest for image in found.prompts[0].images]
            assert len({*digests}) == len({*pixels})
        assert len(sent[-1]) == 6 and worker_answers[-1][1:] == [b""] * 4
        found, _ = read(whole, bad)
        assert (
            isinstance(found, contract.BodyRefused)
            and found.param == "messages[0].content[1].image_url"
        )
        held = pool._decoded
        assert held._size == sum(len(pixels) for _, pixels in held.now().values())
        monkeypatch.setattr(decoded_files, "MOST_DECODED", len(alone[0][0]) + 10)
        read(parts[6])
        assert held._size == 0 and not held.now(), "too large for all of it"
        found, pixels = read(*parts[:3])
        assert pixels == [alone[i][0] for i in range(3)] and len(held.now()) == 1
        monkeypatch.setattr(decoded_files, "MOST_SEEN", 0)
        assert read(whole)[1] == alone[0] and not held.now() and held._size == 0
