"""Decodes hostile and damaged files in this process, with limits; prints what became of each.

`python -m tests.runtime.images.damaged_files`: a JSON object of lists.
"""

import json
import resource
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from spark_engine.runtime.images.decode import decode
from spark_engine.runtime.images.sizes import BadImage
from tests.runtime.images.samples import INFO, KINDS, file_of, saved

FILES, MEMORY = 500, 1 << 30  # of a worker that reads prompts: bytes more than it has at first
_VALUES = (b"\0", b"\xff", b"\x7f\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x80")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """A PNG of 8-bit grey that claims to have this size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + body


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small files that would take much memory or time."""
    large = zlib.compress(bytes(200 << 20), 9)
    yield "png of 60,000 squared", png(60_000, 60_000)
    yield "png of 2 billion columns", png(2**31 - 1, 1)
    yield "png of no column", png(0, 5)
    yield "png that is larger than said", png(16, 16, pixels=bytes(100 << 20))
    yield "png text", png(16, 16, chunk(b"zTXt", b"a\0\0" + large), pixels=bytes(17 * 16))
    yield "png texts", png(16, 16, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20)))] * 99)
    yield "png profile", png(16, 16, chunk(b"iCCP", b"a\0\0" + large), pixels=bytes(17 * 16))
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\x3f\0" * 2
    yield "webp of 16,384 squared", b"RIFF" + struct.pack("<I", 22) + b"WEBP" + canvas
    yield "gif of 65,535 squared", b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\0;"
    head = struct.pack("<IiiHHIIiiII", 40, 30_000, 1000, 1, 8, 1, 0, 0, 0, 0, 0)
    yield "bmp of runs", b"BM" + struct.pack("<IHHI", 0, 0, 0, 1078) + head + bytes(1024) + b"\1\1"
    size = struct.pack("<IiiHHIIiiII", 40, -1, 2**31 - 1, 1, 24, 0, 0, 0, 0, 0, 0)
    yield "bmp of 4 billion columns", b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + size
    yield "jpeg with EXIF that repeats itself", _exif_bomb()


def _exif_bomb() -> bytes:
    """65,000 entries of one table, each 19 million bytes long: all the same ones."""
    count, length = 65_000, 19 << 20
    table = np.zeros(
        count, np.dtype([("tag", "<u2"), ("kind", "<u2"), ("n", "<u4"), ("at", "<u4")])
    )
    table["tag"], table["kind"] = np.arange(count) + 300, 7
    table["n"], table["at"] = length - (1 << 20), 8
    data = b"II*\0\x08\0\0\0" + struct.pack("<H", count) + table.tobytes()
    data += bytes(length - len(data))
    parts = [data[at : at + 65_000] for at in range(0, len(data), 65_000)]
    marks = [b"\xff\xe1" + struct.pack(">H", len(p) + 8) + b"Exif\0\0" + p for p in parts]
    plain = saved(Image.new("RGB", (64, 64)), "JPEG")
    return plain[:2] + b"".join(marks) + plain[20:]  # without JFIF's header: it has the resolution


def mutated(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """`data` with up to six changes."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 7))):
        # half of the changes are in the header
        end = len(changed) if rng.integers(2) else min(len(changed), 80)
        at = int(rng.integers(0, max(1, end)))
        span = int(rng.integers(1, 1 + max(1, len(changed) // 4)))
        match int(rng.integers(7)):
            case 0:
                changed[at : at + 1] = rng.bytes(1)
            case 1:
                changed[at : at + 4] = rng.bytes(4)
            case 2:
                value = _VALUES[int(rng.integers(len(_VALUES)))]
                changed[at : at + len(value)] = value
            case 3:
                del changed[at : at + span]
            case 4:
                changed[at:at] = changed[at : at + span]
            case 5:
                changed[at:] = other[at:]
            case _:
                del changed[max(at, len(changed) - span) :]
    return bytes(changed)


def fuzzed() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(33)
    whole = [file_of(kind, kind, (61, 47)) for kind in range(len(KINDS))]
    for number in range(FILES):
        data, other = whole[number % len(whole)], whole[int(rng.integers(len(whole)))]
        yield f"{number}", mutated(rng, data, other)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


def _try(data: bytes) -> str:
    try:
        found = decode(data, INFO)
    except BadImage as error:
        return str(error)
    except BaseException as error:
        return f"RAISED {type(error).__name__}: {error}"
    whole = found.rows * found.columns * INFO.unit**2 * 3 == len(found.pixels)
    return "" if whole else "RAISED: wrong size"


def main() -> None:
    _limit()
    found: dict[str, list[tuple[str, str, float]]] = {}
    for group, files in (("bombs", bombs()), ("fuzzed", fuzzed())):
        rows = found.setdefault(group, [])
        for name, data in files:
            start = time.process_time()
            said = _try(data)
            rows.append((name, said, time.process_time() - start))
    # not ru_maxrss: that starts from the size of the process that started this one
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmHWM:")[1].split()[0]) << 10
    print(json.dumps({**found, "bytes": used}))


if __name__ == "__main__":
    main()
