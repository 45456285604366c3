"""The machine code of every form of every kernel, kept and compared: what did a change move?

    python -m benchmarks.cubins snapshot before.json
    python -m benchmarks.cubins compare before.json
    python -m benchmarks.cubins compare before.json --by-code

Compiled are, for both targets, the forms that tests/plugins/test_cuda_compile.py covers. Of each
kernel of a compilation a hash of its machine code and constants is kept, with its registers,
stack, spills and shared memory; names, line numbers and the order of kernels do not count. A
compilation is known by the base name of its source and its macros, so sources may move between
folders; `--by-code` asks of every kernel's code only whether it is there before and after, so
sources, macros and kernels may get other names. Needs no GPU. `--only` narrows both to sources
with the word in their path under plugins/; with `--by-code` old sources are found by their code.
"""

import hashlib
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from spark_engine.builder.native import nvrtc
from spark_engine.kernel import TARGETS, Target

Code = dict[str, object]  # of a kernel: "sass" (hash), "instructions", and its nvrtc.Usage
Snapshot = dict[str, dict[str, Code]]  # compilation -> kernel -> what it is
HEADER, SECTION = struct.Struct("<40xQ10xHHH"), struct.Struct("<IIQQQQ24x")
INSTRUCTION = 16  # bytes
CACHE = Path("/tmp/spark_cubins")


def sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the sections of a 64-bit ELF file."""
    at, size, count, names = HEADER.unpack_from(image)
    heads = [SECTION.unpack_from(image, at + i * size) for i in range(count)]
    table = heads[names][4]
    for name, kind, _, _, offset, length in heads:
        start = table + name
        content = b"" if kind == 8 else image[offset : offset + length]  # 8: no bytes in the file
        yield image[start : image.index(b"\0", start)].decode(), content


def kernels(cubin: nvrtc.Cubin) -> dict[str, Code]:
    """What the kernels of a cubin are, by symbol. Constant bank 0 is their arguments'."""
    parts = dict(sections(cubin.code))
    found: dict[str, Code] = {}
    for symbol, usage in sorted(cubin.usage.items()):
        text = parts[f".text.{symbol}"]
        constants = [
            parts[name]
            for name in sorted(parts)
            if name.startswith((".nv.constant", ".rodata"))
            and name.endswith(f".{symbol}")
            and not name.startswith(".nv.constant0")
        ]
        digest = hashlib.sha256(b"\0".join([text, *constants])).hexdigest()
        found[symbol] = {
            "sass": digest[:16],
            "instructions": len(text) // INSTRUCTION,
            **asdict(usage),
        }
    return found


def jobs(target: Target, only: str) -> tuple[nvrtc.Job, ...]:
    """The compilations that show every form of every op."""
    from tests.plugins import test_cuda_compile as covered

    pairs = [(w.tactic.source, w.plan) for op in covered.OPS for w in covered.chosen(op, target)]
    return tuple(job for job in nvrtc.jobs_of(pairs) if only in job.source)


def label(job: nvrtc.Job, target: Target) -> str:
    """The compilation's name, which does not depend on its source's folder."""
    macros = " ".join(f"-D{name}={value}" for name, value in sorted(job.defines))
    return f"{target.name} {Path(job.source).name} {macros}"


def taken(only: str, cache: Path, workers: int) -> Snapshot:
    """Compiles the sources as they are at the start, or takes what the folder `cache` has."""
    found: Snapshot = {}
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(shutil.copytree(nvrtc.SOURCES, Path(folder) / "sources"))
        for target in TARGETS.values():
            done = nvrtc.compile_all(jobs(target, only), target, cache, workers, sources)
            found |= {label(job, target): kernels(cubin) for job, cubin in done.items()}
    return found


def differences(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """A line for each kernel or compilation that is not as it was."""
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        if not old or not new:
            yield f"only {'before' if old else 'after'}: {name}"
            continue
        for symbol in sorted({*old, *new}):
            was, now = old.get(symbol, {}), new.get(symbol, {})
            keys = [k for k in {**was, **now} if k != "sass" and was.get(k) != now.get(k)]
            if was != now:
                changes = [f"{k} {was.get(k)} -> {now.get(k)}" for k in keys] or [
                    "order or operands"
                ]
                yield f"{symbol}: {', '.join(changes)} ({name})"


def by_code(before: Snapshot, after: Snapshot, whole: bool) -> Iterator[str]:
    """A line for each machine code on one side alone; if not `whole`, for new code alone."""
    sides = [
        {
            str(code["sass"]): f"{symbol} ({name})"
            for name in side
            for symbol, code in side[name].items()
        }
        for side in (before, after)
    ]
    old, new = sides
    yield from sorted(f"new code: {what}" for sass, what in new.items() if sass not in old)
    if whole:
        yield from sorted(f"lost code: {what}" for sass, what in old.items() if sass not in new)


@click.command()
@click.argument("action", type=click.Choice(["snapshot", "compare"]))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--only", default="", help="a word of the sources' names")
@click.option(
    "--by-code", "code_alone", is_flag=True, help="whatever sources and macros are called"
)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--workers", default=2, show_default=True)
def main(action: str, file: Path, only: str, code_alone: bool, cache: Path, workers: int) -> None:
    """Keeps the machine code of all kernels in FILE, or compares with what is kept there."""
    now = taken(only, cache, workers)
    count = sum(map(len, now.values()))
    if action == "snapshot":
        file.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        click.echo(f"{count} kernels of {len(now)} compilations")
        return
    before: Snapshot = json.loads(file.read_text())
    if code_alone:
        lines = list(by_code(before, now, whole=not only))
    else:
        sources = {name.split()[1] for name in now}  # base names: `only` may be a folder's
        before = {k: v for k, v in before.items() if only in k or k.split()[1] in sources}
        lines = list(differences(before, now))
    click.echo("\n".join([*lines, f"{len(lines)} of {count} kernels differ"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
