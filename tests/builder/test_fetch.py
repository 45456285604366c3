"""A checkpoint by its name: sizes first, fetched once, also where a download broke, verified."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")

from huggingface_hub import constants  # noqa: E402

from spark_engine.builder import fetch as module  # noqa: E402
from spark_engine.builder.fetch import by_hand, fetch, name_of  # noqa: E402
from spark_engine.errors import CapacityError, CheckpointError, OptionError  # noqa: E402
from spark_engine.models.open_model import read_description  # noqa: E402
from spark_engine.progress import Progress  # noqa: E402
from tests.builder.fake_hub import COMMIT, Hub, serving  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

NAME, AWAY = "Qwen/Small-1B", "http://127.0.0.1:9"


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


def build(hub: str, home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs `spark-build NAME` in a separate process."""
    command = [sys.executable, "-m", "spark_engine.builder.cli", NAME, "-o", str(home / "engine")]
    command += ["--decode", "1", "--prefill", "64", "--max-context", "128", "--target", "cpu"]
    given = {"HF_ENDPOINT": hub, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **given, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    return subprocess.run(
        [*command, *more], env=environment, cwd=home, text=True, capture_output=True, timeout=400
    )


class Fetching:
    """`fetch` in this process; `output` is what it said."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.output = monkeypatch, ""
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setenv("NO_PROXY", "*")

    def __call__(self, hub: str, name: str = NAME, engine: Path | None = None) -> Path:
        self._patch.setattr(constants, "ENDPOINT", hub)
        template = hub + "/{repo_id}/resolve/{revision}/{filename}"
        self._patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        stream = io.StringIO()
        try:
            return fetch(name, Progress(stream), read_description, engine)
        finally:
            self.output = stream.getvalue()


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    return Fetching(tmp_path, monkeypatch)


def test_a_name_is_fetched_and_built(hub: Hub, tmp_path: Path) -> None:
    wrong = build(hub.url, tmp_path, "--target", "sm90")
    assert wrong.returncode == 2 and "did you mean sm_90a" in wrong.stderr and hub.ranges == []
    done = build(hub.url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Qwen/Small-1B at 0123456789ab:" in done.stderr and "GiB of them to fetch" in done.stderr
    assert (tmp_path / "engine" / "manifest.json").is_file() and "dry-run" not in done.stderr
    last = done.stdout.splitlines()[-1]  # this checkpoint has no tokenizer
    assert f"`spark-run {tmp_path}/engine --prompt-ids 1,2,3`" in last, last


def test_what_is_here_is_not_fetched_again(hub: Hub, fetching: Fetching) -> None:
    folder = fetching(hub.url)
    assert next(folder.glob("*.safetensors")).is_file()
    before = len(hub.ranges)
    assert fetching(hub.url) == folder and len(hub.ranges) == before
    assert ", 0.00 GiB of them to fetch" in fetching.output


def test_a_download_that_breaks_off_is_gone_on_with(hub: Hub, fetching: Fetching) -> None:
    hub.cut = 5000
    fetching(hub.url)
    asked = [name for name, _ in hub.ranges if name.endswith(".safetensors")]
    assert len(asked) > len(set(asked)), "the first answer was cut, so there is a second"


def test_other_bytes_than_the_hub_names_are_refused(
    hub: Hub, files: Path, fetching: Fetching
) -> None:
    hub.altered = next(p.name for p in files.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match="differs from the hub.s file"):
        fetching(hub.url)


def test_what_the_hub_refuses_is_said_with_what_to_do(hub: Hub, fetching: Fetching) -> None:
    for url, name, words in (
        (AWAY, NAME, r"\(ConnectError.*run `hf download Qwen/Small-1B --local-dir Small-1B`"),
        (hub.url, "Qwen/Missing", "knows no Qwen/Missing: look at the spelling, or, .* HF_TOKEN"),
        (hub.url, f"{NAME}@v9", "Qwen/Small-1B has no revision v9"),
    ):
        with pytest.raises(CheckpointError, match=words):
            fetching(url, name)
    hub.gated = True
    with pytest.raises(CheckpointError, match="is gated: accept its terms on .*Small-1B, then"):
        fetching(hub.url)
    assert hub.ranges == []


def test_what_was_fetched_is_there_without_the_hub(hub: Hub, fetching: Fetching) -> None:
    folder = fetching(hub.url)
    assert fetching(AWAY) == folder and "as it was fetched before" in fetching.output
    assert fetching(AWAY, f"{NAME}@{COMMIT[:8]}") == folder
    for other in (f"{NAME}@v9", "Qwen/Other"):
        with pytest.raises(CheckpointError, match="could not be fetched"):
            fetching(AWAY, other)
    weights = next(folder.glob("*.safetensors")).resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="differs from the hub.s file"):
        fetching(AWAY)


@pytest.fixture
def shards(hub: Hub, files: Path, tmp_path: Path) -> Hub:
    """A hub that serves a model in three files of weights, without an index."""
    hub.folder = tmp_path / "sharded"
    shutil.copytree(files, hub.folder)
    (one,) = hub.folder.glob("*.safetensors")
    for i in (1, 2, 3):
        (hub.folder / f"model-{i:05}-of-00003.safetensors").write_bytes(b"shard %d" % i)
    one.unlink()
    return hub


def _cut(folder: Path, name: str) -> None:
    """As where a download of this file was cut off."""
    (folder / name).resolve().unlink()
    (folder / name).unlink()


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_checkpoint_of_which_a_part_is_missing_is_refused(
    indexed: bool, online: bool, shards: Hub, fetching: Fetching
) -> None:
    last = "model-00003-of-00003.safetensors"
    if indexed:
        for i, path in enumerate(sorted(shards.folder.glob("*.safetensors"))):
            path.rename(shards.folder / f"{'abc'[i]}.safetensors")
        last = "c.safetensors"
        index = {"weight_map": {str(i): f"{'abc'[i]}.safetensors" for i in range(3)}}
        index["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"  # which the hub does not have
        (shards.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = fetching(shards.url)
    assert fetching(AWAY) == folder
    if online:
        (shards.folder / last).unlink()
    else:
        _cut(folder, last)
    before = len(shards.ranges)
    with pytest.raises(CheckpointError, match=f"{last}: the shard is missing from"):
        fetching(shards.url if online else AWAY)
    assert len(shards.ranges) == before, "refused before anything else is fetched"


def test_files_that_are_no_weights_are_verified_too(hub: Hub, fetching: Fetching) -> None:
    folder = fetching(hub.url)
    for name in [p.name for p in folder.iterdir() if p.suffix != ".safetensors"]:
        path = (folder / name).resolve()
        data = path.read_bytes()
        for other in (b"", b"{}", data[:-9], data.replace(b"1", b"2")):
            path.write_bytes(other)
            for url in (AWAY, hub.url) if len(other) == len(data) else (AWAY,):
                with pytest.raises(CheckpointError):
                    fetching(url)
        path.write_bytes(data)
    assert fetching(AWAY) == folder
    (folder / "config.json").unlink()  # what the hub does not name, as in a folder without blobs
    (folder / "config.json").write_bytes(b"")
    with pytest.raises(CheckpointError):
        fetching(AWAY)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_that_leads_elsewhere_is_refused(
    name: str, hub: Hub, tmp_path: Path, fetching: Fetching
) -> None:
    folder = fetching(hub.url)
    place = folder / name if name == "config.json" else next(folder.glob("*.safetensors"))
    elsewhere = tmp_path / place.resolve().name  # its name and bytes are right
    shutil.move(place.resolve(), elsewhere)
    place.unlink()
    place.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="links to a file outside"):
        fetching(AWAY)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("a bug"), None),
        (OSError(28, "No space left on device"), None),
        (ConnectionResetError("cut"), "broke off .*run this again"),
        (TimeoutError("slow"), "broke off"),
    ],
)
def test_only_a_hub_that_is_not_reached_is_done_without(
    error: Exception,
    words: str | None,
    hub: Hub,
    fetching: Fetching,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetching(hub.url)

    def breaks(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", breaks)
    with pytest.raises(CheckpointError if words else type(error), match=words):
        fetching(hub.url)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", breaks)
    if words is None:
        with pytest.raises(type(error)):
            fetching(hub.url)
    else:
        fetching(hub.url)
        assert "as it was fetched before" in fetching.output


def test_what_cannot_be_built_is_reported_before_the_weights_come(
    hub: Hub, files: Path, tmp_path: Path, fetching: Fetching
) -> None:
    hub.folder = tmp_path / "other"
    shutil.copytree(files, hub.folder)
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="llama"):
        fetching(hub.url)
    (hub.folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no config.json"):
        fetching(hub.url)
    assert not [name for name, _ in hub.ranges if name.endswith(".safetensors")]
    for path in hub.folder.glob("*.safetensors"):
        path.unlink()
    (hub.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no weights as \*.safetensors"):
        fetching(hub.url)


def test_only_what_a_build_reads_is_fetched(
    hub: Hub, files: Path, tmp_path: Path, fetching: Fetching
) -> None:
    hub.folder = tmp_path / "other"
    shutil.copytree(files, hub.folder)
    (hub.folder / "original").mkdir()
    (hub.folder / "original" / "all.safetensors").write_bytes(b"the same again")
    fetching(hub.url)
    assert "config.json" in hub.sent
    assert "all.safetensors" not in hub.sent and "pytorch_model.bin" not in hub.sent


def test_a_disk_that_is_too_small_is_reported_before_the_weights_come(
    hub: Hub, files: Path, tmp_path: Path, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too small for the weights: refused. Too small for weights and engine: a warning."""
    weights = sum(p.stat().st_size for p in files.glob("*.safetensors"))
    free = weights // 2
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda place: usage)
    with pytest.raises(CapacityError, match="free some space, or name another folder in HF_HOME"):
        fetching(hub.url)
    assert not [name for name, _ in hub.ranges if name.endswith(".safetensors")]
    usage.free = 3 * weights // 2  # of these files alone: the weights are nearly all of them
    fetching(hub.url, engine=tmp_path / "engines" / "one")
    assert "may not fit into the" in fetching.output and "to be fetched and an" in fetching.output
    assert fetching.output.index("may not fit") < fetching.output.index("verifying")
    fetching(hub.url, engine=tmp_path / "engines" / "one")
    assert "warning" not in fetching.output, "nothing is left to fetch"


def test_what_may_be_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for text, name in (
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B"),
        ("Qwen/Qwen3.6-27B@main", "Qwen/Qwen3.6-27B@main"),
        ("https://huggingface.co/Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B"),
        ("https://huggingface.co/Qwen/Qwen3.6-27B/tree/v1/", "Qwen/Qwen3.6-27B@v1"),
        ("hf.co/Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-27B"),
        ("https://huggingface.co/Qwen", None),
        ("https://example.org/Qwen/Qwen3.6-27B", None),
        ("models/Qwen3.6-27B", None),  # a folder here takes precedence over a name
        ("Qwen3.6-27B", None),
        ("/abs/model", None),
    ):
        assert name_of(Path(text)) == name, text
    (tmp_path / "Qwen" / "Qwen3.6-27B").mkdir(parents=True)
    assert name_of(Path("Qwen/Qwen3.6-27B")) is None
    assert "--revision v1" in by_hand("a/b@v1")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(OptionError, match="install .*huggingface_hub.*hf download Qwen/Small-1B"):
        fetch(NAME, Progress(None), Path)
