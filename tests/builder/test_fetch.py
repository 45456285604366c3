"""A checkpoint by its name: sizes first, fetched once, also where a download broke, verified."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")

from spark_engine.builder.fetch import by_hand, is_name  # noqa: E402
from tests.builder.fake_hub import Hub, serving  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

NAME = "Qwen/Small-1B"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    write_checkpoint(folder, format="modelopt_mixed", moe=False, split_scales=True)
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def hub(files: Path) -> Iterator[Hub]:
    with serving(files, NAME) as made:
        yield made


def build(hub: str, home: Path, name: str = NAME) -> subprocess.CompletedProcess[str]:
    """spark-build of a name, in a process of its own: the endpoint is read at import."""
    command = [sys.executable, "-m", "spark_engine.builder.cli", name, "-o", str(home / "engine")]
    command += ["--decode", "1", "--prefill", "64", "--max-context", "128", "--target", "cpu"]
    given = {"HF_ENDPOINT": hub, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **given, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    return subprocess.run(
        command, env=environment, cwd=home, text=True, capture_output=True, timeout=120
    )


def test_a_name_is_fetched_once_and_built(hub: Hub, tmp_path: Path) -> None:
    done = build(hub.url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Qwen/Small-1B at 0123456789ab:" in done.stderr and "GiB of them to fetch" in done.stderr
    assert (tmp_path / "engine" / "manifest.json").is_file()
    assert "pytorch_model.bin" not in hub.sent and "dry-run" not in done.stderr
    before = len(hub.ranges)
    again = build(hub.url, tmp_path)
    assert again.returncode == 0 and len(hub.ranges) == before, "what is here is not fetched again"
    assert ", 0.00 GiB of them to fetch" in again.stderr


def test_a_download_that_breaks_off_is_gone_on_with(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 5000
    done = build(hub.url, tmp_path)
    assert done.returncode == 0, done.stderr
    asked = [name for name, _ in hub.ranges if name.endswith(".safetensors")]
    assert len(asked) > len(set(asked)), "the first answer was cut, so there is a second"


def test_other_bytes_than_the_hub_names_are_refused(hub: Hub, files: Path, tmp_path: Path) -> None:
    hub.lie = next(p.name for p in files.glob("*.safetensors"))
    done = build(hub.url, tmp_path)
    assert done.returncode == 2 and "has not the bytes that the hub names" in done.stderr
    assert not (tmp_path / "engine").exists()


def test_a_hub_that_cannot_be_reached_or_does_not_know_the_name(hub: Hub, tmp_path: Path) -> None:
    unknown = build(hub.url, tmp_path, "Qwen/Nobody")
    away = build("http://127.0.0.1:9", tmp_path)
    for done, name in ((unknown, "Nobody"), (away, "Small-1B")):
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"hf download Qwen/{name} --local-dir {name}" in done.stderr.splitlines()[-1]


def test_what_may_be_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_name(Path("Qwen/Qwen3.6-27B")) and is_name(Path("Qwen/Qwen3.6-27B@main"))
    assert not is_name(Path("models/Qwen3.6-27B")), "a folder here stands before a name"
    assert not is_name(Path("Qwen3.6-27B")) and not is_name(Path("/abs/model"))
    assert "--revision v1" in by_hand("a/b@v1")
