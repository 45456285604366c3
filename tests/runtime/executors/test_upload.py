"""Copying a file into device memory by several threads: every byte, every digest, and refusals."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.device.resources import DeviceResources  # noqa: E402
from spark_engine.errors import EngineError  # noqa: E402
from spark_engine.runtime.executors import upload  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402

CHUNK = 1000


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
    tmp_path: Path, size: int, lanes: int
) -> None:
    path, data = write(tmp_path, size)
    gpu, found = FakeGpu({}), dict[int, str]()
    resources = DeviceResources(gpu)  # type: ignore[arg-type]
    address = upload.Upload(resources, path, CHUNK, found.__setitem__, lanes).wait()
    assert gpu.at(address, size).tobytes() == data
    chunks = [data[i : i + CHUNK] for i in range(0, size, CHUNK)]
    assert found == {i: hashlib.sha256(c).hexdigest() for i, c in enumerate(chunks)}
    assert gpu.held == {**NOTHING, "memory": 1, "contexts": 1}, "only the file is kept"


def test_a_refused_chunk_ends_the_upload_and_frees_the_memory(tmp_path: Path) -> None:
    path, _ = write(tmp_path, 50 * CHUNK)
    gpu, seen = FakeGpu({}), list[int]()
    resources = DeviceResources(gpu)  # type: ignore[arg-type]

    def check(index: int, digest: str) -> None:
        seen.append(index)
        if index == 2:
            raise EngineError("chunk 2 was changed")

    with pytest.raises(EngineError, match="chunk 2"):
        upload.Upload(resources, path, CHUNK, check, 1).wait()
    assert seen == [0, 1, 2]
    resources.close()
    assert gpu.held == {**NOTHING, "contexts": 1}


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    path, data = write(tmp_path, 3 * CHUNK)

    def check(index: int, digest: str) -> None:
        path.write_bytes(data[:1500])

    with pytest.raises(EngineError, match="was truncated while it was read"):
        upload.Upload(DeviceResources(FakeGpu({})), path, CHUNK, check, 1).wait()  # type: ignore[arg-type]
