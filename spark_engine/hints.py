"""Hints for errors about a wrong path, name or machine: what it looks like, and what to give.

Knows how checkpoints, engines, hub names, Git LFS pointers, NVIDIA's driver and the environment's
installer look from outside, and other servers' options (foreign_options.json, which
`docs/start/other_servers.md` shows too); opens none of them.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from shutil import which
from types import MappingProxyType

# {option: what to use}, of vLLM, SGLang, llama.cpp and TensorRT-LLM
FOREIGN: Mapping[str, str] = MappingProxyType(
    json.loads(Path(__file__).resolve().with_name("foreign_options.json").read_text("utf-8"))
)


def extra(*names: str) -> str:
    """The command that installs what extras of the package have, into the environment that this
    program runs in: a bare `pip` may be another's, or none (uv makes environments without it).

    It names the packages: the project's own name is not on the index, where a stranger may take it.
    """
    python, what = quote(sys.executable or "python3"), " ".join(map(quote, _packages(*names)))
    if find_spec("pip") is not None:
        return f"{python} -m pip install {what}"
    if which("uv") is None and find_spec("ensurepip") is not None:
        return f"{python} -m ensurepip && {python} -m pip install {what}"
    return f"uv pip install --python {python} {what}"


def _packages(*names: str) -> list[str]:
    """The requirements of extras by the installed metadata, each once."""
    try:
        listed = metadata.requires("spark-engine") or []
    except metadata.PackageNotFoundError:
        listed = []
    found: dict[str, None] = {}
    for line in listed:
        requirement, _, condition = line.partition(";")
        if any(re.search(rf"extra == .{name}.$", condition.strip()) for name in names):
            own = re.fullmatch(r"spark-engine\[(.*)\]", requirement.strip())
            found |= dict.fromkeys(_packages(own[1]) if own else [requirement.strip()])
    return list(found) or [f".[{','.join(names)}]"]  # sources that are not installed


WSL = Path("/usr/lib/wsl/lib/libcuda.so.1")
DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), WSL)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OLLAMA = re.compile(r"qwen(\d+(?:\.\d+)?)(?::([\w.-]+))?", re.IGNORECASE)
_SIZE = re.compile(r"\d+(?:\.\d+)?b(?:-a\d+b)?", re.IGNORECASE)
INSTEAD = (
    "take the model's safetensors in NVFP4, FP8, int4 or bf16: nvidia/Qwen3.6-27B-NVFP4, "
    "nvidia/Qwen3.6-35B-A3B-NVFP4, or as docs/models.md lists"
)
# Weights in files of other programs, by suffix.
_FILES = {
    ".gguf": "GGUF (llama.cpp)",
    ".bin": "a PyTorch pickle (.bin)",
    ".pt": "a PyTorch pickle (.pt)",
    ".pth": "a PyTorch pickle (.pth)",
    ".npz": "MLX (.npz)",
    ".onnx": "ONNX",
}
_POINTER = b"version https://git-lfs"


def no_checkpoint(path: Path) -> str:
    if words := other_format(path):
        return words
    if path.exists():
        return f"{path} is not a folder; give the folder that holds config.json"
    if meant := _meant(path):
        return f"there is no folder {path}; did you mean `spark-build {meant}`?"
    return f"there is no folder {path}; {hub(path) or 'give the folder that holds config.json'}"


def no_engine(path: Path) -> str:
    if (path / "config.json").is_file():
        name = path.resolve().name
        return (
            f"{path} is a checkpoint, not an engine: build it with `spark-build {path} -o "
            f"engines/{name}`, then name engines/{name}"
        )
    if path.is_dir():
        return (
            f"{path} is not an engine folder, it has no manifest.json: name one that "
            "`spark-build CHECKPOINT -o FOLDER` wrote"
        )
    if path.exists():
        return (
            other_format(path)
            or f"{path} is a file: name an engine folder, which spark-build writes"
        )
    if str(path) == "serve":  # as other servers' commands have it
        return "there is no engine folder serve; did you mean `spark-run ENGINE --serve`?"
    if meant := near(str(path), ("doctor",)):
        return f"there is no engine folder {path}{meant}"
    if meant := _meant(path):
        build = f"build it with `spark-build {meant}`"
        return f"there is no engine folder {path}; did you mean {meant}? If so, {build} first"
    return f"there is no engine folder {path}; " + (
        f"if this names a model on Hugging Face, build it first: spark-build {path} -o "
        f"engines/{path.name}, then name engines/{path.name}"
        if hub(path)
        else f"build it with `spark-build CHECKPOINT -o {path}`"
    )


def hub(path: Path) -> str | None:
    """How to fetch what may be a name on Hugging Face's hub; None for what cannot be one."""
    here = path.parent.exists() or path.parts[0] == "engines"  # the folder of the pages' commands
    if here or not _HUB_NAME.fullmatch(str(path)):
        return None
    return (
        f"if this names a model on Hugging Face, fetch it first: hf download {path} "
        f"--local-dir {path.name}, then spark-build {path.name}"
    )


def other_format(path: Path) -> str:
    """The format of a file of weights, or of a folder that holds no other, and what to take in its
    place; empty for other paths."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(file.suffix == ".safetensors" for file in files):
        return ""
    kinds = [file for suffix in _FILES for file in files if file.suffix.lower() == suffix]
    return (
        f"{_FILES[kinds[0].suffix.lower()]} is not read: {kinds[0].name}; {INSTEAD}"
        if kinds
        else ""
    )


def _meant(path: Path) -> str:
    """The name on the hub of what Ollama calls qwen3.6:27b; empty for other names."""
    found = _OLLAMA.fullmatch(str(path))
    if found is None:
        return ""
    size = _SIZE.match(found[2] or "")  # `latest` and the like name none
    return f"Qwen/Qwen{found[1]}-{size[0].upper() if size else '27B'}"


def is_lfs_pointer(start: bytes) -> bool:
    """True if a file that starts so is what Git LFS leaves where the content was not fetched."""
    return start.startswith(_POINTER)


def near(name: str, known: Sequence[str]) -> str:
    """`; did you mean sm_90a?`, or nothing."""
    found = get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def cuda_missing() -> str:
    """Why the extra `cuda` cannot be used; empty where it can. Other packages use the name `cuda`
    too (cuda-pathfinder, say), so only an import of what we call shows it."""
    try:
        import_module("cuda.bindings.driver")
    except ImportError as error:
        return str(error)
    return ""


def driver_present() -> bool:
    """True if NVIDIA's driver is loaded on this machine, found without any of its libraries."""
    return any(path.exists() for path in DRIVER)


def explain(option: str) -> str:
    """A sentence about what does the same here as `option` elsewhere; empty if it is unknown."""
    words = FOREIGN.get(option.partition("=")[0].replace("_", "-"), "")
    return f" Here: {words}." if words else ""
