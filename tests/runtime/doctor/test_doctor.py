"""`spark-run doctor`: without a GPU, on a simulated Spark, and on one with a limited clock."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.device import cuda_driver  # noqa: E402
from spark_engine.device import gpu as device  # noqa: E402
from spark_engine.interface import Limits  # noqa: E402
from spark_engine.runtime.cli.spark_run import main  # noqa: E402
from spark_engine.runtime.doctor import engines, gpu, machine, probe, report  # noqa: E402
from tests.fake_driver import FakeDriver  # noqa: E402
from tests.fake_spark import GIB, FakeSpark, meminfo  # noqa: E402
from tests.repository import ROOT  # noqa: E402
from tests.runtime import native_folder as toy  # noqa: E402


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder on a machine with neither GPU, driver nor nvidia-smi; its disk is empty."""
    driver = FakeDriver(fails=("cuInit",))
    for place in (cuda_driver, device):
        monkeypatch.setattr(place, "driver", driver)
    monkeypatch.setattr(gpu, "driver_present", lambda: False)
    monkeypatch.setattr(gpu, "SMI", "/nowhere/nvidia-smi")
    monkeypatch.setattr(machine, "disk", lambda folder: 500 * GIB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Use = Callable[..., FakeSpark]


@pytest.fixture
def spark(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    def use(available: int = 110 * GIB, swap_free: int = 16_000_000, **how: float) -> FakeSpark:
        driver = FakeSpark(**how)  # type: ignore[arg-type]
        for place in (cuda_driver, device):
            monkeypatch.setattr(place, "driver", driver)
        table = bare / "meminfo"
        table.write_text(meminfo(available, swap_free))
        monkeypatch.setattr(cuda_driver, "available_memory", lambda: available)
        monkeypatch.setattr(machine.host, "__defaults__", (table,))
        monkeypatch.setattr(machine, "available_memory", lambda path: available)
        monkeypatch.setattr(gpu, "driver_present", lambda: True)
        monkeypatch.setattr(probe.probe, "__defaults__", (0.0,))
        return driver

    return use


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *(str(a) for a in arguments)])


def _json(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = _run(*arguments, "--json")
    return done.exit_code, json.loads(done.stdout)


def _engine(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str = "sm_121a") -> Path:
    monkeypatch.setattr(toy, "TARGET", target)
    toy.write(folder)
    return folder


def test_without_a_gpu_and_an_engine_it_says_how_to_build_one(bare: Path) -> None:
    code, found = _json()
    assert code == 1 and found["gpu"] is None and not found["served"] and found["engines"] == []
    assert "--target cpu" in found["advice"][-1]
    words = _run()
    assert words.exit_code == 1 and "no engine can be served" in words.stdout


def test_the_engines_under_engines_are_looked_at(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "engines").mkdir()
    _engine(bare / "engines" / "one", monkeypatch)
    code, found = _json()
    (engine,) = found["engines"]
    assert code == 1 and engine["target"] == "sm_121a" and "this machine runs cpu" in engine["why"]


def test_an_engine_of_this_machine_can_be_served(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the manifest alone: a truncated file is found, its contents are not verified."""
    folder = _engine(bare / "one", monkeypatch, "cpu")
    code, found = _json(folder, bare / "none")
    assert code == 0 and found["served"], "one of the two"
    assert [bool(engine["why"]) for engine in found["engines"]] == [False, True]
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, found = _json(folder)
    assert code == 1 and "weights.safetensors has" in found["engines"][0]["why"]
    weights.unlink()
    assert "is missing" in _json(folder)[1]["engines"][0]["why"]


def test_a_spark_serves_its_engine(spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = spark()
    folder = _engine(bare / "one", monkeypatch)
    code, found = _json(folder)
    card = found["gpu"]
    assert code == 0 and card["target"] == "sm_121a" and card["card"] == "gb10"
    assert card["sm_mhz"] == 2281 and card["max_mhz"] == 3003
    assert card["bandwidth"] == pytest.approx(240e9) and card["wanted"] == 243e9
    assert card["memory"]["shared"]
    assert card["memory"]["free"] == 110 * GIB, "not the driver's figure"
    assert found["advice"] == [f"to serve {folder}: spark-run {folder} --serve"]
    assert found["engines"][0]["leaves"] == 100 * GIB - found["engines"][0]["needs"]
    assert +driver.held == -driver.held == {}, "everything was freed"
    words = _run(folder).stdout
    assert "2281 of 3003 MHz under load" in words and "240 GB/s; usual are 243" in words
    assert "119.6 GiB for an engine, shared with the host, which reserves 10.0 GiB" in words
    code, found = _json(folder, "--host-gib", "30")
    assert found["engines"][0]["leaves"] == 80 * GIB - found["engines"][0]["needs"]


def test_the_low_power_state_is_named_with_what_ends_it(spark: Use, bare: Path) -> None:
    spark(mhz=799, bandwidth=239e9)
    advice = _json()[1]["advice"]
    assert "799 of 3003 MHz" in advice[0] and "wall socket" in advice[0]
    spark(mhz=1600, bandwidth=100e9)
    advice = _json()[1]["advice"]
    assert "100 GB/s where 243 are usual" in advice[0] and "MHz" not in advice[0]


def test_another_slow_card_gets_no_advice_on_its_adapter(spark: Use) -> None:
    spark(mhz=500).attributes["INTEGRATED"] = 0
    advice = _json()[1]["advice"][0]
    assert "500 of 3003" in advice and "wall" not in advice and "nvidia-smi" in advice


def test_a_spark_without_memory_reports_the_hosts_share(
    spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark(available=(10 * GIB) + 1000, swap_free=1000)
    folder = _engine(bare / "one", monkeypatch)
    code, found = _json(folder)
    assert code == 1 and "next to the 10.00 that this machine itself keeps" in found["advice"][-1]
    assert any("are in swap" in words for words in found["advice"])
    assert found["gpu"]["sm_mhz"] is None and "too little memory" in found["advice"][0]


def test_nothing_is_run_where_nothing_should_be(spark: Use) -> None:
    driver = spark()
    card = _json("--no-load")[1]["gpu"]
    assert card["sm_mhz"] is None and card["bandwidth"] is None
    assert not any(call[0] == "cuLaunchKernelEx" for call in driver.asked)


# The GPU's state in JSON, whether it has no figures, whether it says why, and advice.
BROKEN = {
    "nothing": ("usable", False, False, ""),
    "kernels": ("no_kernels", False, False, "no kernels for NVIDIA GB10"),
    "mps": ("unusable", False, True, "MPS"),
    "old": ("unusable", False, True, "supports CUDA 12.8"),
    "context": ("unusable", True, True, "cannot be used"),
    "binding": ("unusable", True, True, "cuEventElapsedTime_v2"),
    "init": ("driver_silent", True, False, "does not answer"),
    "extra": ("no_extra", True, False, "not the extra `cuda`"),
    "driver": ("no_driver", True, False, ""),
}


def _break(broken: str, driver: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*args: object) -> None:  # as cuda.bindings, if the driver is older than a call
        raise RuntimeError('Function "cuEventElapsedTime_v2" not found')

    if broken == "kernels":
        driver.attributes["COMPUTE_CAPABILITY_MINOR"] = 9
    elif broken == "mps":
        driver.attributes["MPS_ENABLED"] = 1
    elif broken == "old":
        monkeypatch.setattr(device, "name_and_driver", lambda: ("NVIDIA GB10", "12080"))
    elif broken == "binding":
        monkeypatch.setattr(driver, "cuEventElapsedTime", lacks, raising=False)
    elif broken in ("context", "init"):
        driver.fails = ("cuInit" if broken == "init" else "cuDevicePrimaryCtxRetain",)
    elif broken in ("extra", "driver"):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        monkeypatch.setattr(gpu, "driver_present", lambda: broken == "extra")


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_wrong_with_a_gpu_is_said_and_serves_nothing(
    broken: str, spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict and the exit code equal those of a start, not those of the manifest alone."""
    state, null, why, advice = BROKEN[broken]
    driver, folder = spark(), _engine(bare / "one", monkeypatch)
    _break(broken, driver, monkeypatch)
    code, found = _json(folder)
    assert found["gpu_state"] == state and bool(found["gpu_why"]) == why
    assert (found["gpu"] is None) == (found["gpu_absent"] is not None) == null
    assert advice in " ".join(found["advice"]), found["advice"]
    if why:
        assert code == 1 and "it is for a GPU, and" in found["engines"][0]["why"]


def test_what_may_not_be_read_is_a_finding(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _engine(bare / "one", monkeypatch, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(engines.os, "access", lambda path, mode: Path(path).is_dir())
        assert "is not readable" in _json(folder)[1]["engines"][0]["why"]

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(engines, "read_manifest", denied)
    code, found = _json(folder)
    assert code == 1 and "Permission denied" in found["engines"][0]["why"]


def test_swap_is_not_emptied_into_too_little_memory(spark: Use) -> None:
    spark(available=5 * GIB, swap_free=8_000_000)  # 7.6 GiB are in swap
    (words,) = [w for w in _json("--no-load")[1]["advice"] if "are in swap" in w]
    assert "swapoff" not in words
    spark(available=50 * GIB, swap_free=8_000_000)
    (words,) = [w for w in _json("--no-load")[1]["advice"] if "are in swap" in w]
    assert "swapoff" in words


@pytest.mark.parametrize("limited", ["total", "free", "nothing"])
def test_memory_that_cuda_does_not_see_is_named(
    limited: str, spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a limit of 62 GB in a file of /etc/modprobe.d, which Spark users have reported."""
    driver = spark(free=90 * GIB)
    table = bare / "meminfo"
    table.write_text(table.read_text().replace("MemFree: 1000000", f"MemFree: {97 << 20}"))
    monkeypatch.setattr(machine, "MODPROBE", bare)
    (bare / "blacklist.conf").write_text("blacklist nouveau\n")
    if limited == "total":
        driver.total = 62 * 10**9
    elif limited == "free":
        driver.free = 80 * GIB
    words = [line for line in _json("--no-load")[1]["advice"] if line.startswith("CUDA")]
    assert len(words) == (limited != "nothing")
    if words:
        wanted = "57.7 GiB of the machine's 119.6" if limited == "total" else "80.0 GiB as free"
        assert wanted in words[0] and "no file" in words[0]
        (bare / "zz-nvidia-drm-override.conf").write_text("# cap\noptions nvidia NVreg_x=1\n")
        (words_again,) = [w for w in _json("--no-load")[1]["advice"] if w.startswith("CUDA")]
        assert "zz-nvidia-drm-override.conf" in words_again and "blacklist" not in words_again
    driver.attributes["INTEGRATED"] = 0
    assert not any(line.startswith("CUDA") for line in _json("--no-load")[1]["advice"])


def test_nvidia_smis_words_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in {
        "580.95.05, 3003, 41.20, [N/A]\n": {"driver_version": "580.95.05", "power.draw": "41.20"},
        "": {},
        "No devices were found\n": {},
    }.items():
        done = SimpleNamespace(stdout=text)
        monkeypatch.setattr(subprocess, "run", lambda *a, done=done, **k: done)
        assert wanted.items() <= gpu._smi().items()
    assert gpu._number("[N/A]") is None and gpu._number("41.20") == 41.2


def test_a_folder_named_doctor_is_reached_by_its_path(bare: Path) -> None:
    done = CliRunner().invoke(main, ["./doctor", "--prompt", "x"])
    assert done.exit_code == 2 and "there is no engine folder doctor" in done.stderr
    assert CliRunner().invoke(main, ["doctor", "--help"]).exit_code == 0


def test_a_disk_is_that_of_the_folder_above(tmp_path: Path) -> None:
    assert machine.disk(tmp_path / "not" / "yet") == machine.disk(tmp_path)
    assert engines.folders([], tmp_path) == []


def test_a_full_disk_is_reported_with_its_use(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is in Hugging Face's cache, which may be on another disk."""
    cache = bare / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    readme = (ROOT / "README.md").read_text()
    assert f"{(report.DISK_OF_CHECKPOINT + report.DISK_OF_ENGINE) // GIB} GiB of disk" in readme

    def said(free: float) -> list[str]:
        monkeypatch.setattr(machine, "disk", lambda folder: int(free * GIB))
        return [words for words in _json()[1]["advice"] if "are free for" in words]

    assert said(50) == [] and "disk" in _json()[1] and str(cache) not in _json()[1]["disk"]
    (words,) = said(49.9)
    assert words == (
        f"49.9 GiB are free for {bare / 'engines'}: a 27B checkpoint in NVFP4 and its engine need "
        "about 50 GiB"
    )
    monkeypatch.setattr(machine, "same_disk", lambda one, other: False)
    assert said(28) == [] and str(cache) in _json()[1]["disk"]
    (words,) = said(25)
    assert f"for {cache}: a 27B checkpoint in NVFP4 needs about 28 GiB" in words
    assert len(said(21)) == 2


def test_hugging_faces_cache_is_in_its_librarys_folder() -> None:
    for environ, place in (
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ):
        assert str(machine.hub_cache(environ)) == place
    assert machine.same_disk(Path("/proc/not/there"), Path("/proc"))
    assert not machine.same_disk(Path("/proc/self"), Path(__file__))


def test_what_a_build_writes_in_is_no_engine(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "engines").mkdir()
    for name in ("one", ".one.staging", ".one.old"):
        _engine(bare / "engines" / name, monkeypatch)
    assert engines.folders([], bare / "engines") == [bare / "engines" / "one"]


def test_without_a_gpu_its_row_says_why_and_what_to_do(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = (line for line in _run().stdout.splitlines() if line.startswith("GPU "))
    assert "none: NVIDIA's driver is not loaded" in row and "driver 580 or later" in row
    monkeypatch.setattr(gpu, "driver_present", lambda: True)
    words = _run().stdout
    assert "GPU         not usable: the driver does not answer" in words
    (first,) = (line for line in words.splitlines() if line.startswith("  1. "))
    assert "CUDA_ERROR_UNKNOWN (999)): `nvidia-smi`" in first and "--gpus all" in first
    assert "start the engine again" not in words, "no engine is started"
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    words = _run().stdout
    assert "GPU         not examined: the extra `cuda` is missing or incomplete" in words
    assert f"{sys.executable} -m" in words or "uv pip install" in words


def test_an_engine_that_is_not_served_refers_to_its_reason(
    spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size next to the verdict would read as the reason."""
    spark(available=2 * GIB)
    folder = _engine(bare / "one", monkeypatch)
    words = _run(folder).stdout
    assert f"engine      {folder}, for sm_121a, cannot be served (why: below); takes" in words
    assert " more than is free" in words and "-0" not in words.replace(str(bare), "")
    assert f". {folder} cannot be served: " in words
    spark()
    words = _run(folder).stdout
    assert re.search(r"can be served; takes \d+ MiB and leaves (99|100)\.\d GiB", words), words


def test_it_says_how_many_requests_run_at_once(
    spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark()
    limits = Limits(max_seqs=16, max_context=9000, pages=256, vocab=8)  # 16,384 tokens in pages
    assert engines.users(limits) == {2048: 8, 8192: 2, 9000: 1}
    few = replace(limits, max_seqs=4, max_context=2048, pages=20)
    assert engines.users(few) == {1280: 1}, "no request is longer than all pages"
    folder = _engine(bare / "one", monkeypatch)
    found = json.loads(_run("--json", folder).stdout)["engines"][0]["users"]
    assert found and f"requests at once: {next(iter(found.values()))} of " in _run(folder).stdout


def test_missing_extras_come_with_the_command(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "polygraphy" else "1")
    (row,) = (line for line in _run().stdout.splitlines() if line.startswith("extras "))
    assert "installed: cuda, hub," in row and "; not installed: check (" in row
    assert re.search(r" install '?polygraphy[^ ]*'?\)$", row)


@pytest.mark.parametrize(("target", "executor"), [("cpu", "ort"), ("rtx", "trt")])
def test_every_executor_leaves_a_sparks_host_its_part(
    spark: Use, bare: Path, monkeypatch: pytest.MonkeyPatch, target: str, executor: str
) -> None:
    folder, real = _engine(bare / "one", monkeypatch, target), engines.read_manifest
    monkeypatch.setattr(
        engines, "read_manifest", lambda path: replace(real(path), executor=executor)
    )
    monkeypatch.setattr(engines, "runnable_targets", lambda hosts: (target,))
    spark(available=12 * GIB)
    code, found = _json(folder)
    assert code == 0, found
    assert found["engines"][0]["leaves"] == 2 * GIB - found["engines"][0]["needs"]
    spark(available=2 * GIB)
    code, found = _json(folder)
    assert code == 1 and "next to the 10.00 that this machine" in found["engines"][0]["why"]


def test_a_folder_of_the_prefix_cache_is_examined(bare: Path) -> None:
    """One that is still to be made, one with files, and one that a server would refuse."""
    folder = bare / "kept"
    assert _json("--cache-dir", str(folder))[1]["prefix_cache"] == {str(folder): 0}
    folder.mkdir(mode=0o700)
    (folder / f"{'ab' * 24}.page").write_bytes(bytes(3 << 20))
    (folder / "notes").write_bytes(bytes(9))
    assert _json("--cache-dir", str(folder))[1]["prefix_cache"] == {str(folder): 3 << 20}
    folder.chmod(0o777)
    advice = _json("--cache-dir", str(folder))[1]["advice"]
    assert any("other users may write in it" in words for words in advice)
