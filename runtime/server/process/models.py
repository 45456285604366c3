"""Several models at one address: what the memory of each is, and their services.

Knows manifests and options; which engines are loaded is decided in `engine_client/residency.py`.
"""

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spark_engine.device.host_memory import available_memory
from spark_engine.device.shared_memory import host_budget
from spark_engine.engine_file import read_manifest
from spark_engine.errors import CapacityError, OptionError
from spark_engine.manifest import NATIVE, Manifest
from spark_engine.runtime.server.engine_client.engine_folder import GIB, read_info
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.engine_client.on_demand import OnDemandClient
from spark_engine.runtime.server.engine_client.residency import Residency, Resident
from spark_engine.runtime.server.process.open_service import open_service, prepare, supervision
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.service.models import Models
from spark_engine.runtime.server.service.service import Service

HOST, GPU = "host", "gpu"  # memories
# Bytes of an engine on a GPU next to its plan: the driver's context, cubins, graphs.
UNPLANNED = 1 << 30
CACHE = 1 << 30  # bytes of an engine's prefix cache on a GPU, if --cache-gib does not say
FREE = "from spark_engine.device.gpu import Gpu; print(Gpu().free_bytes)"
ANSWER_S = 60.0


@dataclass(frozen=True)
class ServedModel:
    """A model, and the bytes that its engine takes of a memory."""

    folder: Path
    command: tuple[str, ...]
    info: EngineInfo
    options: ServerOptions
    needs: int
    memory: str = HOST


def plan_models(
    folders: Mapping[str, Path], options: ServerOptions
) -> tuple[list[ServedModel], dict[str, int | None]]:
    """The models, and the bytes of each memory that their engines may take together.

    `folders` by the models' names; "" means the engine's own. Raises EngineError, OptionError,
    and CapacityError for an engine that does not fit alone.
    """
    _check(folders, options)
    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    reads = any(m.vision is not None for m in manifests.values())
    native = [m.executor == NATIVE for m in manifests.values()]
    host = host_budget(available_memory(), options.engine.host_bytes)
    budgets, shared = {HOST: host.usable}, host.shared
    if any(native) and not shared:
        budgets[GPU] = _free_on_gpu()
    if (most := options.models_bytes) is not None:
        budgets = {k: most if size is None else min(most, size) for k, size in budgets.items()}
    rows = []
    for name, folder in folders.items():
        manifest, own = manifests[name], replace(options, names=(name,) if name else options.names)
        if reads and manifest.vision is None:
            own = replace(own, chat=replace(own.chat, media_domains=()))
        if manifest.executor == NATIVE and own.engine.cache_bytes is None:
            own = replace(own, engine=replace(own.engine, cache_bytes=CACHE))
        memory = GPU if manifest.executor == NATIVE and not shared else HOST
        needs, most = needed(manifest, own), budgets[memory]
        if most is not None and needs > most:
            words = f"{folder} plans {needs / GIB:.2f} GiB, and engines may take {most / GIB:.2f}"
            if most == options.models_bytes:
                raise OptionError(f"{words}: raise --models-gib")
            raise CapacityError(f"{words}: stop other programs")
        try:
            command, own = prepare(folder, own)
        except OptionError as error:
            raise OptionError(f"{folder}: {error}") from None
        rows.append(ServedModel(folder, command, read_info(folder), own, needs, memory))
    return rows, budgets


def needed(manifest: Manifest, options: ServerOptions) -> int:
    """Bytes that an engine takes: on a GPU those of each of its ranks, which have one each."""
    plan, engine = manifest.memory, options.engine
    if manifest.executor == NATIVE:
        return plan.total + (engine.cache_bytes or 0) + UNPLANNED
    return (plan.total + min(engine.swap_bytes, plan.kv + plan.states)) * manifest.ranks


def _check(folders: Mapping[str, Path], options: ServerOptions) -> None:
    """Raises OptionError for options that one engine alone can have."""
    for flag, given in (("--hosts", options.engine.hosts), ("--profile", options.engine.profile)):
        if given is not None:
            words = "is for one engine that is always loaded: leave it out, or serve one folder"
            raise OptionError(f"{flag} {words}, without --idle-unload")
    if len(folders) > 1 and options.names:
        words = "--served-model-name is for one engine: give each its name"
        raise OptionError(f"{words}, {' '.join(f'{n}={f}' for n, f in folders.items())}")


def _free_on_gpu() -> int | None:
    """Free bytes of the first GPU, or None. Another process opens it, since this one may not."""
    command = [sys.executable, "-P", "-c", FREE]
    try:
        found = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=True)
        return int(found.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # the engines say what is wrong with it


@contextlib.asynccontextmanager
async def open_models(
    rows: Sequence[ServedModel], budgets: Mapping[str, int | None], idle_s: float | None = None
) -> AsyncIterator[Models]:
    """The services of the models, as many of them loaded as fit.

    Raises EngineError, CapacityError or OptionError when one cannot start.
    """
    async with contextlib.AsyncExitStack() as stack:
        services = list[Service]()
        residents = list[Resident]()
        for row in rows:
            name = (row.options.names or (row.info.name,))[0]
            given = row.command, row.options.max_queue, supervision(row.options)
            client = OnDemandClient(name, row.info, *given)
            peer = services[0] if services else None
            opened = open_service(row.command, row.folder, row.options, client, peer)
            service = await stack.enter_async_context(opened)
            services.append(service)
            open_ = partial(getattr, service, "open")
            residents.append(Resident(client, row.needs, row.memory, open_))
        residency = Residency(residents, budgets, idle_s)
        stack.push_async_callback(residency.close)
        await residency.begin()
        yield Models(services)
