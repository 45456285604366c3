"""From folder to executors: what is refused before anything is loaded."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.device.host_memory import available_memory, free_memory
from spark_engine.engine_file import read_manifest
from spark_engine.errors import CapacityError, EngineError
from spark_engine.hints import extra
from spark_engine.manifest import bytes_of
from spark_engine.progress import Progress
from spark_engine.runtime.engine import detect
from spark_engine.runtime.engine import load as module
from spark_engine.runtime.engine.detect import check_memory
from spark_engine.runtime.engine.load import load
from tests.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    checkpoint = write_checkpoint(folder / "checkpoint", {"num_hidden_layers": 4}).path
    options = Options(decode=(1, 2), prefill=(64,), max_seqs=2, max_context=128)
    build(checkpoint, folder / "engine", options, lambda text: None)
    return folder / "engine"


def test_every_bucket_is_opened(engine: Path) -> None:
    loaded = load(engine, threads=1)
    assert loaded.rows("decode") == (1, 2) and loaded.rows("prefill") == (1,)
    assert loaded.limits.max_seqs == 2 and loaded.eos == (1,)
    assert loaded.folder and loaded.folder.path == engine


def test_one_more_payload_is_opened_in_addition_to_the_buckets(engine: Path) -> None:
    loaded = load(engine, threads=1)
    assert loaded.folder and loaded.open_bucket
    file = loaded.folder.engine(loaded.folder.manifest.buckets[0])
    more = loaded.open_bucket(file.header, file.payload, loaded.folder.path, 1)
    assert more.specs == loaded.executors[file.header.family, file.header.rows].specs
    more.close()


def test_the_stages_of_loading_are_reported(engine: Path) -> None:
    stages: list[str] = []
    load(engine, threads=1, mark=stages.append)
    assert stages == ["files", "buckets"]


def test_too_little_memory_is_refused_with_the_numbers(engine: Path) -> None:
    manifest = read_manifest(engine)
    need = manifest.memory.total + (3 << 30)
    check_memory(manifest, 3 << 30, need)
    check_memory(manifest, 3 << 30, None)
    words = r"needs 3\.\d\d GiB .*KV pages.*3\.\d\d GiB are free"
    with pytest.raises(CapacityError, match=words):
        check_memory(manifest, 3 << 30, need - 1)
    none, kept = (
        replace(manifest, memory=replace(manifest.memory, snapshots=n)) for n in (0, 5 << 30)
    )
    with pytest.raises(CapacityError) as refusal:
        check_memory(none, 3 << 30, 1000)
    assert "snapshots" not in str(refusal.value)
    with pytest.raises(CapacityError, match=r"snapshots 5\.00, .* or snapshots \(--cache-gib\)"):
        check_memory(kept, 0, need)
    other = replace(manifest, card="h200")
    remedy = r"built for the card h200, .*for this card \(--card\), .*--kv-tokens, --max-context or"
    with pytest.raises(CapacityError, match=remedy):
        check_memory(other, 3 << 30, need - 1)


@pytest.mark.parametrize(("rank", "here", "opens"), [(0, True, 0), (1, True, 1), (0, False, 1)])
def test_rank_0_asks_for_the_memory_of_all_ranks_of_its_host(
    rank: int, here: bool, opens: int, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another asks for its own, when some have taken theirs."""
    manifest = replace(read_manifest(engine), ranks=2)
    free = manifest.memory.total * 3 // 2

    def opened(*args: object) -> None:
        raise EngineError("far enough")

    monkeypatch.setattr(module, "available_memory", lambda: free)
    monkeypatch.setattr(module, "open_folder", lambda *_: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(module, "_open", opened)
    comm, ignored = SimpleNamespace(rank=rank, here=here), Progress(None)
    words = "far enough" if opens else "for each of 2 ranks"
    with pytest.raises((EngineError, CapacityError), match=words):
        module._load(
            engine, manifest, module.LoadOptions(), lambda s: None, ignored, cast(Any, comm)
        )


def test_what_the_cache_may_hold_is_reported(engine: Path) -> None:
    """All pages and snapshots there are, or what was asked for."""
    manifest = read_manifest(engine)
    for asked in (None, 0, 5000):
        loaded = load(engine, threads=1, cache_bytes=asked)
        pages = bytes_of(manifest.states, "page") * manifest.limits.pages
        rows = bytes_of(manifest.states, "sequence") * manifest.limits.snapshots
        assert loaded.cache_bytes == (pages + rows if asked is None else asked)
        assert not loaded.invariant
    folder: Any = SimpleNamespace(manifest=replace(manifest, invariant=True))
    known = module._loaded(folder, loaded.executors, 0, None)
    assert known.invariant and known.costs == loaded.costs


def test_memory_is_checked_before_anything_is_opened(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    monkeypatch.setattr(module, "open_folder", None)
    with pytest.raises(CapacityError):
        load(engine)


def test_an_engine_for_another_machine_is_refused(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("sm_90a",))
    with pytest.raises(EngineError, match="built for 'cpu'.*sm_90a"):
        load(engine)


@pytest.mark.parametrize(
    ("driver", "words"), [(True, f"): {extra('cuda')}"), (False, "NVIDIA's driver")]
)
def test_without_the_extra_a_gpus_engine_names_the_extra(
    engine: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, words: str
) -> None:
    manifest = replace(read_manifest(engine), target="sm_121a", executor="native")
    monkeypatch.setattr(module, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("cpu",))
    monkeypatch.setattr(detect, "driver_present", lambda: driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EngineError) as refused:
        load(engine)
    said = str(refused.value)
    assert "sm_121a" in said and extra("cuda") in said and words in said
    assert "--target" not in said


def test_without_a_gpu_a_gpus_engine_names_the_doctor(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages are here: why the driver shows no GPU is what the doctor knows."""
    manifest = replace(read_manifest(engine), target="sm_121a", executor="native")
    monkeypatch.setattr(module, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("cpu",))
    monkeypatch.setattr(detect, "cuda_missing", lambda: "")
    with pytest.raises(EngineError, match="for the GPU sm_121a, and no GPU.*`spark-run doctor`"):
        load(engine)


def test_an_unknown_executor_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXECUTORS", {"native": None})
    with pytest.raises(EngineError, match="executor 'ort'; this version has native"):
        load(engine)


def test_a_bucket_under_another_ones_name_is_refused(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.open_folder

    def swapped(path: Path, target: str, *more: object) -> object:
        folder = real(path, target, *more)  # type: ignore[arg-type]
        first, second, *rest = folder.manifest.buckets
        buckets = (replace(first, file=second.file), second, *rest)
        return replace(folder, manifest=replace(folder.manifest, buckets=buckets))

    monkeypatch.setattr(module, "open_folder", swapped)
    with pytest.raises(EngineError, match="not what the manifest says"):
        load(engine)


def test_available_memory_is_the_smaller_of_machine_and_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000 kB\nMemFree: 500 kB\nMemAvailable:  3000 kB\n")
    assert free_memory(meminfo) == 500 * 1024
    group = tmp_path / "group"
    assert available_memory(meminfo, group) == 3000 * 1024
    group.mkdir()
    (group / "memory.current").write_text("1000000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 200000\nactive_file 100000\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(meminfo, group) == 3000 * 1024
    (group / "memory.max").write_text("2000000\n")
    assert available_memory(meminfo, group) == 1_300_000
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_a_units_limit_counts_as_a_containers_does(tmp_path: Path) -> None:
    """systemd's MemoryMax is in the unit's control group or a slice above it, not at the root."""
    meminfo, mine = tmp_path / "meminfo", tmp_path / "mine"
    meminfo.write_text("MemAvailable: 3000 kB\n")
    mine.write_text("0::/system.slice/spark.service\n")
    for name, limit in (("system.slice/spark.service", "max"), ("system.slice", "1000000")):
        folder = tmp_path / "group" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("400000\n")
        (folder / "memory.stat").write_text("inactive_file 100000\n")
    assert available_memory(meminfo, tmp_path / "group", mine) == 700_000
    mine.write_text("0::/../elsewhere\n")
    assert available_memory(meminfo, tmp_path / "group", mine) == 3000 * 1024
