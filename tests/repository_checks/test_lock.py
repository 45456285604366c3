"""requirements.lock has the packages that pyproject.toml requires; `make lock` writes it."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("bench", "check", "cuda", "hub", "oracle", "otel", "test", "vision")  # of `make lock`
ELSEWHERE = {"torch", "spark-engine"}  # torch has its own line in the Makefile
_ROW = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def locked() -> dict[str, str]:
    rows = _ROW.findall((ROOT / "requirements.lock").read_text())
    return {canonicalize_name(name): version for name, version in rows}


def asked() -> list[str]:
    extras = PROJECT["optional-dependencies"]
    return PROJECT["dependencies"] + [row for extra in EXTRAS for row in extras[extra]]


def test_the_lock_satisfies_the_project() -> None:
    versions = locked()
    for row in asked():
        wanted = Requirement(row)
        name = canonicalize_name(wanted.name)
        if name not in ELSEWHERE:
            version = versions.get(name)
            assert version is not None, f"{row} is not in requirements.lock: run make lock"
            words = f"requirements.lock has {name} {version}, pyproject.toml asks for {row}"
            assert wanted.specifier.contains(version, prereleases=True), f"{words}: run make lock"


def test_every_locked_package_has_a_hash() -> None:
    text = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text)
    bare = [block.split()[0] for block in blocks if _ROW.match(block) and "--hash=" not in block]
    assert not bare and len(blocks) > 100
