"""Which package may import which: the imports that are allowed, as data.

An import that is wanted and not allowed here is a question about the design, not about this file.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.repository import PACKAGES, ROOT, files

ALLOWED = {
    "spark_engine": set(),
    "plugins": {"spark_engine"},
    "models": {"spark_engine", "plugins"},
    "builder": {"spark_engine", "plugins", "models"},
    "runtime": {"spark_engine"},
    "check": {"spark_engine", "plugins", "models", "builder", "runtime"},
    "bench": {"spark_engine", "runtime"},
}
# Folders of a package, bottom up: each may use those named, and "" is the package's own files.
_OPS = {"common", "linear", "rowwise", "gdn", "attention", "moe", "sampling", "drafts", "ranks"}
FOLDERS = {
    "plugins": {
        "launch": set(),  # a file
        "common": {"launch"},
        "linear": {"launch", "common"},
        "rowwise": {"launch", "common"},
        "gdn": {"launch", "common"},
        "attention": {"launch", "common", "rowwise"},
        "moe": {"launch", "common", "linear", "rowwise"},
        "sampling": {"launch", "common", "rowwise", "ranks"},
        "drafts": {"launch", "common"},
        "ranks": {"launch", "common", "rowwise"},
        "": _OPS,
    },
    "models": {
        "config": set(),
        "checkpoint": {"config"},
        "weights": {"config", "checkpoint"},
        "graph": {"config", "checkpoint", "weights"},
        "families": {"config", "checkpoint", "weights", "graph"},
        "": {"config", "checkpoint", "weights", "families", "graph"},
    },
    "builder": {
        "plan": set(),
        "graph": {"plan"},
        "rules": {"graph"},
        "executors": {"plan", "graph"},
        "native": {"plan", "graph", "executors"},
        "": {"plan", "graph", "rules", "executors", "native"},
    },
    "runtime": {
        "executors": set(),
        "ranks": {"executors"},
        "engine": {"executors", "ranks"},
        "text": {"engine"},
        "structured": {"engine", "text"},
        "server": {"engine", "ranks", "text", "structured"},
        "doctor": {"engine", "executors", "ranks"},
        "replicas": {"engine", "server"},
        "": {"engine", "executors", "ranks", "server", "text", "structured", "doctor", "replicas"},
    },
}
# Packages at the bottom say what they may use; the others what they must not.
ONLY = {
    "spark_engine": {"numpy", "ml_dtypes"},
    "plugins": {"numpy", "ml_dtypes"},
}
NEVER = {
    "models": {"torch", "transformers", "onnxruntime", "polygraphy", "cuda", "tensorrt"},
    "builder": {"torch", "transformers", "polygraphy"},
    "runtime": {"torch", "transformers", "onnx", "onnx_graphsurgeon", "polygraphy"},
    "check": {"torch", "transformers"},
    "bench": {"torch", "transformers", "onnx", "onnx_graphsurgeon", "polygraphy"},
}
# Heavy libraries live in one file each, so that the rest imports without them.
ONE_FILE = {
    "onnxruntime": {"runtime/executors/ort.py", "check/operators.py"},
    "onnx": {
        "builder/executors/ort.py",
        "builder/executors/trt.py",
        "check/mark.py",
        "check/operators.py",
        "check/reference.py",
    },
    "cuda": {
        "spark_engine/cuda_driver.py",
        "builder/native/nvrtc.py",
    },
    "tensorrt_rtx": {"builder/executors/trt.py", "runtime/executors/trt.py"},
    "aiohttp": {"bench/client.py", "runtime/replicas/upstream.py"},
    "ray": {"runtime/replicas/ray_serve.py"},
    "opentelemetry": {"runtime/server/telemetry.py"},
    "nccl": {"runtime/executors/nccl.py"},
    "llguidance": {"runtime/structured/matcher.py", "runtime/structured/lark.py"},
    "matplotlib": {"bench/plot.py"},
}
SOURCES = files(*(f"{package}/*.py" for package in PACKAGES))


def _imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, level) of every import in the file, wherever it stands."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found.append((module, node.level))
            found += [(f"{module}.{alias.name}", node.level) for alias in node.names]
    return found


def _package(name: str) -> str:
    """The package that a name under `spark_engine` belongs to."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in PACKAGES else "spark_engine"


def _folder(parts: tuple[str, ...]) -> str:
    """The folder of a file or a module, given as the names from the package on; of a file that
    `FOLDERS` has, its stem."""
    second = parts[1].removesuffix(".py") if len(parts) > 1 else ""
    return second if second in FOLDERS.get(parts[0], ()) else ""


def _up(here: str, there: str, package: str) -> bool:
    """Whether an import between two folders of a package is not allowed."""
    return here != there and there not in FOLDERS[package][here]


def _wrong(path: Path) -> list[str]:
    here, text = path.parts[0], path.as_posix()
    wrong = []
    for name, level in _imports(path):
        top = name.split(".")[0]
        if level:
            wrong.append(f"relative import of {name}")
        elif top == "spark_engine":
            if (package := _package(name)) != here and package not in ALLOWED[here]:
                wrong.append(f"{here} may not import {package}: {name}")
            elif package == here and here in FOLDERS and len(name.split(".")) > 2:
                folders = _folder(path.parts), _folder(tuple(name.split(".")[1:]))
                if _up(*folders, here):
                    wrong.append(f"{here}/{folders[0]} may not import {here}/{folders[1]}: {name}")
        elif top in PACKAGES or top == "tests":
            wrong.append(f"bare import of {name}: say spark_engine.{name}")
        elif top not in sys.stdlib_module_names:
            wrong += _foreign(here, text, top)
    return wrong


def _foreign(here: str, path: str, top: str) -> list[str]:
    if here in ONLY and path not in ONE_FILE.get(top, ()) and top not in ONLY[here]:
        return [f"{here} may not import {top}"]
    if top in NEVER.get(here, ()):
        return [f"{here} may not import {top}"]
    if top in ONE_FILE and path not in ONE_FILE[top]:
        return [f"{top} may be imported by {sorted(ONE_FILE[top])} only"]
    return []


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_are_allowed(path: Path) -> None:
    assert _wrong(path) == []


@pytest.mark.parametrize("path", files("plugins/*.cu", "plugins/*.cuh"), ids=str)
def test_includes_are_allowed(path: Path) -> None:
    included = re.findall(r'#include "([^"]+)"', (ROOT / path).read_text())
    there = {_folder(("plugins", *Path(name).parts)) for name in included}
    up = {folder for folder in there if _up(_folder(path.parts), folder, "plugins")}
    assert not up and "" not in there, f"{path} may not include what is in {up or 'no folder'}"


def test_every_package_is_listed() -> None:
    for package, folders in FOLDERS.items():
        found = {_folder(path.parts) for path in SOURCES if path.parts[0] == package}
        assert found == set(folders), package
    assert {path.parts[0] for path in SOURCES} == set(PACKAGES) == set(ALLOWED)


@pytest.mark.parametrize(
    ("path", "line", "words"),
    [
        ("plugins/x.py", "from spark_engine.models import y", "may not import models"),
        ("plugins/x.py", "import onnx", "may not import onnx"),
        (
            "plugins/gdn/x.py",
            "from spark_engine.plugins.moe import y",
            "may not import plugins/moe",
        ),
        ("runtime/text/x.py", "from spark_engine.runtime.server import y", "runtime/server"),
        ("runtime/text/x.py", "from spark_engine.runtime import cli", "runtime/: "),
        ("runtime/x.py", "from spark_engine import plugins", "may not import plugins"),
        ("runtime/x.py", "def f():\n    import torch", "may not import torch"),
        ("runtime/x.py", "import onnxruntime as ort", "only"),
        ("builder/x.py", "from builder.y import z", "bare import"),
        ("builder/x.py", "from .y import z", "relative import"),
        ("spark_engine/x.py", "from spark_engine.plugins import y", "may not import plugins"),
    ],
)
def test_a_wrong_import_is_seen(
    path: str, line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert any(words in wrong for wrong in _wrong(Path(path)))
