"""What tests of the runtime share: a grammar's bound does not count a stopped machine's time."""

from __future__ import annotations

import pytest

from spark_engine.runtime.engine import masks


@pytest.fixture(autouse=True)
def _patient_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test means one that is slow, or hangs, it says how long."""
    monkeypatch.setattr(masks, "BOUND", 60.0)
    monkeypatch.setattr(masks, "COMPILED", 120.0)
    monkeypatch.setattr(masks, "SLOW", 60.0)
