"""The machine without its GPU: memory, swap, disk, the package's extras.

Knows Linux's files and the package's metadata.
"""

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from spark_engine.device.host_memory import MEMINFO, available_memory, reported_bytes
from spark_engine.errors import OptionError
from spark_engine.runtime.engine.disk.cache_folder import check_owner, files_in

PACKAGE = "spark-engine"
EXTRAS = ("cuda", "hub", "check", "bench", "otel", "trt")  # the extras for users
MODPROBE = Path("/etc/modprobe.d")  # module options of the driver, such as a memory limit
_NAME = re.compile(r"[\w.-]+")
_OPTION = re.compile(r"^\s*options\s+nvidia", re.MULTILINE)


@dataclass(frozen=True)
class Host:
    """Bytes, except `cores`; None if Linux does not report it.

    Attributes:
        nvidia_options: the files in /etc/modprobe.d that set options of NVIDIA's modules.
    """

    system: str
    arch: str
    python: str
    package: str
    cores: int
    total: int | None
    available: int | None  # can be allocated without swapping
    swap: int | None
    swap_used: int | None
    free: int | None = None  # unused, also by the page cache
    nvidia_options: tuple[str, ...] = ()


def host(meminfo: Path = MEMINFO) -> Host:
    names = "MemTotal", "MemFree", "SwapTotal", "SwapFree"
    total, free, swap, unused = (reported_bytes(meminfo, name) for name in names)
    used = None if swap is None or unused is None else swap - unused
    return Host(
        system=_system(),
        arch=platform.machine(),
        python=platform.python_version(),
        package=_version(PACKAGE) or "from a folder, not installed",
        cores=os.cpu_count() or 1,
        total=total,
        available=available_memory(meminfo),
        swap=swap,
        swap_used=used,
        free=free,
        nvidia_options=nvidia_options(),
    )


def nvidia_options(folder: Path | None = None) -> tuple[str, ...]:
    """The files in `folder`, by default /etc/modprobe.d, that set options of NVIDIA's modules."""
    found = []
    for path in sorted((folder or MODPROBE).glob("*.conf")):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        if _OPTION.search(text):
            found.append(str(path))
    return tuple(found)


def extras() -> dict[str, tuple[str, ...]]:
    """The missing packages of each extra; empty if all are installed."""
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:
        return {}
    missing: dict[str, tuple[str, ...]] = {}
    for extra in EXTRAS:
        wanted = [line for line in lines if f"extra == '{extra}'" in line.replace('"', "'")]
        names = [found[0] for line in wanted if (found := _NAME.match(line))]
        missing[extra] = tuple(n for n in names if n != PACKAGE and _version(n) is None)
    return missing


def disk(folder: Path) -> int | None:
    """Bytes free where `folder` is or would be; None if unknown."""
    try:
        return shutil.disk_usage(_above(folder)).free
    except OSError:
        return None


def prefixes(folder: Path) -> tuple[int, str]:
    """Bytes of the prefix cache's files in a folder, and why a server would refuse that."""
    try:
        check_owner(folder)
        return sum(size for _, _, size in files_in(folder)), ""
    except FileNotFoundError:
        return 0, ""  # the server makes it
    except OptionError as error:
        return 0, str(error)
    except OSError as error:
        return 0, f"--cache-dir {folder}: {error.strerror}: name a folder that this user may write"


def same_disk(one: Path, other: Path) -> bool:
    """Whether both are or would be on one file system; True if unknown."""
    try:
        return _above(one).stat().st_dev == _above(other).stat().st_dev
    except OSError:
        return True


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The cache folder of huggingface_hub."""
    named = environ.get("HF_HUB_CACHE")
    home = environ.get("HF_HOME")
    general = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named or Path(home or Path(general, "huggingface"), "hub")).expanduser()


def _above(folder: Path) -> Path:
    """`folder`, or its nearest existing parent."""
    at = folder.absolute()
    while not at.exists() and at != at.parent:
        at = at.parent
    return at


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
