"""What an engine folder's manifest says: limits, and checks of options against them.

Opens no engine file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from spark_engine.engine_file import MANIFEST, read_manifest
from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL, Limits
from spark_engine.manifest import NATIVE, PAGE, SEQUENCE, Manifest, bytes_of
from spark_engine.runtime.engine.options import EngineOptions
from spark_engine.runtime.ranks.rendezvous import split_hosts
from spark_engine.runtime.ranks.spawn import check_hosts
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.engine_client.supervisor import WATCHDOG_S

GIB = 1 << 30
CPU_WATCHDOG_S = 60.0


def read_info(folder: Path) -> EngineInfo:
    """The description of the engine in `folder` for the HTTP process. Raises EngineError."""
    manifest = read_manifest(folder)
    return EngineInfo(
        name=manifest.name,
        limits=manifest.limits,
        eos_token_ids=manifest.eos_token_ids,
        generation=dict(manifest.generation),
        build=manifest.fingerprint.all,
        vision=manifest.vision,
    )


def find_manifest(folder: Path) -> Manifest | None:
    """The manifest, or None where the folder has none. Raises EngineError for a broken one."""
    return read_manifest(folder) if (folder / MANIFEST).exists() else None


def check_drafts(asked: int | None, limits: Limits) -> None:
    """Raises OptionError for more drafts a round than the engine was built for."""
    if asked is None or asked <= limits.drafts:
        return
    if not limits.drafts:
        words = "this engine has no draft head: leave it out, or build the engine with drafts"
    else:
        words = f"this engine makes at most {limits.drafts} a round"
    raise OptionError(f"--drafts is {asked}; {words}")


def check_ranks(folder: Path, options: EngineOptions) -> None:
    """Raises OptionError where the engine is for other ranks or hosts, or for GPUs with --hosts."""
    manifest = read_manifest(folder)
    ranks = manifest.ranks
    if options.tp not in (None, ranks):
        words = f"--tp is {options.tp}, and {folder} was built for {ranks} rank"
        again = f"build it again with spark-build --tp {options.tp}"
        raise OptionError(f"{words}{'s' if ranks > 1 else ''}: leave it out, or {again}")
    check_hosts(split_hosts(options.hosts), manifest)


def check_cache(asked: int | None, folder: Path) -> None:
    """Raises OptionError for a prefix cache, in bytes, that could never hold a prefix."""
    if not asked:
        return
    manifest = read_manifest(folder)
    row, page = (bytes_of(manifest.states, unit) for unit in (SEQUENCE, PAGE))
    given = f"--cache-gib is {asked / GIB:.3g}"
    if row and manifest.executor != NATIVE and not manifest.limits.snapshots:
        words = "this engine was built without memory for states: build it again with --cache-gib"
        raise OptionError(f"{given}; {words}")
    if asked < row + page:
        words = f"a prefix takes {(row + page) / GIB:.2g} GiB at least: give more, or 0 for none"
        raise OptionError(f"{given}; {words}")


def watchdog_for(folder: Path) -> float:
    """Seconds without a step after which its engine counts as hung; a CPU's takes longer."""
    return WATCHDOG_S if read_manifest(folder).executor == NATIVE else CPU_WATCHDOG_S


def describe_cache(info: EngineInfo) -> str:
    if not info.cache_bytes:
        return ", without a prefix cache"
    states = f" ({info.snapshots} states)" if info.snapshots else ""
    disk = f", and {info.disk_bytes / GIB:.2f} GiB on disk" if info.disk_bytes else ""
    return f", with a prefix cache of up to {info.cache_bytes / GIB:.2f} GiB{states}{disk}"


def unmet(options: EngineOptions, info: EngineInfo, manifest: Manifest) -> Iterator[str]:
    """Warnings about options that an open engine cannot meet."""
    asked = options.cache_bytes
    if asked and info.cache_bytes < asked:
        words = f"--cache-gib is {asked / GIB:.3g}; this engine and the free memory"
        yield f"{words} fit {info.cache_bytes / GIB:.2f} GiB of pages and states"
    costs = {
        family: min((b.cost_us for b in manifest.buckets if b.family == family), default=0) / 1e3
        for family in (DECODE, PREFILL)
    }
    most, step = options.policy.itl_ms, sum(costs.values())
    if most is not None and all(costs.values()) and most < step:
        parts = f"{costs[DECODE]:.3g} to decode and {costs[PREFILL]:.3g} for the least prefill"
        words = f"--itl-ms is {most:g}; a step of one row takes {step:.3g} ms with a prefill"
        yield f"{words}, {parts}: a token waits that long while prompts are taken in"


def describe_drafts(asked: int | None, limits: Limits, fixed: bool = False) -> str:
    """The drafts, to follow the engine's name in the log; empty without a draft head."""
    if not limits.drafts:
        return ""
    most = limits.drafts if asked is None else asked
    if not most:
        return " without its drafts"
    bound = "" if fixed else "up to "
    return f" with {bound}{most} draft{'s' if most > 1 else ''} a round"


def split_names(given: Sequence[str]) -> dict[str, Path]:
    """Engine folders by the names of their models. One folder without a name has the name "": its
    engine has one; several have the folders' own. Raises OptionError where two have the same."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, rest = text.partition("=")
        if not equals or Path(text).is_dir():
            name, rest = Path(text).resolve().name if len(given) > 1 else "", text
        elif not (name and rest):
            raise OptionError(f"{text}: a model is FOLDER or NAME=FOLDER, e.g. small=engines/9b")
        if name in found:
            words = f"two models are called {name}: name one of them, as in other={rest}"
            raise OptionError(words)
        found[name] = Path(rest)
    return found
