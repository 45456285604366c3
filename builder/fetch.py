"""Fetches a checkpoint by its name on Hugging Face's hub, once, after checking what it holds.

Knows huggingface_hub (the extra `hub`), which caches files, resumes downloads, and reads the token
and the endpoint from the environment. Knows no tensor.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, TypeAlias

from spark_engine.errors import CapacityError, CheckpointError, OptionError
from spark_engine.hints import extra
from spark_engine.progress import Progress

GIB = 1 << 30
CHUNK = 16 << 20  # bytes hashed at once
# The files that a build reads; weights in other formats and images are not fetched.
WEIGHTS = ".safetensors"
NEEDED = (".json", WEIGHTS, ".jinja", ".txt")
TOKEN = "give a token that may read it: `hf auth login`, or HF_TOKEN in the environment"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
# The address as copied from a browser; `Path` has joined the two slashes into one.
_ADDRESS = re.compile(r"(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)/([^?#]+?)/?")
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_NETWORK = {"httpcore", "httpx", "httpx2", "requests", "urllib3"}  # libraries of huggingface_hub
_ORIGINAL = "look for the model's original repository"
AGAIN = "remove its folder, and run this again where the hub is reached"


@dataclass(frozen=True)
class _File:
    """A file of the repository. `sha256`: of a file in Git LFS; `git`: the git id of another
    file."""

    path: str
    size: int
    sha256: str | None
    git: str | None = None


_Wanted: TypeAlias = tuple[str, str | None]  # repository and revision
_Check: TypeAlias = Callable[[Path, Collection[str]], object]


def name_of(path: Path) -> str | None:
    """The name on the hub, `OWNER/NAME` or `OWNER/NAME@REVISION`, that `path` may be.

    None if a file or folder has this path, or could have. The address of a page on the hub is a
    name too.
    """
    if path.exists():
        return None
    address = _ADDRESS.fullmatch(str(path))
    if address is not None:
        name, _, revision = address[1].partition("/tree/")
        name = f"{name}@{revision}" if revision else name
        return name if _NAME.fullmatch(name) else None
    return str(path) if not path.parent.exists() and _NAME.fullmatch(str(path)) else None


def fetch(name: str, shown: Progress, check: _Check, engine: Path | None = None) -> Path:
    """The folder with the checkpoint `OWNER/NAME[@REVISION]`, fetched if it is not there yet.

    Prints the sizes first. `check` is called with the folder when it holds all files but the
    weights, and the names of all files, and raises if the build would refuse them. `engine` is the
    folder that will be written afterwards: a warning precedes the download if its disk may be too
    small for both. Verifies the hub's SHA-256 of each file in Git LFS, and the git id of each other
    file. If the hub cannot be reached, a complete earlier download is used. Raises OptionError
    without the extra `hub`; CheckpointError if there is neither, the download breaks off, the hub
    does not know the name, or a file differs from the hub's digest; CapacityError if the disk is
    too small.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise OptionError(
            f"{name} is no folder here, and fetching it needs the extra `hub`: {extra('hub')}; "
            f"or {by_hand(name)}"
        ) from None
    match = _NAME.fullmatch(name)
    if match is None:
        raise OptionError(f"{name!r} is no name on the hub: give OWNER/NAME or OWNER/NAME@REVISION")
    repository, revision = match.group(1), match.group(2)
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except hub.errors.GatedRepoError:
        raise _gated(repository) from None
    except hub.errors.RepositoryNotFoundError:
        words = f"the hub knows no {repository}: look at the spelling, or, if it is private, "
        raise CheckpointError(words + TOKEN) from None
    except hub.errors.RevisionNotFoundError:
        raise CheckpointError(
            f"{repository} has no revision {revision}: its page lists branches, tags and commits"
        ) from None
    except Exception as error:
        if not _unreachable(hub, error):
            raise _refused(hub, name, error) from None
        folder, files = _fetched_before(hub, name, (repository, revision), shown, error)
        check(folder, [file.path for file in files])
    else:
        try:
            folder, files = _download(hub, name, info, shown, check, engine)
        except hub.errors.GatedRepoError:
            raise _gated(repository) from None
        except Exception as error:
            if not _unreachable(hub, error):
                raise _refused(hub, name, error) from None
            words = f"the download of {name} broke off ({_reason(error)}): run this again, and it"
            raise CheckpointError(f"{words} continues where it stopped") from error
    _check_links(name, folder, files)
    _verify(name, folder, files, shown)
    return folder


def _gated(repository: str) -> CheckpointError:
    return CheckpointError(
        f"{repository} is gated: accept its terms on https://huggingface.co/{repository}, then "
        f"{TOKEN}"
    )


def _refused(hub: Any, name: str, error: Exception) -> Exception:
    """The UserError for an error that is not about the network."""
    if not isinstance(error, hub.errors.HfHubHTTPError):
        return error
    return CheckpointError(f"{name} could not be fetched ({_reason(error)}): {by_hand(name)}")


def _unreachable(hub: Any, error: Exception) -> bool:
    """True if the hub was not reached or could not answer, so that nothing is known of the
    checkpoint. The base class of its errors differs by version, as its network library does."""
    if isinstance(error, hub.errors.HfHubHTTPError):
        return getattr(error.response, "status_code", 0) >= 500
    network = {base.__module__.partition(".")[0] for base in type(error).__mro__} & _NETWORK
    local = isinstance(error, hub.errors.LocalEntryNotFoundError)
    return bool(network) or local or isinstance(error, ConnectionError | TimeoutError)


def _download(
    hub: Any, name: str, info: Any, shown: Progress, check: _Check, engine: Path | None
) -> tuple[Path, tuple[_File, ...]]:
    """The folder, and the files that it must hold according to the hub's `info`. Raises UserErrors
    and the errors of huggingface_hub."""
    repository, files = info.id, _needed(info)
    cache = Path(hub.constants.HF_HUB_CACHE)
    want: dict[str, Any] = {"repo_id": repository, "revision": info.sha}
    everything = {**want, "allow_patterns": [escape(f.path) for f in files]}
    left = sum(
        row.file_size for row in _quietly(hub, dry_run=True, **everything) if row.will_download
    )
    total = sum(f.size for f in files)
    shown.say(
        f"{repository} at {str(info.sha)[:12]}: {len(files)} files, {total / GIB:.2f} GiB, "
        f"{left / GIB:.2f} GiB of them to fetch into {cache}"
    )
    small = [escape(f.path) for f in files if not f.path.endswith(WEIGHTS)]
    check(Path(_quietly(hub, allow_patterns=small, **want)), [f.path for f in files])
    _check_capacity(name, left, cache)
    if engine is not None and (words := _tight(left, total, cache, engine)):
        shown.say(f"warning: {words}")
    return Path(hub.snapshot_download(**everything)), files


def _fetched_before(
    hub: Any, name: str, wanted: _Wanted, shown: Progress, error: Exception
) -> tuple[Path, tuple[_File, ...]]:
    """The cached files of the revision, with the names that identify their content."""
    folder = _cached(hub, *wanted)
    if folder is None:
        raise CheckpointError(
            f"{name} could not be fetched ({_reason(error)}): {by_hand(name)}"
        ) from error
    shown.say(f"the hub cannot be reached ({_reason(error)}): as it was fetched before, {folder}")
    files = []
    for path in sorted(p for p in folder.iterdir() if p.name.endswith(NEEDED)):
        blob = path.resolve()  # the cache names a file's content by its SHA-256 or git id
        if not blob.is_file():
            raise CheckpointError(f"{name}: {path} is not there: {AGAIN}")
        sha256 = blob.name if _SHA256.fullmatch(blob.name) else None
        git = blob.name if _GIT.fullmatch(blob.name) else None
        files.append(_File(path.name, blob.stat().st_size, sha256, git))
    return folder, tuple(files)


def _cached(hub: Any, repository: str, revision: str | None) -> Path | None:
    """The folder of the revision, or of the last one that was fetched; None if there is none."""
    if not Path(hub.constants.HF_HUB_CACHE).is_dir():
        return None
    rows = [
        row
        for repo in hub.scan_cache_dir(hub.constants.HF_HUB_CACHE).repos
        for row in repo.revisions
        if (repo.repo_id, repo.repo_type) == (repository, "model")
        and (revision is None or revision in row.refs or row.commit_hash.startswith(revision))
        and any(file.file_name.endswith(WEIGHTS) for file in row.files)
    ]
    last = max(rows, key=lambda row: row.last_modified, default=None)
    return None if last is None else Path(last.snapshot_path)


def by_hand(name: str) -> str:
    """The instructions to fetch it without `spark-build`."""
    repository, _, revision = name.partition("@")
    folder = repository.rpartition("/")[2]
    at = f" --revision {revision}" if revision else ""
    return (
        f"where the hub is reached, run `hf download {repository}{at} --local-dir {folder}`, bring "
        f"the folder here, then `spark-build {folder}`"
    )


def _needed(info: Any) -> tuple[_File, ...]:
    """The files that a build reads; all are at the top of the repository."""
    files = []
    for row in info.siblings or ():
        if "/" not in row.rfilename and row.rfilename.endswith(NEEDED):
            sha256, git = row.lfs.sha256 if row.lfs else None, None if row.lfs else row.blob_id
            files.append(_File(row.rfilename, row.size or 0, sha256, git))
    if not any(f.path == "config.json" for f in files):
        raise CheckpointError(f"{info.id} on the hub holds no config.json: {_ORIGINAL}")
    if not any(f.path.endswith(WEIGHTS) for f in files):
        raise CheckpointError(f"{info.id} on the hub holds no weights as *{WEIGHTS}: {_ORIGINAL}")
    return tuple(files)


def _quietly(hub: Any, **want: Any) -> Any:
    hub.utils.disable_progress_bars()
    try:
        return hub.snapshot_download(**want)
    finally:
        hub.utils.enable_progress_bars()


def _check_capacity(name: str, left: int, cache: Path) -> None:
    free = shutil.disk_usage(_above(cache)).free
    if left > free:
        raise CapacityError(
            f"{name}: the download takes {left / GIB:.2f} GiB, and {cache} has {free / GIB:.2f} "
            "GiB free: free some space, or name another folder in HF_HOME"
        )


def _tight(left: int, total: int, cache: Path, engine: Path) -> str:
    """A warning if the download may leave too little disk space for the engine. The engine's size
    is not known before the weights are; it is about the checkpoint's, or less if parts are left
    out. So this only warns; the build refuses."""
    places = _above(cache), _above(engine)
    free = shutil.disk_usage(places[1]).free
    left = left if places[0].stat().st_dev == places[1].stat().st_dev else 0
    if left + total <= free:
        return ""
    both = f"{left / GIB:.2f} GiB to be fetched and " if left else ""
    return (
        f"{both}an engine of up to about {total / GIB:.2f} GiB may not fit into the "
        f"{free / GIB:.2f} GiB that are free for {engine}: free some, or choose another disk with "
        "-o or HF_HOME"
    )


def _above(path: Path) -> Path:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _check_links(name: str, folder: Path, files: tuple[_File, ...]) -> None:
    """Raises CheckpointError if a file is outside the repository's folder in the hub's cache."""
    stored = folder.parent.parent.resolve()
    for path in (folder / file.path for file in files):
        if not path.resolve().is_relative_to(stored):
            raise CheckpointError(f"{name}: {path} links to a file outside {stored}: {AGAIN}")


def _verify(name: str, folder: Path, files: tuple[_File, ...], shown: Progress) -> None:
    total, done = sum(f.size for f in files if f.sha256), 0
    shown.say(f"verifying {total / GIB:.2f} GiB")
    for file in files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"{name}: {path} is not {file.size} bytes long: remove it and run this again"
            )
        if file.sha256 is None and file.git is None:
            continue
        digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                if file.sha256:
                    done += len(chunk)
                    shown.advance(done, total)
        if digest.hexdigest() != (file.sha256 or file.git):
            raise CheckpointError(
                f"{name}: {path} differs from the hub's file: remove {path.resolve()} and run this "
                "again"
            )


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no reason given'}"
