"""Which engine folders this machine can serve, and the reasons for the others.

Checks the manifest before anything is loaded; opens no executor, and reads no other file.
`spark-check` and a start verify the other files.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_engine.device.shared_memory import host_budget
from spark_engine.engine_file import has_text, read_manifest
from spark_engine.errors import UserError
from spark_engine.interface import Limits
from spark_engine.manifest import NATIVE, Manifest
from spark_engine.runtime.engine.detect import check_memory, foreign, runnable_targets
from spark_engine.runtime.engine.load import HOST_TARGETS
from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.executors.cache_size import GpuMemory
from spark_engine.runtime.ranks.spawn import check_gpus, check_nccl

ENGINES = Path("engines")
CONTEXTS = (2048, 8192, 32768, 131072)  # tokens of a request: chats, documents, agents


@dataclass(frozen=True)
class Fit:
    """An engine folder: its target, the bytes of its plan, the bytes that remain free, and `why` it
    cannot be served; empty if it can. `users`: by tokens of a request, how many run at once."""

    path: str
    name: str = ""
    target: str = ""
    needs: int | None = None
    leaves: int | None = None
    why: str = ""
    text: bool = True  # it has a tokenizer
    users: Mapping[int, int] = field(default_factory=dict)


def folders(given: Sequence[Path], below: Path = ENGINES) -> list[Path]:
    """The given folders, or those under engines/ with a manifest; hidden ones are incomplete
    builds."""
    found = (path.parent for path in below.glob("*/manifest.json"))
    return list(given) or sorted(path for path in found if not path.name.startswith("."))


def fit(
    path: Path,
    memory: GpuMemory | None,
    available: int | None,
    gpu: str = "",
    host_bytes: int | None = None,
) -> Fit:
    """Whether `path` can be served; `memory`: the GPU's memory, `available`: the host's free bytes,
    `gpu`: the reason why no engine for a GPU opens."""
    try:
        manifest = read_manifest(path)
    except UserError as error:
        return Fit(str(path), why=str(error))
    except OSError as error:
        return Fit(str(path), why=f"{error}: allow this user to read it, or run as a user that may")
    native = manifest.executor == NATIVE
    needs = manifest.memory.total * (1 if native else manifest.ranks)
    taken = memory if native and memory else host_budget(available, host_bytes)
    free, kept = taken.usable, taken.kept
    of_gpu = f"it is for a GPU, and {gpu}" if gpu and manifest.target not in HOST_TARGETS else ""
    why = _target(manifest) or of_gpu or _files(path, manifest) or _memory(manifest, free, kept)
    leaves = None if free is None or (native and memory is None) else free - needs
    about = (needs, leaves, why, has_text(path), users(manifest.limits))
    return Fit(str(path), manifest.name, manifest.target, *about)


def users(limits: Limits) -> dict[int, int]:
    """By the tokens of a request, prompt and answer, how many of them run at once."""
    sizes = [tokens for tokens in CONTEXTS if tokens < (longest := capacity(limits))]
    pages = {tokens: -(-tokens // limits.page_size) for tokens in (*sizes, longest)}
    return {tokens: min(limits.max_seqs, limits.pages // n) for tokens, n in pages.items()}


def _target(manifest: Manifest) -> str:
    here = runnable_targets(HOST_TARGETS)
    if manifest.target in here:
        return ""
    return foreign(manifest.target, here) or (
        f"it is for {manifest.target}, and this machine runs {' and '.join(here)}: build it "
        f"again on this machine, or with --target {here[-1]}"
    )


def _files(path: Path, manifest: Manifest) -> str:
    for name, digest in manifest.files.items():
        file = path / name
        try:
            found = file.stat().st_size if file.is_file() else None
        except OSError as error:
            return f"{error}: allow this user to read it, or run as a user that may"
        if found is not None and not os.access(file, os.R_OK):
            return f"{name} is not readable for this user: allow it, or run as a user that may"
        if found != digest.bytes:
            has = "is missing" if found is None else f"has {found} bytes"
            return f"{name} {has}, and {digest.bytes} were built: build the engine again"
    return ""


def _memory(manifest: Manifest, free: int | None, kept: int) -> str:
    native = manifest.executor == NATIVE
    try:
        check_nccl(manifest)
        if not manifest.across_hosts:  # otherwise the other GPUs may be in other hosts
            check_gpus(manifest)
        check_memory(manifest, 0, free, kept, 1 if native else manifest.ranks)
    except UserError as error:
        return str(error)
    return ""
