"""Images of requests: they are decoded in the processes, and those of a history once."""

import base64
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from spark_engine.runtime.server.prompts import contract, decoded_files, limits, processes
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.decoded_files import DecodedFiles
from spark_engine.vision import VisionInfo
from tests.runtime.images.samples import saved
from tests.runtime.server.prompts import served_folder

pytestmark = pytest.mark.usefixtures("seeing")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return served_folder.write(tmp_path)


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


def test_images_are_decoded_in_the_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow within their limits of memory; what is fetched arrives as further blobs."""
    file = saved(Image.effect_noise((1600, 1200), 30).convert("RGB"), "JPEG")
    body = served_folder.body(
        [_image(file), {"type": "image_url", "image_url": "https://a.org/x"}]
    )[0]
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
            found, blobs = runner.run(
                pool.run(contract.JobKind.CHAT, served_folder.body([*content]))
            )
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
