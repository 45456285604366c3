"""Which GPU of a host a command uses: `--device N`, counted as nvidia-smi counts.

Knows CUDA's environment variables; the calling command passes its environment. The choice also
holds for processes that the command starts. Call it before the driver is initialised.
"""

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from spark_engine.errors import OptionError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
HELP = "The GPU to use, as nvidia-smi numbers them (within CUDA_VISIBLE_DEVICES); 0 by default."
_NODES = Path("/dev")


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """The names of the GPUs that CUDA may see, in CUDA's order; None: all are visible."""
    given = environ.get(VISIBLE)
    return None if given is None else [word for word in given.replace(" ", "").split(",") if word]


def choose(
    environ: MutableMapping[str, str], number: int | None, nodes: Path = _NODES
) -> str | None:
    """Makes only GPU `number` visible to CUDA; returns its name for nvidia-smi.

    None changes nothing, and returns the first visible GPU, or None if the environment names
    none. `nodes` is the folder of the device nodes. Raises OptionError if there is no such GPU.
    """
    seen = visible(environ)
    if number is None:
        return seen[0] if seen else None
    if seen is not None:
        if number >= len(seen):
            words = f"{VISIBLE} is {environ[VISIBLE]!r}" if seen else f"{VISIBLE} is empty"
            raise OptionError(f"--device is {number}; {words}: {_below(len(seen))}")
        found = seen[number]
    else:
        count = sum(bool(re.fullmatch(r"nvidia\d+", node.name)) for node in nodes.iterdir())
        if 0 < count <= number:  # without device nodes the driver reports the error
            words = "this host has one GPU" if count == 1 else f"this host has {count} GPUs"
            raise OptionError(f"--device is {number}; {words}: {_below(count)}")
        found = str(number)
        environ[ORDER] = "PCI_BUS_ID"
    environ[VISIBLE] = found
    return found


def _below(count: int) -> str:
    if not count:
        return "name GPUs in it, or leave it unset"
    return "give 0, or leave it out" if count == 1 else f"give 0 to {count - 1}"
