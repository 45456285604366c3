"""Opens a `Service`: starts the engine process and the processes that read bodies, and ends them.

Knows options and processes; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from spark_engine.engine_file import MANIFEST
from spark_engine.errors import EngineError, OptionError
from spark_engine.runtime.engine.options import EngineOptions
from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.engine.trace import HTTP, trace_of
from spark_engine.runtime.images.fetch import Fetcher, media_domains
from spark_engine.runtime.server.engine_client import engine_folder
from spark_engine.runtime.server.engine_client.client import EngineClient
from spark_engine.runtime.server.engine_client.early import WORKER, EarlyProcess
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.engine_client.supervisor import WATCHDOG_S, Supervision
from spark_engine.runtime.server.process.options import ServerOptions

if TYPE_CHECKING:
    from spark_engine.runtime.server.engine_client.on_demand import OnDemandClient
    from spark_engine.runtime.server.service.service import Service

HTTP_SERVER = "spark_engine.runtime.server.process.http_server"


def prepare(folder: Path, options: ServerOptions) -> tuple[tuple[str, ...], ServerOptions]:
    """The command of the engine process, and the options with the engine's watchdog.

    Raises EngineError or OptionError for options that the engine in `folder` cannot meet.
    """
    info = engine_folder.read_info(folder)
    engine_folder.check_drafts(options.engine.drafts, info.limits)
    engine_folder.check_cache(options.engine.cache_bytes, folder)
    shorten(info, options.max_model_len)
    if media_domains(options.chat.media_domains) and info.vision is None:
        raise OptionError("--media-domains does nothing: this engine reads no images; leave it out")
    waiting = options.max_queue + 4096  # this process refuses requests with 503, not the engine
    command = worker_command(folder, replace(options.engine, max_waiting=waiting))
    if options.watchdog_s is None:
        options = replace(options, watchdog_s=engine_folder.watchdog_for(folder))
    return command, options


def worker_command(folder: Path, options: EngineOptions) -> tuple[str, ...]:
    return (*WORKER, str(folder), msgspec.json.encode(options).decode())


@contextlib.asynccontextmanager
async def open_service(
    command: Sequence[str],
    folder: Path,
    options: ServerOptions,
    on_demand: OnDemandClient | None = None,
    peer: Service | None = None,
    early: EarlyProcess | None = None,
) -> AsyncIterator[Service]:
    """The service of a folder by the engine process of `command`; the socket's address is added to
    it. With `on_demand`, which has that command, no process is started. `peer`: another service
    of the same server; `early` becomes the first engine process. Raises EngineError, CapacityError
    or OptionError when it cannot start."""
    was = _identity(folder)
    first_manifest = engine_folder.find_manifest(folder)
    trace = trace_of(options.engine.profile, HTTP)
    given = command, options.max_queue, supervision(options), trace
    client = on_demand or EngineClient(*given)
    fetcher = Fetcher(media_domains(options.chat.media_domains))
    pool: WorkerPool | None = None
    try:
        if on_demand is None:
            await client.begin(early)
        # imported here, and then what serves, in a thread: the engine process starts before them
        from spark_engine.runtime.server.prompts.pool import WorkerPool

        pool = WorkerPool(folder)
        await pool.begin()  # engine, workers and this process load at the same time
        from spark_engine.runtime.server.prompts.contract import Setup
        from spark_engine.runtime.server.prompts.text_files import read_formats, read_tokenizer
        from spark_engine.runtime.server.service.service import Service

        asyncio.get_running_loop().run_in_executor(None, _import_server)
        tokenizer, formats = read_tokenizer(folder), read_formats(folder, options.chat)
        same = _identity(folder) == was
        info = await client.loaded() if on_demand is None else on_demand.info
        info = shorten(info, options.max_model_len)
        if first_manifest is not None:
            same = same and info.build in ("", first_manifest.fingerprint.all)
        if not same:
            raise EngineError(f"{folder} was built again while it was being loaded: start again")
        names = options.names or (info.name,)
        most = info.limits.max_seqs + options.max_queue
        await pool.start(Setup(info, names, options.chat, options.allow_priority, most))
        times = options.timeout_s, options.queue_timeout_s
        yield Service(client, info, tokenizer, pool, names, formats, *times, fetcher, peer)
    finally:
        fetcher.close()
        if pool is not None:
            await pool.close()
        await client.close()
        trace.save()


def _import_server() -> None:
    import_module(HTTP_SERVER)
    gc.collect()  # now, as it would delay what follows by 40 ms


def _identity(folder: Path) -> tuple[int, int] | None:
    """Of the manifest's file, which a new build replaces; None where there is none."""
    try:
        found = (folder / MANIFEST).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def shorten(info: EngineInfo, most: int | None) -> EngineInfo:
    """The engine as if it had been built for `most` tokens a request.

    Raises OptionError for more than it was built for.
    """
    if most is None:
        return info
    longest = capacity(info.limits)
    if not 2 <= most <= longest:
        words = f"--max-model-len is {most}; a request of this engine reaches 2 to {longest} tokens"
        raise OptionError(words)
    return msgspec.structs.replace(info, limits=replace(info.limits, max_context=most))


def supervision(options: ServerOptions) -> Supervision:
    limit = WATCHDOG_S if options.watchdog_s is None else options.watchdog_s
    dumps = None if options.dumps is None else Path(options.dumps)
    if dumps is not None and not dumps.is_dir():
        raise OptionError(f"--dumps is {dumps}, which is no folder; make it, or name another")
    return Supervision(limit, options.restarts, wait_s=options.restart_wait_s, dumps=dumps)
