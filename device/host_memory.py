"""Bytes of the host's memory that a program may take without swapping.

Knows Linux's files; returns None if they are absent.
"""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MINE = Path("/proc/self/cgroup")


def available_memory(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, mine: Path = MINE
) -> int | None:
    """Bytes that can be allocated without swapping, or None if that is not known.

    The kernel's MemAvailable, limited by what this process's control group and its parents leave:
    a container sees its own group as the root, a systemd unit's group is below the root.
    """
    found = (reported_bytes(meminfo, "MemAvailable"), *map(_from_cgroup, _groups(cgroup, mine)))
    return min((b for b in found if b is not None), default=None)


def _groups(root: Path, mine: Path) -> list[Path]:
    """The folders of this process's control group and of its parents, up to `root`."""
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return [root]
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    own = root / name.lstrip("/")
    below = [own, *own.parents] if ".." not in own.parts else []  # the group of another namespace
    return [folder for folder in below if root in folder.parents] + [root]


def free_memory(meminfo: Path = MEMINFO) -> int | None:
    """Bytes that nothing uses, not even the page cache (MemFree), or None."""
    return reported_bytes(meminfo, "MemFree")


def reported_bytes(path: Path, name: str) -> int | None:
    """A row of /proc/meminfo, or None."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(values[0]) * 1024 if values else None


def _from_cgroup(folder: Path) -> int | None:
    """Limit minus use; Linux frees the file pages, which count as used, on demand."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    pages = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
    return None if limit == "max" else max(0, int(limit) - used + pages)
