"""What of a file is read, what is refused with which words, and the digest."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from spark_engine.runtime.images import decode as module
from spark_engine.runtime.images.decode import DecodedImage, decode
from spark_engine.runtime.images.sizes import BadImage
from tests.repository import ROOT
from tests.runtime.images.damaged_files import FILES
from tests.runtime.images.samples import INFO, KINDS, ORIENTATION, QWEN, file_of, saved

SIZE = (128, 96)  # is not resized


def _drawn() -> Image.Image:
    values = np.random.default_rng(5).integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)
    return Image.fromarray(values)


def _exif(**tags: object) -> Image.Exif:
    exif = Image.Exif()
    for name, value in tags.items():
        exif[{"orientation": ORIENTATION, "maker": 0x010F, "model": 0x0110}[name]] = value
    return exif


def test_pixels_are_the_files_own_where_nothing_is_resized() -> None:
    found = decode(saved(_drawn(), "PNG"), INFO)
    assert found == DecodedImage(3, 4, found.pixels, found.digest) and len(found.digest) == 16
    patches = np.frombuffer(found.pixels, np.uint8).reshape(3, 4, 2, 2, 3, 16, 16)
    pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(96, 128, 3)
    np.testing.assert_array_equal(pixels, np.asarray(_drawn()))


def test_a_pixel_changes_the_digest_and_metadata_does_not() -> None:
    image = _drawn()
    digests = {
        decode(file, INFO).digest
        for file in (
            saved(image, "PNG"),
            saved(image, "PNG", compress_level=0, exif=_exif(maker="a")),
            saved(image, "PNG", exif=_exif(maker="b", model="c", orientation=1)),
            saved(image, "PNG", exif=_exif(orientation=77), icc_profile=b"none"),
            saved(image, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
            saved(image, "PNG", exif=b"Exif\0\0no table"),
            saved(image, "BMP"),
            saved(image, "WEBP", lossless=True, exif=_exif(model="d")),
            saved(image.convert("RGBA"), "PNG"),
        )
    }
    assert len(digests) == 1
    for orientation in range(2, 9):
        digests.add(decode(saved(image, "PNG", exif=_exif(orientation=orientation)), INFO).digest)
    assert len(digests) == 8
    other = image.copy()
    other.putpixel((77, 50), tuple(v ^ 1 for v in image.getpixel((77, 50))))
    digests.add(decode(saved(other, "PNG"), INFO).digest)
    assert len(digests) == 9
    blank = [decode(saved(Image.new("RGB", size), "PNG"), INFO) for size in ((128, 96), (96, 128))]
    assert blank[0].pixels == blank[1].pixels and blank[0].digest != blank[1].digest


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_only_the_first_picture_is_read(form: str) -> None:
    first, second = _drawn().quantize(64).convert("RGB"), Image.new("RGB", SIZE, "red")
    options = {"lossless": True} if form == "WEBP" else {}
    moving = saved(first, form, save_all=True, append_images=[second], **options)
    still = saved(first, form, **options)
    assert moving != still and decode(moving, INFO).digest == decode(still, INFO).digest


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_file_that_was_cut_is_refused(kind: int) -> None:
    data = file_of(kind, 1, (61, 47))
    for size in range(2, len(data) - 24, max(1, len(data) // 12)):
        with pytest.raises(BadImage) as caught:
            decode(data[:size], INFO)
        words = str(caught.value)
        assert "truncated" in words or "damaged" in words or "kind of file" in words


@pytest.mark.parametrize("kind", [3, 13, 21, 26])  # one of each format that is read as a stream
def test_a_file_without_its_end_is_called_truncated(kind: int) -> None:
    data = file_of(kind, 1, (61, 47))
    with pytest.raises(BadImage, match="the image is truncated: send the whole file"):
        decode(data[: len(data) * 2 // 3], INFO)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "an empty file is not read: send PNG, JPEG, WebP, GIF or BMP"),
        (saved(Image.new("RGB", (9, 9)), "TIFF"), "TIFF is not read: send PNG"),
        (saved(Image.new("RGB", (16, 16)), "ICO"), "ICO is not read"),
        (saved(Image.new("RGB", (9, 9)), "PDF"), "PDF is not read"),
        (saved(Image.new("RGB", (9, 9)), "EPS"), "PostScript is not read"),
        (saved(Image.new("RGB", (9, 9)), "PPM"), "this kind of file is not read"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF is not read"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "HEIC is not read"),
        (b"\0\0\0\x1cftypisom\0\0\0\0", "a video is not read"),
        (b"<svg xmlns='a'/>", "SVG is not read"),
        (b"<!doctype html><p>", "this kind of file is not read"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "the image is damaged, or of a kind"),
        (saved(Image.new("L", (2, 500)), "PNG"), "2 x 500 pixels: one side is more than 200"),
    ],
)
def test_what_is_no_image_that_is_read_is_named(data: bytes, words: str) -> None:
    with pytest.raises(BadImage, match=words) as caught:
        decode(data, INFO)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 150


def test_limits_of_bytes_pixels_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(_drawn(), "PNG")
    monkeypatch.setattr(module, "MOST_BYTES", len(data) - 1)
    with pytest.raises(BadImage, match=f"{len(data)} bytes; at most {len(data) - 1} are read"):
        decode(data, INFO)
    monkeypatch.undo()
    monkeypatch.setattr(module, "MOST_SENT", SIZE[0] * SIZE[1] - 1)
    monkeypatch.setattr(Image.Image, "load", _never)
    with pytest.raises(BadImage, match="128 x 96 pixels are more than 12287: send a smaller"):
        decode(data, INFO)  # before a pixel is decoded
    monkeypatch.undo()
    for holder, name in ((module, "resized"), (ImageFile.ImageFile, "load")):
        monkeypatch.setattr(holder, name, _no_memory)
        with pytest.raises(BadImage, match="more memory than a request has: send a smaller one"):
            decode(data, INFO)
        monkeypatch.undo()


def _never(_: Image.Image) -> None:
    raise AssertionError("pixels were decoded")


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_detail_and_the_servers_limit_reach_the_size() -> None:
    data = saved(Image.new("RGB", (1000, 800)), "PNG")
    sizes = [decode(data, QWEN), decode(data, QWEN, detail="low"), decode(data, QWEN, 100_000)]
    assert [(d.rows, d.columns) for d in sizes] == [(25, 31), (14, 17), (8, 11)]
    with pytest.raises(BadImage, match="detail is 'best'"):
        decode(data, QWEN, detail="best")


@pytest.fixture(scope="module")
def hostile() -> dict[str, Any]:
    """What became of hostile files in a process with a worker's limits."""
    command = [sys.executable, "-m", "tests.runtime.images.damaged_files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bombs_are_refused_before_they_take_memory_or_time(hostile: dict[str, Any]) -> None:
    rows = {name: (said, took) for name, said, took in hostile["bombs"]}
    read = {name for name, (said, _) in rows.items() if not said}
    # what is more than its header says is not decoded
    assert read == {"png that is larger than said", "jpeg with EXIF that repeats itself"}
    assert all(took < 3 for _, took in rows.values())  # 0.5 s without a load on the machine
    assert "60000 x 60000 pixels are more than" in rows["png of 60,000 squared"][0]
    assert "more than 50331648 pixels" in rows["webp of 16,384 squared"][0]
    assert "run-length" in rows["bmp of runs"][0]


def test_mutated_files_are_read_or_refused(hostile: dict[str, Any]) -> None:
    rows = hostile["fuzzed"]
    assert len(rows) == FILES and not [row for row in rows if "RAISED" in row[1]]
    assert 20 < sum(not said for _, said, _ in rows) < FILES // 2
    assert max(took for *_, took in rows) < 3 and hostile["bytes"] < 500 << 20
