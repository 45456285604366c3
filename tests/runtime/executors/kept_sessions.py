"""Sessions of onnxruntime that a process opens once.

Most of the time that a small engine takes to open is onnxruntime's: it inlines and folds the same
graphs each time.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import onnxruntime
import pytest

from spark_engine.runtime.executors import ort

_open = ort.open_session


class _Asked:
    """What a session is opened for; equal where graph, weights and threads are."""

    def __init__(self, payload: bytes, folder: Path, threads: int, label: str, fold: bool) -> None:
        self.given = payload, folder, threads, label, fold
        digest = hashlib.sha256(payload)
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(path.read_bytes())
        self._key = digest.digest(), threads, fold

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=16)
def _kept(asked: _Asked) -> onnxruntime.InferenceSession:
    return _open(*asked.given)


@pytest.fixture(autouse=True)
def kept_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of these tests share sessions, which keep nothing from run to run."""
    monkeypatch.setattr(ort, "open_session", lambda *given: _kept(_Asked(*given)))
