"""The first GPU for the doctor: model, clock and bandwidth under load, problems.

Knows the driver through `device`, and nvidia-smi if it is installed. Reports a missing extra
`cuda`, driver or GPU. Imports no CUDA package before `diagnose`.
"""

import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeAlias

from spark_engine.errors import SparkError
from spark_engine.hints import cuda_missing, driver_present, extra
from spark_engine.kernel import KNOWN, Target
from spark_engine.runtime.executors.cache_size import GpuMemory

State: TypeAlias = Literal[
    "usable", "no_kernels", "unusable", "no_driver", "driver_silent", "no_extra"
]
SMI = "nvidia-smi"
FIELDS = ("driver_version", "clocks.max.sm", "power.draw", "temperature.gpu")
NO_DRIVER = (
    "none: NVIDIA's driver is not loaded. Engines run on the CPU; if there is a GPU, install "
    "driver 580 or later and start the machine again"
)
LEAST_DRIVER = 13000  # cuDriverGetVersion: the least for the extra's CUDA
LOW_CLOCK = 0.5  # share of the highest clock: a lower one under load is a fault
LOW_BANDWIDTH = 0.7  # share of a simple kernel's bandwidth on such a card


@dataclass(frozen=True)
class InstalledCard:
    """A GPU.

    Attributes:
        watts, celsius: directly after the load.
    """

    name: str  # the driver's name for it
    target: str | None  # the target of its engines, or None without kernels for it
    card: str | None  # its row of our table, or None
    cuda: int  # the driver's version of CUDA, 13000 for 13.0
    driver: str | None  # the driver's version; None if unknown
    memory: GpuMemory  # in bytes
    driver_free: int  # bytes that CUDA reports as free
    sm_mhz: float | None = None  # clock under load; None, like `bandwidth`, if not measured
    max_mhz: float | None = None  # the driver's highest clock; None if unknown
    bandwidth: float | None = None  # bytes a second, read and written
    wanted: float | None = None  # expected bytes a second of such a card
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """A card or the reason why there is none, and remedies for its problems. `absent`: text in
    place of a card; `why`: the reason why no engine for a GPU opens; `state`: all of it in one
    word, for programs."""

    card: InstalledCard | None
    advice: tuple[str, ...] = ()
    why: str = ""
    absent: str = NO_DRIVER
    state: State = "no_driver"


@dataclass(frozen=True)
class GpuProblem:
    """One problem: its remedy, and `why`, if it prevents engines for a GPU from opening."""

    advice: str
    why: str = ""


def diagnose(load: bool = True, device: str = "0", host_bytes: int | None = None) -> Diagnosis:
    """Examines CUDA's first GPU, which is `device` for nvidia-smi; `load` runs it for a second.
    `host_bytes` as for `GpuMemory`."""
    if lacks := cuda_missing():
        return _without_extra(lacks)
    from spark_engine.device.gpu import name_and_driver, present

    try:
        name, version = name_and_driver()
    except Exception as error:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return _without_answer(error)
    cuda, target = int(version), present()
    found = [*_old_driver(cuda), *_no_kernels(name, target)]
    try:
        card, mps = _examined(name, cuda, target, load, device, host_bytes)
    except (SparkError, RuntimeError) as error:  # RuntimeError: an old driver lacks a call
        absent = f"{name}, which cannot be used"
        found.append(GpuProblem(f"{absent}: {error}", "it cannot be used"))
        return _diagnosis(None, found, absent)
    found += [*_no_memory(load, card), *_shared(mps), *_low_clock(card), *_low_bandwidth(card)]
    return _diagnosis(card, found)


def release(version: int) -> str:
    """13000 as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _diagnosis(
    card: InstalledCard | None, found: list[GpuProblem], absent: str = NO_DRIVER
) -> Diagnosis:
    """The diagnosis; of several reasons why no engine opens it gives the first."""
    why = next((finding.why for finding in found if finding.why), "")
    fits = card is not None and card.target is not None
    state: State = "unusable" if why else "usable" if fits else "no_kernels"
    return Diagnosis(card, tuple(finding.advice for finding in found), why, absent, state)


def _without_extra(lacks: str) -> Diagnosis:
    if not driver_present():
        return Diagnosis(None)
    words = f"NVIDIA's driver is here but not the extra `cuda`, or only a part of it ({lacks}): "
    absent = "not examined: the extra `cuda` is missing or incomplete"
    return Diagnosis(None, (words + extra("cuda"),), absent=absent, state="no_extra")


def _without_answer(error: Exception) -> Diagnosis:
    if not driver_present():
        return Diagnosis(None)
    says = str(error).partition(";")[0]
    words = (
        f"NVIDIA's driver is loaded and does not answer ({says}): `nvidia-smi` should list the "
        "GPU; if it does not, start the machine again or install driver 580 or later. In a "
        "container: docker run --gpus all"
    )
    absent = "not usable: the driver does not answer"
    return Diagnosis(None, (words,), absent=absent, state="driver_silent")


def _examined(
    name: str, cuda: int, target: Target | None, load: bool, device: str, host_bytes: int | None
) -> tuple[InstalledCard, bool]:
    """(the open GPU, whether NVIDIA MPS shares it); with `load`, and enough free memory, it is
    measured. Raises SparkError or RuntimeError."""
    from spark_engine.device.gpu import Gpu
    from spark_engine.runtime.doctor.probe import NEEDS, probe

    idle = _smi(device)
    with closing(Gpu()) as gpu:
        memory = GpuMemory(gpu.free_bytes, gpu.total_bytes, gpu.integrated, host_bytes)
        driver_free, mps, most_mhz = gpu.driver_free_bytes, gpu.shared_by_mps, gpu.most_mhz
        measured = probe(gpu) if load and memory.usable >= NEEDS else None
    after = _smi(device) if load else {}
    card = InstalledCard(
        name=name,
        target=target.name if target else None,
        card=target.card.name if target else None,
        cuda=cuda,
        driver=idle.get("driver_version"),
        memory=memory,
        driver_free=driver_free,
        sm_mhz=measured.sm_mhz if measured else None,
        max_mhz=_number(idle.get("clocks.max.sm")) or most_mhz,
        bandwidth=measured.bandwidth if measured else None,
        wanted=target.card.bandwidth if target else None,
        watts=_number(after.get("power.draw")),
        celsius=_number(after.get("temperature.gpu")),
    )
    return card, mps


def _old_driver(cuda: int) -> Iterator[GpuProblem]:
    if cuda < LEAST_DRIVER:
        supports = f"the driver supports CUDA {release(cuda)}"
        yield GpuProblem(
            f"{supports}: install NVIDIA's driver 580 or later (sudo apt install "
            "nvidia-driver-580-open on Ubuntu), then start the machine again",
            f"{supports}, which loads no kernels of ours",
        )


def _no_kernels(name: str, target: Target | None) -> Iterator[GpuProblem]:
    if target is None:
        known = ", ".join(t.card.product for t in KNOWN)
        yield GpuProblem(
            f"there are no kernels for {name}, only for {known} and similar ones: build for the "
            "CPU (spark-build --target cpu)"
        )


def _no_memory(load: bool, card: InstalledCard) -> Iterator[GpuProblem]:
    if load and card.sm_mhz is None:
        yield GpuProblem(
            "too little memory is free to try the GPU's clock and bandwidth: stop other programs, "
            "then run the doctor again"
        )


def _shared(mps: bool) -> Iterator[GpuProblem]:
    if mps:
        yield GpuProblem(
            "NVIDIA MPS shares the GPU, under which no engine opens: stop it with `echo quit | "
            "nvidia-cuda-mps-control`",
            "NVIDIA MPS shares the GPU",
        )


def _low_clock(card: InstalledCard) -> Iterator[GpuProblem]:
    if card.sm_mhz is not None and card.max_mhz and card.sm_mhz < LOW_CLOCK * card.max_mhz:
        at = f"under load the GPU runs at {card.sm_mhz:.0f} of {card.max_mhz:.0f} MHz"
        if card.memory.shared:
            yield GpuProblem(
                f"{at}: this is the low-power state that a DGX Spark can enter, and a restart "
                "does not end it. Shut it down, take its power adapter out of the wall socket for "
                "a minute, use the adapter that came with it, start it, and run the doctor again"
            )
        else:
            yield GpuProblem(
                f"{at}: stop other programs on the GPU; `nvidia-smi -q -d PERFORMANCE` shows what "
                "limits it (heat, power, a fixed clock: nvidia-smi -rgc)"
            )


def _low_bandwidth(card: InstalledCard) -> Iterator[GpuProblem]:
    if card.bandwidth and card.wanted and card.bandwidth < LOW_BANDWIDTH * card.wanted:
        yield GpuProblem(
            f"its memory moves {card.bandwidth / 1e9:.0f} GB/s where {card.wanted / 1e9:.0f} are "
            "usual: stop other programs on the GPU, and check that its clocks are not limited"
        )


def _smi(device: str = "0") -> dict[str, str]:
    """nvidia-smi's report on a GPU, by field; empty without nvidia-smi."""
    query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-i", device]
    try:
        done = subprocess.run([SMI, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = [word.strip() for word in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    return dict(zip(FIELDS, words, strict=True)) if len(words) == len(FIELDS) else {}


def _number(word: str | None) -> float | None:
    try:
        return float(word or "")
    except ValueError:  # "[N/A]"
        return None
