"""The targets that this machine runs, and whether an engine fits its free memory."""

from importlib.util import find_spec
from types import ModuleType

from spark_engine.errors import CapacityError
from spark_engine.hints import cuda_missing, driver_present, extra
from spark_engine.manifest import NATIVE, Manifest

GIB = 1 << 30
RTX = "rtx", ((8, 9), (12, 0), (12, 1))  # TensorRT-RTX's target, and the GPUs it is built for


def needs_gpu(target: str) -> bool:
    """Whether engines of this target run on a GPU."""
    return target.startswith("sm_") or target == RTX[0]


def runnable_targets(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The build targets that run here: those that need no GPU, and the GPU's."""
    return (*hosts, *_gpu_targets())


def _gpu() -> ModuleType | None:
    """What asks the driver; None without the extra `cuda`."""
    try:
        from spark_engine.device import gpu
    except ImportError:
        return None
    return gpu


def _gpu_targets() -> tuple[str, ...]:
    gpu = _gpu()
    if gpu is None:
        return ()
    name, (target, known) = gpu.architecture(), RTX
    own = () if name is None else (name,)
    return (*own, target) if gpu.capability() in known and find_spec("tensorrt_rtx") else own


def foreign(target: str, here: tuple[str, ...]) -> str:
    """What this machine, where engines for `here` run, lacks for a target's engines, and the
    remedy; empty where they run, and where the only reason is another target."""
    if target in here:
        return ""
    name, known = RTX
    if target == name:
        *most, last = (f"{major}.{minor}" for major, minor in known)
        gpus = f"{', '.join(most)} or {last}"
        which = f"TensorRT-RTX on a GPU of compute capability {gpus}"
        gpu = _gpu()
        found = gpu.capability() if gpu is not None else None
        if found in known:
            return f"it is for {which}, and needs its library: {extra('trt')}"
        seen = "no GPU that can be used" if found is None else f"one of {found[0]}.{found[1]}"
        more = f" ({extra('trt')} where there is one)" if cuda_missing() else ""
        return f"it is for {which}, and here is {seen}{more}: build it for another --target"
    if lacks := cuda_missing():
        driver = "" if driver_present() else ", and NVIDIA's driver, which is not loaded either"
        return (
            f"it is for the GPU {target}, which needs the extra `cuda`, missing here or incomplete "
            f"({lacks}){driver}: {extra('cuda')}"
        )
    return ""


def present_card() -> tuple[str | None, int]:
    """The name of the first GPU's card in a manifest, None without one, and the number of GPUs."""
    gpu = _gpu()
    if gpu is None:
        return None, 0
    found = gpu.present()
    return found.card.name if found else None, gpu.count()


def check_memory(
    manifest: Manifest, swap_bytes: int, available: int | None, kept: int = 0, ranks: int = 1
) -> None:
    """Raises CapacityError, with the numbers and remedies, when `ranks` ranks of the engine need
    more than the `available` bytes; `kept` bytes more are reserved for the host."""
    need = (manifest.memory.total + swap_bytes) * ranks
    if available is not None and need > available:
        m = manifest.memory
        parts = f"weights {m.weights / GIB:.2f}, KV pages {m.kv / GIB:.2f}, states "
        parts += f"{m.states / GIB:.2f}, tables {m.tables / GIB:.2f}, arena {m.arena / GIB:.2f}, "
        parts += f"buffers {m.buffers / GIB:.2f}, "
        parts += f"snapshots {m.snapshots / GIB:.2f}, " if m.snapshots else ""
        card = f", built for the card {manifest.card}," if manifest.card else ""
        less = " or snapshots (--cache-gib)" if m.snapshots else ""
        name, gpus = present_card()
        more = manifest.executor == NATIVE and gpus > manifest.ranks
        less += ", or for more GPUs of this host (--tp)" if more else ""
        here = "for this card (--card), or " if manifest.card and manifest.card != name else ""
        each = f", for each of {ranks} ranks" if ranks > 1 else ""
        host = f" next to the {kept / GIB:.2f} that this machine itself keeps" if kept else ""
        raise CapacityError(
            f"engine {manifest.name}{card} needs {need / GIB:.2f} GiB ({parts}swap "
            f"{swap_bytes / GIB:.2f}{each}) and {available / GIB:.2f} GiB are free{host}: stop "
            f"other programs, or rebuild {here}with a smaller --kv-tokens, --max-context or "
            f"--max-seqs, or with fewer buckets (--decode, --prefill){less}"
        )
