"""The first GPU for the doctor: what it is, its clock and bandwidth under load, what is wrong.

Knows the driver through `device` and nvidia-smi where there is one; without the extra `cuda`, a
driver or a GPU it says which is missing. Imports nothing of CUDA before it is asked.
"""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec

from spark_engine.errors import SparkError
from spark_engine.hints import driver_present, extra
from spark_engine.kernel import KNOWN
from spark_engine.runtime.executors.cache_size import GpuMemory

SMI = "nvidia-smi"
FIELDS = ("driver_version", "clocks.max.sm", "power.draw", "temperature.gpu")
NO_DRIVER = (
    "none: NVIDIA's driver is not loaded. Engines run on the CPU; where there is a GPU, install "
    "driver 580 or later and start the machine again"
)
LEAST_DRIVER = 13000  # cuDriverGetVersion: what the extra's CUDA asks for
LOW_CLOCK = 0.5  # of the highest: below it under load a GPU is held down
LOW_BANDWIDTH = 0.7  # of what a plain kernel reaches on such a card


@dataclass(frozen=True)
class Card:
    """What was found.

    Attributes:
        name: the driver's name for it.
        target: what engines are built for here, or None where there are no kernels for it.
        card: its row of our table, or None.
        cuda: version of CUDA that the driver speaks, 13000 for 13.0.
        driver: the driver's version; None where nothing tells.
        room: memory in bytes.
        sm_mhz: under load; None, as `bandwidth`, where it was not tried.
        max_mhz: the highest that the driver tells; None where it tells none.
        bandwidth: bytes a second, read and written.
        wanted: bytes a second that such a card should reach.
        watts, celsius: right after the load.
    """

    name: str
    target: str | None
    card: str | None
    cuda: int
    driver: str | None
    room: GpuMemory
    sm_mhz: float | None = None
    max_mhz: float | None = None
    bandwidth: float | None = None
    wanted: float | None = None
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """A card or why there is none, and what to do about what is wrong. `absent`: what is said in
    the place of a card; `why`: no engine of a GPU opens here."""

    card: Card | None
    advice: tuple[str, ...] = ()
    why: str = ""
    absent: str = NO_DRIVER


def diagnose(load: bool = True, device: str = "0") -> Diagnosis:
    """Looks at the GPU that CUDA shows first, `device` for nvidia-smi; with `load` it works for a
    second."""
    if find_spec("cuda") is None:
        if driver_present():
            words = f"NVIDIA's driver is here but not the extra `cuda`: {extra('cuda')}"
            return Diagnosis(None, (words,), absent="not looked at: the extra `cuda` is missing")
        return Diagnosis(None)
    from spark_engine.device import Gpu, name_and_driver, present
    from spark_engine.runtime.doctor.probe import NEEDS, probe

    try:
        name, cuda = name_and_driver()
    except Exception as error:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        if not driver_present():
            return Diagnosis(None)
        says = str(error).partition(";")[0]
        words = (
            f"NVIDIA's driver is loaded and does not answer ({says}): `nvidia-smi` should list the "
            "GPU; where it does not, start the machine again or install driver 580 or later. In a "
            "container: docker run --gpus all"
        )
        return Diagnosis(None, (words,), absent="not to be used: the driver does not answer")
    advice, why = [], ""
    if int(cuda) < LEAST_DRIVER:
        why = f"the driver supports CUDA {release(int(cuda))}, which loads no kernels of ours"
        advice.append(
            f"the driver supports CUDA {release(int(cuda))}: install NVIDIA's driver 580 or later "
            "(sudo apt install nvidia-driver-580-open on Ubuntu), then start the machine again"
        )
    target, smi = present(), _smi(device)
    if target is None:
        known = ", ".join(t.card.product for t in KNOWN)
        advice.append(
            f"there are no kernels for {name}, only for {known} and their like: build for the CPU "
            "(spark-build --target cpu)"
        )
    try:
        with closing(Gpu()) as gpu:
            mps = gpu.shared_by_mps
            room, mhz = GpuMemory(gpu.free_bytes, gpu.total_bytes, gpu.integrated), gpu.most_mhz
            tried = load and room.usable >= NEEDS
            told = probe(gpu) if tried else None
    except (SparkError, RuntimeError) as error:  # the latter where an old driver lacks a call
        absent = f"{name}, which cannot be used"
        words = f"{absent}: {error}"
        return Diagnosis(None, (*advice, words), why or "it cannot be used", absent)
    if load and not tried:
        advice.append(
            "too little memory is free to try the GPU's clock and bandwidth: stop other programs, "
            "then run the doctor again"
        )
    if mps:
        why = why or "NVIDIA MPS shares the GPU"
        advice.append(
            "NVIDIA MPS shares the GPU, beside which no engine opens: stop it with `echo quit | "
            "nvidia-cuda-mps-control`"
        )
    after = _smi(device) if load else {}
    card = Card(
        name=name,
        target=target.name if target else None,
        card=target.card.name if target else None,
        cuda=int(cuda),
        driver=smi.get("driver_version"),
        room=room,
        sm_mhz=told.sm_mhz if told else None,
        max_mhz=_number(smi.get("clocks.max.sm")) or mhz,
        bandwidth=told.bandwidth if told else None,
        wanted=target.card.bandwidth if target else None,
        watts=_number(after.get("power.draw")),
        celsius=_number(after.get("temperature.gpu")),
    )
    return Diagnosis(card, (*advice, *slow_advice(card)), why)


def release(version: int) -> str:
    """13000 as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def slow_advice(card: Card) -> list[str]:
    """What a clock or a bandwidth that is too low means, and what mends it."""
    words = []
    if card.sm_mhz is not None and card.max_mhz and card.sm_mhz < LOW_CLOCK * card.max_mhz:
        at = f"under load the GPU runs at {card.sm_mhz:.0f} of {card.max_mhz:.0f} MHz"
        if card.room.shared:
            words.append(
                f"{at}: this is the low-power state that a DGX Spark falls into, and a restart "
                "does not end it. Shut it down, take its power adapter out of the wall socket for "
                "a minute, use the adapter that came with it, start it, and run the doctor again"
            )
        else:
            words.append(
                f"{at}: stop other programs on the GPU; `nvidia-smi -q -d PERFORMANCE` says what "
                "holds it down (heat, power, a fixed clock: nvidia-smi -rgc)"
            )
    if card.bandwidth and card.wanted and card.bandwidth < LOW_BANDWIDTH * card.wanted:
        words.append(
            f"its memory moves {card.bandwidth / 1e9:.0f} GB/s where {card.wanted / 1e9:.0f} are "
            "usual: stop other programs on the GPU, and see that its clocks are not held down"
        )
    return words


def _smi(device: str = "0") -> dict[str, str]:
    """What nvidia-smi tells of a GPU, by field; nothing where there is none."""
    command = [
        SMI,
        f"--query-gpu={','.join(FIELDS)}",
        "--format=csv,noheader,nounits",
        "-i",
        device,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = [word.strip() for word in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    return dict(zip(FIELDS, words, strict=True)) if len(words) == len(FIELDS) else {}


def _number(word: str | None) -> float | None:
    try:
        return float(word or "")
    except ValueError:  # "[N/A]"
        return None
