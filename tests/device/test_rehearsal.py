"""A rehearsal on another GPU: the target, the partition of multiprocessors, and the build."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from cuda.bindings import driver as real  # noqa: E402

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.fingerprint import timed_on  # noqa: E402
from spark_engine.builder.native import nvrtc, program  # noqa: E402
from spark_engine.builder.native.backend import NativeBackend  # noqa: E402
from spark_engine.builder.plan.options import Options, gpu_of  # noqa: E402
from spark_engine.device import cuda_driver, rehearsal  # noqa: E402
from spark_engine.device import gpu as device
from spark_engine.device.rehearsal import (  # noqa: E402
    SharedMemoryScale,  # noqa: E402
    requested_rehearsal,
)
from spark_engine.device.resources import DeviceResources  # noqa: E402
from spark_engine.engine_file import open_folder  # noqa: E402
from spark_engine.errors import ExecutorError, OptionError  # noqa: E402
from spark_engine.kernel import CARDS, GB10, H200, Shape  # noqa: E402
from spark_engine.kernel import rehearsal as rehearsed  # noqa: E402
from spark_engine.runtime.executors.program import Program  # noqa: E402
from tests.builder.empty_cubins import compile_jobs  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402
from tests.fake_driver import FakeDriver  # noqa: E402

SMALL = rehearsed(GB10, H200)
HEADS = {"linear_num_value_heads": 8}
SIZES: dict[str, Any] = {"decode": (1, 32), "prefill": (128,), "max_seqs": 32, "max_context": 256}


def test_it_has_the_others_limits_and_this_ones_name_and_memory() -> None:
    small, there = SMALL.architecture, GB10.architecture
    assert (small.name, small.capability, small.rehearses) == ("sm_90a", (9, 0), "sm_121a")
    for limit in ("shared_bytes", "large_shared", "wgmma", "clusters", "fp4_mma"):
        assert getattr(small, limit) == getattr(there, limit) != getattr(H200.architecture, limit)
    assert (SMALL.sms, SMALL.bandwidth, SMALL.bf16_flops) == (48, GB10.bandwidth, GB10.bf16_flops)
    assert (SMALL.card.memory, SMALL.card.name) == (H200.card.memory, "gb10 rehearsed on h200")
    near = rehearsed(GB10, CARDS["h100"]).card
    assert (near.memory, near.name) == (CARDS["h100"].card.memory, "gb10 rehearsed on h100")
    assert rehearsed(GB10, SMALL) == SMALL, "of a rehearsal that is there already"


@pytest.mark.parametrize(("of", "on"), [(H200, GB10), (GB10, GB10), (H200, CARDS["h100"])])
def test_only_a_larger_gpu_rehearses_a_smaller_one(of: Any, on: Any) -> None:
    with pytest.raises(OptionError, match=r"rehearse"):
        rehearsed(of, on)


@pytest.mark.parametrize(
    ("given", "says"), [("sm_121", r"'sm_121' is no GPU target.*sm_121a"), ("cpu", "no GPU target")]
)
def test_a_wrong_word_of_the_environment_is_named(given: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        requested_rehearsal({rehearsal.VARIABLE: given})


def test_what_the_environment_asks_for() -> None:
    assert requested_rehearsal({}) is None and requested_rehearsal({rehearsal.VARIABLE: ""}) is None
    assert requested_rehearsal({rehearsal.VARIABLE: "sm_121a"}) == GB10


# ---- the part of the multiprocessors -------------------------------------------------------------


class Divided(FakeDriver):
    """One that makes green contexts of `given` multiprocessors."""

    given = 48

    def __init__(self, **more: Any) -> None:
        super().__init__(COMPUTE_CAPABILITY_MAJOR=9, COMPUTE_CAPABILITY_MINOR=0,
                         MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=232_448,
                         MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=233_472, **more)  # fmt: skip
        self.current: object = None

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuCtxSetCurrent":
            self.current = args[0]
            return ()
        if name == "cuCtxGetCurrent":
            return (self.current,)
        if name == "cuDeviceGetDevResource":
            assert args[1] == real.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            return ("all",)
        if name == "cuDevSmResourceSplitByCount":
            assert args == (1, "all", 0, 48)
            return [SimpleNamespace(sm=SimpleNamespace(smCount=self.given))], 1, "rest"
        if name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
            return (2,)
        if name == "cuFuncGetAttribute":
            return (96,)
        return super()._answer(name, args)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Divided:
    made = Divided()
    for place in (cuda_driver, device):
        monkeypatch.setattr(place, "driver", made)
    monkeypatch.setenv(rehearsal.VARIABLE, "sm_121a")
    return made


def calls(driver: Divided) -> list[str]:
    return [call[0] for call in driver.asked]


def of(driver: Divided, name: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of that name."""
    return [call[1:] for call in driver.asked if call[0] == name]


def test_everything_is_queued_in_a_green_context(driver: Divided) -> None:
    gpu = device.Gpu()
    assert (gpu.kind, gpu.multiprocessors) == ("green context", 48)
    assert gpu.resident_blocks("kernel", Shape((9, 1, 1), (32, 1, 1), ())) == 96
    context = of(driver, "cuCtxSetCurrent")[-1]
    gpu.use()
    assert of(driver, "cuCtxSetCurrent")[-1] == context != of(driver, "cuCtxSetCurrent")[0]
    gpu.fill(64, 0, 8)
    assert of(driver, "cuMemsetD8Async")[0][-1] == gpu.stream
    assert "cuStreamCreate" not in calls(driver), "it would use every multiprocessor"
    gpu.close()
    last = [c for c in calls(driver) if c.endswith(("Destroy", "Release"))]
    assert last == ["cuStreamDestroy", "cuGreenCtxDestroy", "cuDevicePrimaryCtxRelease"]


def test_a_second_one_that_closes_leaves_the_first_current(driver: Divided) -> None:
    first = device.Gpu()
    mine = driver.current
    second = device.Gpu()
    assert driver.current != mine
    second.close()
    assert driver.current == mine
    first.close()
    assert driver.current is None


def test_without_the_word_it_is_the_whole_gpu(
    driver: Divided, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rehearsal.VARIABLE)
    gpu = device.Gpu()
    assert (gpu.kind, gpu.multiprocessors) == ("whole", 132) and device.present() == H200
    assert not any("Green" in c for c in calls(driver))
    gpu.close()


def test_the_gpu_that_is_present_is_the_rehearsed_one(
    driver: Divided, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.present() == SMALL and device.architecture() == "sm_90a"
    monkeypatch.setenv(rehearsal.VARIABLE, "sm_90a")
    with pytest.raises(OptionError, match="rehearsed on itself"):
        device.present()


@pytest.mark.parametrize("why", ["refused", "rounded"])
def test_where_no_green_context_is_made_nothing_is_held(driver: Divided, why: str) -> None:
    driver.fails = ("cuGreenCtxCreate",) if why == "refused" else ()
    driver.given = 56 if why == "rounded" else 48
    says = "splits off 56 multiprocessors, not 48" if why == "rounded" else "the CUDA driver says"
    with pytest.raises(ExecutorError, match=says):
        device.Gpu()
    assert not +driver.held


def test_a_gpu_with_fewer_multiprocessors_is_refused(driver: Divided) -> None:
    driver.attributes["MULTIPROCESSOR_COUNT"] = 36
    with pytest.raises(ExecutorError, match=r"partition of 48 .* has 36"):
        device.Gpu()
    assert not +driver.held


def test_graphs_and_events_come_back_from_a_part(driver: Divided) -> None:
    gpu = device.Gpu()
    resources = DeviceResources(gpu)
    resources.zeros(5), resources.event(), resources.graph(lambda: None)
    assert of(driver, "cuStreamBeginCapture")[0][0] == gpu.stream
    resources.close()
    gpu.close()
    driver.held.pop("cuStreamCreate")  # the part's own stream was made by another call
    assert not +driver.held and not -driver.held


# ---- the build -----------------------------------------------------------------------------------


def test_the_target_of_a_build() -> None:
    assert gpu_of(Options("sm_90a", rehearses="sm_121a")) == SMALL
    assert gpu_of(Options(rehearses="sm_121a")) == SMALL
    assert gpu_of(Options(rehearses="sm_121a"), SMALL) is SMALL
    assert gpu_of(Options(card="h100", rehearses="sm_121a")) == rehearsed(GB10, CARDS["h100"])
    for target, other, says in (
        ("cpu", "sm_121a", "not for --target cpu"),
        ("sm_90a", "sm_121", "no GPU target.*sm_121a"),
        ("sm_121a", "sm_90a", "needs more than sm_121a has"),
    ):
        with pytest.raises(OptionError, match=says):
            gpu_of(Options(target, rehearses=other))


def test_tactics_are_the_others_unless_timing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = object.__new__(NativeBackend)
    made._target = SMALL
    monkeypatch.setattr(device, "present", lambda: SMALL)
    assert made._times(None) is False and made._times(True) is True
    assert timed_on(Options("sm_90a", gpu=SMALL)) == ""
    monkeypatch.setattr(device, "present", lambda: H200)
    with pytest.raises(OptionError, match=r"gb10 rehearsed on h200\) is asked for"):
        made._times(True)


def test_its_launches_are_those_of_the_other_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[set[nvrtc.Job]] = []

    def compiled(wanted: Any, *_: Any) -> Mapping[Any, nvrtc.Cubin]:
        jobs.append(set(wanted))
        return compile_jobs(wanted)

    monkeypatch.setattr(program, "compile_jobs", compiled)
    write_checkpoint(tmp_path / "checkpoint", format="modelopt_mixed", config_kwargs=HEADS)
    launches, cards = [], []
    for target, other in (("sm_121a", ""), ("sm_90a", "sm_121a")):
        options = Options(target, rehearses=other, timing=False, kv_tokens=2048, **SIZES)
        build(tmp_path / "checkpoint", tmp_path / target, options, lambda text: None)
        folder = open_folder(tmp_path / target, target)
        cards.append(folder.manifest.card)
        programs = [Program.read(folder.engine(b).payload) for b in folder.manifest.buckets]
        launches.append([p.launches for p in programs])
    assert launches[0] == launches[1] and jobs[0] == jobs[1]
    assert cards == ["gb10", "gb10 rehearsed on h200"]
    assert json.loads((tmp_path / "sm_90a" / "manifest.json").read_text())["target"] == "sm_90a"


def test_blocks_crowd_a_multiprocessor_as_those_of_the_rehearsed_gpu_would() -> None:
    """As many fit Hopper's 228 KiB as fit a GB10's 100, whatever they ask for."""
    there, here = GB10.architecture, H200.architecture
    smem_scale = SharedMemoryScale(there.sm_shared_bytes, here.sm_shared_bytes, here.shared_bytes)
    for static in (0, 256, 1000, 9000):
        for dynamic in range(0, there.shared_bytes - static + 1, 512):
            more = smem_scale.dynamic(dynamic, static)
            assert dynamic <= more <= here.shared_bytes - static
            fit = [
                min(whole // (-(-(bytes_ + static + 1024) // 128) * 128), 24)  # blocks at most
                for whole, bytes_ in ((102_400, dynamic), (233_472, more))
            ]
            assert fit[0] == fit[1] or (dynamic + static) % 128, (dynamic, static)


def test_a_part_gives_launches_the_shared_memory_of_their_share(
    driver: Divided, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = device.Gpu()
    assert gpu.resident_blocks("kernel", Shape((9, 1, 1), (32, 1, 1), (), 67_584)) == 96
    (asked,) = of(driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    whole = (67_584 + 96 + 1024) * 233_472 // 102_400 // 128 * 128
    assert asked == ("kernel", 32, whole - 1024 - 96)
    assert of(driver, "cuFuncSetAttribute")[-1][2] == 232_448 - 96, "all that a block may have"
    gpu.close()
    monkeypatch.delenv(rehearsal.VARIABLE)
    gpu = device.Gpu()
    gpu.resident_blocks("kernel", Shape((9, 1, 1), (32, 1, 1), (), 67_584))
    assert of(driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor")[-1][2] == 67_584
    gpu.close()
