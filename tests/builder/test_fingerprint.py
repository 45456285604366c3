"""One changed byte of anything that a build reads changes its fingerprint."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_engine import plugins
from spark_engine.builder import fingerprint as module
from spark_engine.builder.fingerprint import fingerprint
from spark_engine.builder.plan.options import Options
from spark_engine.builder.text_files import TEXT_FILES
from tests.repository import ROOT, files

CPU = Options(target="cpu")
SOURCES = ("__init__.py", "op.py", "op.cu", "op.cuh", "moe/op.py", "moe/deep/op.cu", "common/x.cuh")
PACKAGES = ("spark_engine", "device", "builder", "models", "plugins")
CHECKPOINT = ("model.safetensors", "config.json", *TEXT_FILES)


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    module._sources.cache_clear()  # as in another process


def write(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with few files, laid out as in a wheel: all others inside `spark_engine`."""
    home = tmp_path / "spark_engine"
    for name in PACKAGES:
        folder = home if name == "spark_engine" else home / name
        write(folder, SOURCES)
        monkeypatch.setattr(module, name, SimpleNamespace(__file__=str(folder / "__init__.py")))
    return home


def test_every_source_counts_in_whatever_folder(packages: Path, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", ("config.json",))
    for name in PACKAGES:
        part = "plugins" if name == "plugins" else "toolchain"
        other = "toolchain" if name == "plugins" else "plugins"
        for source in SOURCES:
            before = fingerprint(checkpoint, CPU)
            change((packages if name == "spark_engine" else packages / name) / source)
            after = fingerprint(checkpoint, CPU)
            assert getattr(before, part) != getattr(after, part), (name, source)
            assert getattr(before, other) == getattr(after, other) and before.all != after.all


def test_what_makes_no_engine_does_not_count(packages: Path, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", ("config.json",))
    before = fingerprint(checkpoint, CPU)
    write(packages, ("runtime/loop.py", "check/cli.py", "bench/cli.py", "notes.md"))
    module._sources.cache_clear()
    assert fingerprint(checkpoint, CPU) == before


def test_every_file_of_the_checkpoint_that_an_engine_holds_counts(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", CHECKPOINT)
    for name in CHECKPOINT:
        before = fingerprint(checkpoint, CPU)
        change(checkpoint / name)
        after = fingerprint(checkpoint, CPU)
        assert before.checkpoint != after.checkpoint and before.all != after.all, name
        assert before.plugins == after.plugins and before.options == after.options


def test_every_file_of_a_drafter_counts(tmp_path: Path) -> None:
    checkpoint, drafter = (write(tmp_path / name, CHECKPOINT[:2]) for name in ("model", "drafter"))
    options = Options(target="cpu", drafter=str(drafter))
    for name in CHECKPOINT[:2]:
        before = fingerprint(checkpoint, options)
        change(drafter / name)
        assert before.checkpoint != fingerprint(checkpoint, options).checkpoint, name


def test_all_sources_of_a_package_are_found() -> None:
    found = module._sources(plugins.__file__)
    tracked = files("plugins/*.py", "plugins/*.cu", "plugins/*.cuh")
    assert set(found) >= {p.relative_to("plugins").as_posix() for p in tracked}
    assert len(tracked) > 100 and (ROOT / "plugins").is_dir()


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", CHECKPOINT)
    seen: list[tuple[int, int]] = []
    heard: Callable[[int, int], None] = lambda done, total: seen.append((done, total))  # noqa: E731
    fingerprint(checkpoint, CPU, heard)
    total = sum(len(name) for name in CHECKPOINT)
    assert seen[-1] == (total, total) and [d for d, _ in seen] == sorted(d for d, _ in seen)
