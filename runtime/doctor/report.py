"""The doctor's report: findings, advice and verdict, as text and as JSON.

Knows no GPU and no file; the caller passes the findings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spark_engine.hints import extra
from spark_engine.runtime.doctor.engines import Fit
from spark_engine.runtime.doctor.gpu import Diagnosis, release
from spark_engine.runtime.doctor.machine import Host

GB, GIB, MIB = 1e9, 1 << 30, 1 << 20
# Of a 27B in NVFP4, and some free space; README has their sum.
DISK_OF_CHECKPOINT, DISK_OF_ENGINE = 28 * GIB, 22 * GIB
HIDDEN = 8 * GIB  # bytes: a larger difference between the kernel's and CUDA's figures is a limit
SWAPPED = GIB  # bytes in swap above which a GPU that shares the memory is slow


@dataclass(frozen=True)
class DoctorReport:
    """All findings. `extras`: the missing packages of each; `disk`: free bytes by folder;
    `hub_cache`: the folder of Hugging Face's cache, if it is on another disk; `prefixes`: of a
    folder for the prefix cache its bytes, and why a server would refuse it."""

    host: Host
    gpu: Diagnosis
    extras: Mapping[str, tuple[str, ...]]
    disk: Mapping[str, int | None]
    engines: Sequence[Fit]
    hub_cache: str | None = None
    prefixes: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        return any(not engine.why for engine in self.engines)

    @property
    def advice(self) -> list[str]:
        """Remedies, the most urgent first."""
        kept = [why for _, why in self.prefixes.values() if why]
        return [*self.gpu.advice, *self._of_memory(), *self._of_disk(), *kept, *self._of_engines()]

    def to_json(self) -> dict[str, Any]:
        """The report for programs; bytes, bytes a second, MHz. docs/operate/capacity.md lists the
        values of `gpu_state`. `gpu_absent`: why `gpu` is null; `gpu_why`: why no engine for a GPU
        opens."""
        return {
            "served": self.served,
            "host": asdict(self.host),
            "gpu": asdict(self.gpu.card) if self.gpu.card else None,
            "gpu_state": self.gpu.state,
            "gpu_absent": None if self.gpu.card else self.gpu.absent,
            "gpu_why": self.gpu.why or None,
            "extras": {name: list(missing) for name, missing in self.extras.items()},
            "disk": dict(self.disk),
            "prefix_cache": {path: used for path, (used, _) in self.prefixes.items()},
            "engines": [asdict(engine) for engine in self.engines],
            "advice": self.advice,
        }

    def lines(self) -> Iterator[str]:
        host = self.host
        yield f"machine     {host.system}, {host.arch}, {host.cores} cores"
        yield f"software    spark-engine {host.package}, Python {host.python}"
        yield from _gpu(self.gpu)
        swap = f", swap {_gib(host.swap_used)} of {_gib(host.swap)} used" if host.swap else ""
        yield f"host memory {_gib(host.available)} of {_gib(host.total)} available{swap}"
        for folder, free in self.disk.items():
            yield f"disk        {_gib(free)} free for {folder}"
        for folder, (used, _) in self.prefixes.items():
            yield f"prefixes    {_gib(used)} of the prefix cache in {folder}"
        installed = [name for name, missing in self.extras.items() if not missing]
        absent = [name for name, missing in self.extras.items() if missing]
        lacks = f"; not installed: {', '.join(absent)} ({extra(*absent)})" if absent else ""
        yield f"extras      installed: {', '.join(installed) or 'none'}{lacks}"
        for engine in self.engines:
            yield from _engine(engine)
        advice = self.advice
        if advice:
            yield "advice"
        yield from (f"  {number}. {words}" for number, words in enumerate(advice, 1))
        yield "an engine can be served" if self.served else "no engine can be served"

    def _hidden(self) -> str | None:
        """The difference between CUDA's and the kernel's figures, if GPU and host share memory."""
        card, host = self.gpu.card, self.host
        if card is None or not card.memory.shared:
            return None
        if host.total is not None and host.total - card.memory.total > HIDDEN:
            return f"CUDA sees {_gib(card.memory.total)} of the machine's {_gib(host.total)}"
        if host.free is not None and host.free - card.driver_free > HIDDEN:
            free = f"{_gib(card.driver_free)} as free, and the kernel has {_gib(host.free)} free"
            return f"CUDA reports {free} ({_gib(host.available)} available)"
        return None

    def _of_memory(self) -> Iterator[str]:
        card, host = self.gpu.card, self.host
        if hidden := self._hidden():
            files = ", ".join(host.nvidia_options)
            limit = (
                f"remove a memory limit from {files}, run `sudo update-initramfs -u`, restart. If "
                "that changes nothing"
                if files
                else "no file in /etc/modprobe.d sets a limit"
            )
            yield (
                f"{hidden}: {limit}, a killed program may still hold the memory (restart the "
                "machine), or the driver is not that of DGX OS (`apt policy` names the archive)"
            )
        if card and card.memory.shared and (host.swap_used or 0) > SWAPPED:
            # Emptying swap without enough free memory would end programs or hang the host.
            fits = (host.available or 0) - card.memory.kept > (host.swap_used or 0)
            empty = "sudo swapoff -a && sudo swapon -a" if fits else "run the doctor again"
            yield (
                f"{_gib(host.swap_used)} are in swap, and GPU and programs share one memory: "
                f"stop other programs, then {empty}"
            )

    def _of_disk(self) -> Iterator[str]:
        for folder, free in self.disk.items():
            needed, what = DISK_OF_ENGINE, "the engine of a 27B in NVFP4 needs"
            if self.hub_cache is None:
                needed += DISK_OF_CHECKPOINT
                what = "a 27B checkpoint in NVFP4 and its engine need"
            elif folder == self.hub_cache:
                needed, what = DISK_OF_CHECKPOINT, "a 27B checkpoint in NVFP4 needs"
            if free is not None and free < needed:
                yield f"{_gib(free)} are free for {folder}: {what} about {needed // GIB} GiB"

    def _of_engines(self) -> Iterator[str]:
        if not self.engines:
            without = " --target cpu" if self.gpu.card is None else ""
            hub = f"{extra('hub')} once, then " if self.extras.get("hub") else ""
            build = f"`spark-build OWNER/NAME -o engines/NAME{without}`"
            yield (
                f"no engine is named and engines/ contains none: {hub}{build} builds the model "
                "OWNER/NAME of Hugging Face; `spark-run` alone runs the small embedded model"
            )
        for engine in self.engines:
            if engine.why:
                yield f"{engine.path} cannot be served: {engine.why}"
        served = [engine.path for engine in self.engines if not engine.why]
        if served:
            yield f"to serve {served[0]}: spark-run {served[0]} --serve"


def roots(engines: Sequence[Path], below: Path) -> list[Path]:
    """The folders to report disks of: that of the engines, or those of the named engines."""
    return sorted({engine.absolute().parent for engine in engines}) or [below.absolute()]


def _gpu(found: Diagnosis) -> Iterator[str]:
    card = found.card
    if card is None:
        yield f"GPU         {found.absent}"
        return
    kind = f"kernels for {card.target}" if card.target else "no kernels for it"
    driver = f"driver {card.driver}, " if card.driver else ""
    yield f"GPU         {card.name}: {kind}; {driver}CUDA {release(card.cuda)}"
    memory, shared = card.memory, ", shared with the host" if card.memory.shared else ""
    keeps = f", which reserves {_gib(memory.kept)}" if memory.kept else ""
    yield f"GPU memory  {_gib(memory.usable)} of {_gib(memory.total)} for an engine{shared}{keeps}"
    if card.sm_mhz is not None:
        most = f" of {card.max_mhz:.0f}" if card.max_mhz else ""
        heat = f", {card.celsius:.0f} °C" if card.celsius is not None else ""
        power = f", {card.watts:.0f} W" if card.watts is not None else ""
        yield f"GPU clock   {card.sm_mhz:.0f}{most} MHz under load{power}{heat}"
    if card.bandwidth is not None:
        wanted = f"; usual are {card.wanted / GB:.0f}" if card.wanted else ""
        yield f"bandwidth   {card.bandwidth / GB:.0f} GB/s{wanted}"


def _engine(engine: Fit) -> Iterator[str]:
    if engine.needs is None:
        yield f"engine      {engine.path}: not an engine folder"
        return
    verdict = "cannot be served (why: below)" if engine.why else "can be served"
    takes = f"takes {_gib(engine.needs)}"
    if engine.leaves is not None and engine.leaves < 0:
        takes += f", {_gib(-engine.leaves)} more than is free"
    elif engine.leaves is not None:
        takes += f" and leaves {_gib(engine.leaves)}"
    if not engine.text:
        takes += "; it has no tokenizer, so it takes token ids only"
    yield f"engine      {engine.path}, for {engine.target}, {verdict}; {takes}"
    users = (f"{count:,} of {tokens:,} tokens" for tokens, count in engine.users.items())
    yield f"            requests at once: {', '.join(users)}"


def _gib(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / GIB:.1f} GiB" if count >= GIB or not count else f"{count / MIB:.0f} MiB"
