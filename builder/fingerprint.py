"""The fingerprint of a build: the sha256 of everything that its engine is made from.

Knows what a build reads (checkpoint files, options, our own sources, library versions); knows
nothing of what it writes. Equal fingerprints mean equal engines, so an unchanged build is a no-op.
"""

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import spark_engine
from spark_engine import builder, device, models, plugins
from spark_engine.builder.plan.options import RTX, Options, timed_by_default
from spark_engine.device.trt_library import library
from spark_engine.engine_file import digest_file
from spark_engine.errors import OptionError
from spark_engine.kernel import TARGETS
from spark_engine.manifest import Fingerprint, Json, canonical_json
from spark_engine.progress import Advance, ignore

LIBRARIES = ("ml_dtypes", "numpy", "onnx", "onnx-graphsurgeon", "onnxruntime", "spark-engine")
CUDA_LIBRARIES = ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc")  # they make the cubins
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
SOURCES = (".py", ".cu", ".cuh", ".json")  # lists and recorded times count too
# The packages of the project. In a wheel they are inside `spark_engine`, and are hashed separately.
APART = {"bench", "builder", "check", "device", "models", "plugins", "runtime"}


def producer(target: str) -> dict[str, str]:
    """Versions of the libraries that an engine's bytes depend on.

    For a CUDA target also the version that NVRTC reports ("nvrtc"), since it may be a library of
    the system, and those of its packages that are installed. Raises OptionError if TensorRT-RTX is
    needed and missing.
    """
    found = {name: metadata.version(name) for name in LIBRARIES}
    if target == RTX:
        # TensorRT-RTX reads only engines of the same version.
        return {**found, "tensorrt_rtx": library("this target", OptionError).__version__}
    if target not in TARGETS:
        return found
    from spark_engine.builder.native import nvrtc

    for name in CUDA_LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # NVRTC may come with a toolkit
            continue
    return {**found, "nvrtc": nvrtc.compiler_version()}


def timed_on(options: Options) -> str:
    """The machine that times tactics; empty if none are timed."""
    if options.gpu is None or options.timing is False:
        return ""
    if options.timing is None and not timed_by_default(options.gpu):
        return ""
    from spark_engine.device.gpu import present

    if present() != options.gpu:
        return ""
    from spark_engine.builder.native.gpu_timer import this_machine

    return this_machine().label


def fingerprint(checkpoint: Path, options: Options, advance: Advance = ignore) -> Fingerprint:
    """Reads every byte of the checkpoint and of its drafter, in parallel chunks. `options` has its
    target decided.

    `advance` receives the number of bytes read. If tactics are timed, the GPU and its driver count
    as tools. Raises OSError when a file of the checkpoint cannot be read.
    """
    folders = [checkpoint, *([Path(options.drafter)] if options.drafter is not None else [])]
    packages = (spark_engine, device, builder, models)
    tools = {**producer(options.target), "timed_on": timed_on(options)}
    parts = {
        "checkpoint": _hash([_files(folder, advance) for folder in folders]),
        "options": _hash(options.to_json()),
        "toolchain": _hash([tools, *(_sources(m.__file__) for m in packages)]),
        "plugins": _hash(_sources(plugins.__file__)),
    }
    return Fingerprint(**parts, all=_hash(parts))


def _files(checkpoint: Path, advance: Advance) -> Json:
    """Length and chunk digests of the checkpoint's files by name."""
    found = sorted(p for pattern in CHECKPOINT_FILES for p in checkpoint.glob(pattern))
    total, done = sum(p.stat().st_size for p in found), 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        advance(done, total)

    digests = {p.name: digest_file(p, on_bytes) for p in found}
    return {name: [d.bytes, d.chunks] for name, d in digests.items()}


@cache
def _sources(init: str | None) -> Json:
    """sha256 of each source file of a package by its path in the package, subfolders included;
    read once, since what runs is what was there first."""
    if init is None:
        return {}
    package = Path(init).parent
    paths = sorted(p.relative_to(package) for p in package.rglob("*") if p.suffix in SOURCES)
    ours = (p for p in paths if p.parts[0] not in APART)
    return {p.as_posix(): _hash_bytes((package / p).read_bytes()) for p in ours}


def _hash(value: Json) -> str:
    return _hash_bytes(canonical_json(value))


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
