"""A checkpoint by its name on Hugging Face's hub: what it holds, then its files, fetched once.

Knows huggingface_hub (the extra `hub`), which keeps what it fetched, goes on where it stopped, and
reads the token and the endpoint of the environment. Knows no tensor.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from spark_engine.errors import CapacityError, CheckpointError, OptionError, UserError
from spark_engine.progress import Progress

GIB = 1 << 30
CHUNK = 16 << 20  # bytes hashed at once
EXTRA = "pip install 'spark-engine[hub]'"
# What a build reads; weights in other formats and pictures stay where they are.
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt")
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class _File:
    """A file of the repository; `sha256` of those that Git LFS keeps."""

    path: str
    size: int
    sha256: str | None


def is_name(path: Path) -> bool:
    """Whether `path` is no path here but may name a repository, as in `Qwen/Qwen3.6-27B@main`."""
    return not path.exists() and not path.parent.exists() and bool(_NAME.fullmatch(str(path)))


def fetch(name: str, shown: Progress) -> Path:
    """The folder with the checkpoint `OWNER/NAME[@REVISION]`, fetched if it is not there yet.

    Says the sizes first; every file that Git LFS keeps has the hub's SHA-256 afterwards. Raises
    OptionError without the extra `hub`, CheckpointError when the hub cannot be reached, does not
    know the name or gives other bytes than it says, CapacityError when the disk is too small.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError:
        raise OptionError(
            f"{name} is no folder here, and fetching it needs the extra `hub`: {EXTRA}; or "
            + by_hand(name)
        ) from None
    match = _NAME.fullmatch(name)
    if match is None:
        raise OptionError(f"{name!r} is no name on the hub: OWNER/NAME or OWNER/NAME@REVISION")
    repository, revision = match.group(1), match.group(2)
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
        files = _wanted(info)
        want: dict[str, Any] = {
            "repo_id": repository,
            "revision": info.sha,
            "allow_patterns": list(WANTED),
        }
        left = sum(row.file_size for row in _listed(hub, want) if row.will_download)
        total = sum(f.size for f in files)
        shown.say(
            f"{repository} at {str(info.sha)[:12]}: {len(files)} files, {total / GIB:.2f} GiB, "
            f"{left / GIB:.2f} GiB of them to fetch into {constants.HF_HUB_CACHE}"
        )
        _check_room(name, left, Path(constants.HF_HUB_CACHE))
        folder = Path(hub.snapshot_download(**want))
    except UserError:
        raise
    except Exception as error:  # its network library, and with it their base, differs by version
        raise CheckpointError(
            f"{name} could not be fetched ({_reason(error)}): {by_hand(name)}"
        ) from error
    _verify(name, folder, files, shown)
    return folder


def by_hand(name: str) -> str:
    """How to fetch it without us."""
    repository, _, revision = name.partition("@")
    folder = repository.rpartition("/")[2]
    at = f" --revision {revision}" if revision else ""
    return (
        f"where the hub is reached, run `hf download {repository}{at} --local-dir {folder}`, bring "
        f"the folder here, then `spark-build {folder}`"
    )


def _wanted(info: Any) -> tuple[_File, ...]:
    files = []
    for row in info.siblings or ():
        if any(fnmatch(row.rfilename, pattern) for pattern in WANTED):
            files.append(_File(row.rfilename, row.size or 0, row.lfs.sha256 if row.lfs else None))
    if not any(f.path == "config.json" for f in files):
        raise CheckpointError(f"{info.id} on the hub holds no config.json: it is no checkpoint")
    return tuple(files)


def _listed(hub: Any, want: dict[str, Any]) -> list[Any]:
    """What a download would do, file by file, without a bar of its own."""
    hub.utils.disable_progress_bars()
    try:
        rows: list[Any] = hub.snapshot_download(**want, dry_run=True)
    finally:
        hub.utils.enable_progress_bars()
    return rows


def _check_room(name: str, left: int, cache: Path) -> None:
    place = next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(place).free
    if left > free:
        raise CapacityError(
            f"{name}: {left / GIB:.2f} GiB are to be fetched into {cache}, where {free / GIB:.2f} "
            "GiB are free: free some, or name another place in HF_HOME"
        )


def _verify(name: str, folder: Path, files: tuple[_File, ...], shown: Progress) -> None:
    total, done = sum(f.size for f in files if f.sha256), 0
    shown.say(f"verifying {total / GIB:.2f} GiB")
    for file in files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"{name}: {path} is not {file.size} bytes long: remove it and run this again"
            )
        if file.sha256 is None:
            continue
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                shown.advance(done, total)
        if digest.hexdigest() != file.sha256:
            raise CheckpointError(
                f"{name}: {path} has not the bytes that the hub names: remove {path.resolve()} and "
                "run this again"
            )


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no reason given'}"
