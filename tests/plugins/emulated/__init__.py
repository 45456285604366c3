"""Kernels run on the host, thread by thread; ptx.cuh has their instructions as the manual says.

Slow: for a few tokens of small layers. Needs g++; knows the contract of a launch and of an op.
"""

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spark_engine.kernel import Attrs, Launch, Plan, Pointer, Rank, Tactic, Target
from spark_engine.op import Op
from spark_engine.tensors import Array, TensorSpec
from tests.plugins.packed_node import packed_arrays, packed_specs, specs_of
from tests.repository import ROOT

HERE, SOURCES = Path(__file__).parent, ROOT / "plugins/kernels"
COMPILER = shutil.which("g++")
OPTIONS = "-std=c++17 -O1 -w -fPIC -ffp-contract=off -fno-gnu-unique -fno-exceptions".split()
# What every source includes, first and before its macros, so that it is read once; what is linked
# to all; and a source behind them.
HOST, BODIES, WHOLE = "host.hpp", "bodies.cpp", "whole.cpp"
GUARD = 256  # bytes before and after each buffer
ALIGNMENT = 256
INLINE = (  # sources with instructions among other functions
    "common/numeric.cuh", "attention/attention_kv_pages.cuh", "attention/attention_warp_team.cuh",
    "delta_rule/delta_decode_fma.cu",
)  # fmt: skip
# A function that is an instruction: ptx.cuh of this folder has it.
_INSTRUCTION = re.compile(r"^DEVICE \w+ \w+\([^)]*\) \{\n(?:  .*\n)*?  asm(?:.*\n)*?\}\n", re.M)
_DYNAMIC = re.compile(r"extern __shared__ \S+ (?:u8|char) (\w+)\[\];")
# What copies and barriers know by its address: behind what a block may have.
_STATIC = re.compile(r"__shared__ (?:__align__\(8\) )?(u64|Shared) (\w+)((?:\[[^;]+\])*);")
U8 = NDArray[np.uint8]


Texts = dict[str, str]


@functools.cache
def _texts() -> tuple[Texts, Texts]:
    """By path, as the host's compiler takes them: instructions, and the sources that use them."""
    host = {f"common/{path.name}": path.read_text() for path in HERE.glob("*.cuh")}
    host["ranks/peer_ptx.cuh"] = host.pop("common/peer_ptx.cuh")
    host["common/wgmma16_sm90.cuh"] = '#include "common/wgmma_sm90.cuh"\n'
    host["common/fp4_mma_sm120.cuh"] = '#include "common/ptx.cuh"\n'
    host[HOST] = '#include "common/ptx.cuh"\n#include "common/wgmma_sm90.cuh"\n'
    host[BODIES] = '#include "common/bodies.cuh"\n#include "common/launches.cuh"\n'
    found = {p.relative_to(SOURCES).as_posix(): p.read_text() for p in SOURCES.rglob("*.cu*")}
    for path in INLINE:
        found[path] = _INSTRUCTION.sub("", found[path])
    dynamic = r"u8* const \1 = dynamic;"
    places = {"u64": 240, "Shared": 244}  # KiB

    def static(match: re.Match[str]) -> str:
        kind, name, dims = match.groups()
        return f"auto& {name} = *({kind}(*){dims})(dynamic + ({places[kind]} << 10));"

    return host, {
        p: _STATIC.sub(static, _DYNAMIC.sub(dynamic, t)) for p, t in found.items() if p not in host
    }


@functools.cache
def _digests() -> tuple[str, str]:
    said = (repr((OPTIONS, sorted(texts.items()))) for texts in _texts())
    host, sources = (hashlib.sha256(text.encode()).hexdigest()[:32] for text in said)
    return host, sources


def _write(folder: Path, texts: Texts) -> None:
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _compile(folders: Sequence[Path], *arguments: object) -> None:
    command = [str(COMPILER), *OPTIONS, *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, *map(str, arguments)], check=True)


def _precompiled(cache: Path) -> Path:
    """A folder with what all sources include and what is linked to all; kept in `cache`."""
    made = cache / f"{_digests()[0]}.host"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache) as name:
            fresh = Path(name) / "host"
            _write(fresh, _texts()[0])
            _compile([fresh], "-x", "c++-header", fresh / HOST, "-o", fresh / f"{HOST}.gch")
            _compile([fresh], "-c", fresh / BODIES, "-o", fresh / f"{BODIES}.o")
            with contextlib.suppress(OSError):  # another process was faster
                fresh.rename(made)
    return made


def library(source: str, defines: Sequence[tuple[str, str]], cache: Path) -> ctypes.CDLL:
    """A source with its macros, compiled for the host; kept in the folder `cache`."""
    said = repr((source, tuple(defines), _digests()))
    made = cache / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.so"
    if not made.exists():
        macros = {"FOLLOWED": "0", **dict(defines)}
        lines = [f'#include "{HOST}"', *(f"#define {n} {value}" for n, value in macros.items())]
        lines += ["const bool is_followed = followed = FOLLOWED;", f'#include "{source}"', ""]
        with tempfile.TemporaryDirectory(dir=cache) as name:
            folder = Path(name)
            _write(folder, {**_texts()[1], WHOLE: "\n".join(lines)})
            host, fresh = _precompiled(cache), folder / "fresh.so"
            whole = folder / WHOLE, host / f"{BODIES}.o"
            _compile([host, folder], "-shared", *whole, "-o", fresh)
            fresh.rename(made)
    return ctypes.CDLL(str(made))


class RankLibraries:
    """Of each rank a copy of a library: what a block shares must not be shared with another's."""

    def __init__(self, cache: Path) -> None:
        # its own folder: a loaded library must not be overwritten
        self._cache, self._folder = cache, tempfile.TemporaryDirectory()
        self._loaded: dict[tuple[str, int], ctypes.CDLL] = {}

    def of(self, launch: Launch, tactic: Tactic, rank: int) -> ctypes.CDLL:
        made = library(launch.source or tactic.source, launch.defines, self._cache)
        key = (str(made._name), rank)
        if key not in self._loaded:
            own = Path(self._folder.name) / f"{Path(key[0]).stem}.{rank}.so"
            shutil.copy(key[0], own)
            self._loaded[key] = ctypes.CDLL(str(own))
        return self._loaded[key]


class Buffer:
    """Memory of the host between guards; 0xFF unless it is given what it holds."""

    def __init__(self, nbytes: int, content: NDArray[np.generic] | None = None) -> None:
        self._whole = np.full(nbytes + 2 * GUARD + ALIGNMENT, 0xA5, np.uint8)
        start = GUARD + -(self._whole.ctypes.data + GUARD) % ALIGNMENT
        self.bytes: U8 = self._whole[start : start + nbytes]
        self.bytes[:] = 0xFF if content is None else content.reshape(-1).view(np.uint8)
        self._around = np.delete(np.arange(len(self._whole)), slice(start, start + nbytes))

    def check(self) -> None:
        """Fails where something outside the bytes was written."""
        assert (self._whole[self._around] == 0xA5).all(), "a write outside a buffer's bytes"


def results(
    op: Op,
    tactic: str,
    attrs: Attrs,
    arrays: Sequence[Array],
    target: Target,
    cache: Path,
    late: bool = True,
    macros: tuple[tuple[str, str], ...] = (),
    forced: bool = False,
) -> list[Array]:
    """What a tactic ("": the only one) gives for operands as the op has them. `late`: as in `run`;
    `macros`: more than the plan has; `forced`: also if the tactic refuses the node."""
    given = specs_of(op, attrs, arrays)
    packed = packed_specs(op, attrs, given)
    (chosen,) = (t for t in op.cuda.tactics if tactic in ("", t.name))
    assert forced or chosen.refuse(attrs, packed, target) is None
    plan = chosen.plan(attrs, packed, target)
    launches = tuple(replace(n, defines=(*n.defines, *macros)) for n in plan.launches)
    own, outs = packed_arrays(op, attrs, arrays), op.infer(attrs, given)
    plan = replace(plan, launches=launches)
    return run(plan, chosen.source, own, outs, cache, late, op.aliases(attrs))


def run(
    plan: Plan,
    source: str,
    inputs: Sequence[NDArray[np.generic]],
    outputs: Sequence[TensorSpec],
    cache: Path,
    late: bool,
    aliases: Mapping[int, int] | None = None,
) -> list[NDArray[np.generic]]:
    """The outputs of a plan over packed inputs. `late`: copies arrive when they are waited for;
    `aliases`: outputs that are inputs, changed in place."""
    given = [Buffer(a.nbytes, np.ascontiguousarray(a)) for a in inputs]
    same = {} if aliases is None else aliases
    places = {
        "input": given,
        "output": [
            given[same[i]] if i in same else Buffer(s.nbytes) for i, s in enumerate(outputs)
        ],
        "scratch": [
            Buffer(s.nbytes, np.zeros(s.nbytes, np.uint8) if s.zeroed else None)
            for s in plan.scratch
        ],
    }
    for launch in plan.launches:
        _run(launch, source, places, cache, late)
    for buffer in (b for some in places.values() for b in some):
        buffer.check()
    for buffer, scratch in zip(places["scratch"], plan.scratch, strict=True):
        assert not (scratch.zeroed and buffer.bytes.any()), "scratch is not left zero"
    held = zip(outputs, places["output"], strict=True)
    return [b.bytes.view(s.dtype.numpy).reshape(s.dims) for s, b in held]


def _run(
    launch: Launch, source: str, places: Mapping[str, list[Buffer]], cache: Path, late: bool
) -> None:
    kernels = library(launch.source or source, launch.defines, cache)
    call(kernels, launch, addresses(places), late, together=launch.resident)


def addresses(places: Mapping[str, list[Buffer]]) -> dict[str, list[int]]:
    return {kind: [b.bytes.ctypes.data for b in some] for kind, some in places.items()}


def call(
    kernels: ctypes.CDLL,
    launch: Launch,
    places: Mapping[str, list[int]],
    late: bool,
    rank: int = 0,
    seed: int = 1,
    together: bool = False,
) -> None:
    """Runs a launch over addresses by the kinds of pointers.

    `together`: blocks wait for one another, so all run side by side; those of ranks wait for other
    ranks.
    """
    values = [
        places[a.kind][a.index]
        if isinstance(a, Pointer)
        else rank
        if isinstance(a, Rank)
        else int(a.value)
        for a in launch.args
    ]
    args = (ctypes.c_uint64 * len(values))(*values)
    symbol = ctypes.cast(getattr(kernels, launch.symbol), ctypes.c_void_p)
    (x, y, z), threads, size = launch.grid, launch.block[0], launch.cluster[0]
    size = x if together else size
    kernels.launch(symbol, x, threads, len(values), args, int(late), seed, y, z, size)
