"""The tests that docs/faults.md names exist."""

from __future__ import annotations

import ast
import re

from tests.repository import ROOT

NAMED = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


def test_every_test_that_the_page_names_is_there() -> None:
    found = NAMED.findall((ROOT / "docs" / "faults.md").read_text())
    assert len(found) > 60
    missing = []
    for path, name in found:
        file = ROOT / path
        names = (
            {n.name for n in ast.walk(ast.parse(file.read_text())) if hasattr(n, "name")}
            if file.is_file()
            else set()
        )
        if name not in names:
            missing.append(f"{path}::{name}")
    assert not missing
