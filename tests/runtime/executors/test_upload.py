"""Copying a file into device memory, which a process reads: every byte, every digest, refusals."""

import hashlib
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.device.resources import DeviceResources  # noqa: E402
from spark_engine.errors import EngineError, ExecutorError  # noqa: E402
from spark_engine.runtime.executors import read_process, upload  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402

CHUNK = 1000


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu({})


@pytest.fixture
def resources(gpu: FakeGpu) -> Iterator[Any]:
    """Of the GPU; in the end it holds nothing that the test has not freed."""
    made = DeviceResources(gpu)  # type: ignore[arg-type]
    yield made
    made.close()
    assert gpu.held == {**NOTHING, "contexts": 1}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE", 64)


def write(folder: Path, size: int) -> tuple[Path, bytes]:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    (folder / "file").write_bytes(data)
    return folder / "file", data


@pytest.mark.parametrize("size", [1, 64, CHUNK, CHUNK + 1, 12 * CHUNK + 37])
@pytest.mark.parametrize("lanes", [1, 5])
def test_every_byte_arrives_and_every_chunk_is_hashed(
    tmp_path: Path, size: int, lanes: int, gpu: FakeGpu, resources: Any
) -> None:
    path, data = write(tmp_path, size)
    found = dict[int, str]()
    address = upload.Upload(resources, path, CHUNK, found.__setitem__, lanes).wait()
    assert gpu.at(address, size).tobytes() == data
    chunks = [data[i : i + CHUNK] for i in range(0, size, CHUNK)]
    assert found == {i: hashlib.sha256(c).hexdigest() for i, c in enumerate(chunks)}
    assert gpu.held == {**NOTHING, "memory": 1, "contexts": 1}, "only the file is kept"


def test_a_refused_chunk_ends_the_upload_and_frees_the_memory(
    tmp_path: Path, resources: Any
) -> None:
    path, _ = write(tmp_path, 50 * CHUNK)
    seen = list[int]()

    def check(index: int, digest: str) -> None:
        seen.append(index)
        if index == 2:
            raise EngineError("chunk 2 was changed")

    with pytest.raises(EngineError, match="chunk 2"):
        upload.Upload(resources, path, CHUNK, check, 1).wait()
    assert seen == [0, 1, 2]


def test_a_file_that_shrinks_is_refused(tmp_path: Path, resources: Any) -> None:
    path, data = write(tmp_path, 3 * CHUNK)

    def check(index: int, digest: str) -> None:
        path.write_bytes(data[:1500])

    with pytest.raises(EngineError, match="was truncated while it was read"):
        upload.Upload(resources, path, CHUNK, check, 1).wait()


@pytest.mark.parametrize("pieces", [0, 3])
def test_a_process_that_ends_early_is_an_error_and_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int, resources: Any
) -> None:
    path, _ = write(tmp_path, 3 * CHUNK)
    script = tmp_path / "dies.py"
    record = upload.RECORD.pack(0, 64, 0, b"")
    script.write_text(
        f"import os, sys; os.write(int(sys.argv[8]), {record!r} * {pieces}); os._exit(3)"
    )
    monkeypatch.setattr(read_process, "__file__", str(script))
    with pytest.raises(EngineError, match=r"ended with code 3; start the engine again"):
        upload.Upload(resources, path, CHUNK, lambda index, digest: None).wait()


def test_the_process_ends_when_the_upload_is_given_up(tmp_path: Path, resources: Any) -> None:
    """Also while it waits for a free slot."""
    path, _ = write(tmp_path, 50 * CHUNK)
    go = threading.Event()
    made = upload.Upload(resources, path, CHUNK, lambda index, digest: go.wait(20) and None, 2)
    threading.Timer(0.2, go.set).start()
    made.close()
    made.close()
    assert made._reader.returncode is not None


def test_the_process_ends_where_its_memory_cannot_be_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, resources: Any
) -> None:
    """It runs by then: page-locking takes as long as its start."""
    path, _ = write(tmp_path, 50 * CHUNK)
    started, begin = list[subprocess.Popen[bytes]](), subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(begin(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(upload.subprocess, "Popen", popen)
    gpu._fails = 1
    with pytest.raises(ExecutorError, match="register"):
        upload.Upload(resources, path, CHUNK, lambda index, digest: None)
    assert [one.returncode for one in started] == [-9]


def test_a_gpu_that_registers_no_memory_copies_from_pageable_memory(
    tmp_path: Path, gpu: FakeGpu, resources: Any
) -> None:
    path, data = write(tmp_path, 2 * CHUNK)
    gpu.registers = False
    address = upload.Upload(resources, path, CHUNK, lambda index, digest: None).wait()
    assert gpu.at(address, len(data)).tobytes() == data and "register" not in gpu.calls
