"""What tests of the runtime share: a machine that stands still ends nobody's mask."""

from __future__ import annotations

import pytest

from spark_engine.runtime.engine import masks


@pytest.fixture(autouse=True)
def _patient_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is for grammars of others; where a test means one that hangs it says how long."""
    monkeypatch.setattr(masks, "BOUND", 60.0)
    monkeypatch.setattr(masks, "COMPILED", 120.0)
