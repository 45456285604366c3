"""What all tests share: one folder of compiled kernels, and how long generated traces are tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # an example may stand still in mid-run
settings.load_profile("patient")
settings.register_profile("soak", max_examples=1000)  # `make soak`; 100 otherwise
settings.register_profile("fuzz", max_examples=600)  # `make fuzz`; 3 otherwise


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels by content, of earlier runs too: nothing is compiled twice."""
    kept = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    return tmp_path_factory.mktemp("cubins") if kept is None else Path(kept.mkdir("cubins"))
