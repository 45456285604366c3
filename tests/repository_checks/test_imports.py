"""Which package may import which: the imports that are allowed, as data.

An import that is wanted and not allowed here is a question about the design, not about this file.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import PACKAGES, PATH, ROOT, files

ALLOWED = {
    "spark_engine": set(),
    "device": {"spark_engine"},
    "plugins": {"spark_engine"},
    "models": {"spark_engine", "plugins"},
    "builder": {"spark_engine", "device", "plugins", "models"},
    "runtime": {"spark_engine", "device"},
    "check": {"spark_engine", "device", "plugins", "models", "builder", "runtime"},
    "bench": {"spark_engine", "device", "runtime"},
}
# Folders of a package or of a folder, bottom up: each may use those named, and "" is the files next
# to them.
_REQUESTS = set(
    (
        "constraint draft_counts pool sizes request token_constraint_state rope_offsets sequence "
        "plan"
    ).split()
)
FOLDERS = {
    "plugins": {
        "tuning": set(),
        "launch": {"tuning"},  # a file
        "common": set(),
        "formats": {"common"},
        "state": {"common", "formats"},
        "kernels": {"launch", "common", "formats", "state", "tuning"},
        "ops": {"launch", "common", "formats", "state", "kernels"},
        "": {"launch", "common", "formats", "state", "kernels", "ops"},
    },
    "plugins/kernels": {
        "common": set(),
        "rowwise": {"common"},
        "ranks": {"common", "rowwise"},
        "gemm": {"common"},
        "delta_rule": {"common"},
        "attention": {"common"},
        "moe": {"common", "gemm", "rowwise"},
        "sampling": {"common", "ranks"},
        "drafts": {"common"},
        "vision": {"common", "gemm", "rowwise"},
        "": set(),
    },
    "plugins/kernels/delta_rule": {"": set(), "prefill": {""}},
    "plugins/kernels/gemm": {"stream_k": set(), "": {"stream_k"}},
    "plugins/kernels/moe": {"experts": set(), "router": set(), "": {"experts"}},
    "plugins/ops": {
        "norm": set(),
        "rowwise": set(),
        "ranks": {"norm"},
        "linear": set(),
        "delta_rule": set(),
        "attention": {"rowwise"},
        "moe": {"linear", "norm", "rowwise"},
        "sampling": {"rowwise"},
        "drafts": {"norm", "rowwise"},
        "vision": set(),
        "": set(),
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
        "images": set(),
        "engine": {"executors", "ranks", "images"},
        "text": {"engine"},
        "structured": {"engine", "text"},
        "server": {"engine", "ranks", "images", "text", "structured"},
        "doctor": {"engine", "executors", "ranks"},
        "replicas": {"engine", "server"},
        "offline": {"engine", "server"},
        "cli": set("executors ranks engine text structured server doctor replicas offline".split()),
        "": set(),
    },
    "runtime/engine": {  # the first nine are files: what a request and a step are
        "constraint": set(),
        "draft_counts": set(),
        "pool": set(),
        "sizes": set(),
        "request": {"constraint", "draft_counts"},
        "token_constraint_state": {"constraint"},
        "rope_offsets": set(),
        "sequence": {"request", "draft_counts", "token_constraint_state", "rope_offsets"},
        "plan": {"token_constraint_state", "sequence"},
        "policy": {"pool", "sizes", "request", "sequence", "plan"},
        "disk": {"pool", "sizes", "request", "sequence", "policy"},
        "": _REQUESTS | {"policy", "disk"},
    },
    "runtime/server": {
        "engine_client": set(),
        "operation": {"engine_client"},
        "api": set(),
        "prompts": {"engine_client", "api"},
        "service": {"engine_client", "operation", "api", "prompts"},
        "replies": {"engine_client", "operation", "api", "prompts", "service"},
        "page": {"engine_client", "operation", "api", "prompts"},
        "http": {"engine_client", "operation", "api", "prompts", "service", "replies", "page"},
        "process": {"engine_client", "operation", "prompts", "service", "page", "http"},
        "": set(),
    },
    "runtime/cli": {"options": set(), "terminal": {"options"}, "": {"options", "terminal"}},
    "check": {
        "verdicts": set(),
        "engines": {"verdicts"},
        "nodes": {"verdicts", "engines"},
        "texts": {"verdicts", "engines"},
        "": {"verdicts", "engines", "nodes", "texts"},
    },
}
# Allowed third-party packages of the lowest packages; forbidden ones of the others.
ONLY = {
    "spark_engine": {"numpy", "ml_dtypes"},
    "device": {"numpy", "tensorrt_rtx"},
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
    "onnxruntime": {"runtime/executors/ort.py", "check/nodes/operators.py"},
    "onnx": {
        "builder/executors/ort.py",
        "builder/executors/ort_memory.py",
        "builder/executors/trt.py",
        "check/engines/open_engines.py",
        "check/nodes/operators.py",
        "check/engines/reference.py",
    },
    "cuda": {"device/cuda_driver.py", "builder/native/nvrtc.py"},
    "tensorrt_rtx": {"device/trt_library.py"},
    "aiohttp": {"bench/client.py", "runtime/replicas/upstream.py"},
    "ray": {"runtime/replicas/ray_serve.py"},
    "opentelemetry": {"runtime/server/operation/telemetry.py"},
    "nccl": {"runtime/executors/nccl.py"},
    "llguidance": {"runtime/structured/matcher.py", "runtime/structured/lark.py"},
    "matplotlib": {"bench/plot.py"},
    "safetensors": {"models/checkpoint/files.py"},
    "PIL": {"runtime/images/decode.py"},
}
# The one import upwards: names that users import from `spark_engine`. Type checkers follow these
# imports; a running program makes them when it first asks for such a name.
FRONT = {"spark_engine/__init__.py": "spark_engine.runtime.offline."}
KERNELS = ("plugins", "kernels")  # where includes begin
SOURCES = files(*(f"{package}/*.py" for package in PACKAGES))


def _imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, level) of every import in the file, at any depth."""
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


def _folder(parts: tuple[str, ...], inside: str) -> str:
    """The folder or file within `inside`, of a file or a module given as the names from the package
    on; "" for what FOLDERS does not name."""
    depth = inside.count("/") + 1
    name = parts[depth].removesuffix(".py") if len(parts) > depth else ""
    return name if name in FOLDERS[inside] else ""


def _shared(here: tuple[str, ...], there: tuple[str, ...]) -> Iterator[str]:
    """The packages and folders in FOLDERS that a file and what it imports are both in."""
    for depth in range(1, len(there)):
        inside = "/".join(here[:depth])
        if here[:depth] == there[:depth] and inside in FOLDERS:
            yield inside


def _up(here: str, there: str, inside: str) -> bool:
    """Whether an import between two folders of `inside` is not allowed."""
    return here != there and there not in FOLDERS[inside][here]


def _upward(here: tuple[str, ...], there: tuple[str, ...], name: str) -> list[str]:
    """What is wrong with a file that imports or includes `name`, for each folder they share."""
    wrong = []
    for inside in _shared(here, there):
        own, other = _folder(here, inside), _folder(there, inside)
        if _up(own, other, inside):
            wrong.append(f"{inside}/{own} may not import {inside}/{other}: {name}")
    return wrong


def _wrong(path: Path) -> list[str]:
    here, text = path.parts[0], path.as_posix()
    wrong = []
    for name, level in _imports(path):
        top = name.split(".")[0]
        if level:
            wrong.append(f"relative import of {name}")
        elif name.startswith(FRONT.get(text, "no front")):
            continue
        elif top == "spark_engine":
            if (package := _package(name)) != here and package not in ALLOWED[here]:
                wrong.append(f"{here} may not import {package}: {name}")
            wrong += _upward(path.parts, tuple(name.split(".")[1:]), name)
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


def test_imports_are_allowed() -> None:
    assert {str(path): wrong for path in SOURCES if (wrong := _wrong(path))} == {}


def test_includes_are_allowed() -> None:
    for path in files("plugins/*.cu", "plugins/*.cuh"):
        included = re.findall(r'#include "([^"]+)"', (ROOT / path).read_text())
        there = [(*KERNELS, *Path(name).parts) for name in included]
        wrong = [w for to in zip(there, included, strict=True) for w in _upward(path.parts, *to)]
        assert not wrong, f"{path}: {wrong}"
        assert all(ROOT.joinpath(*parts).is_file() for parts in there), path


def test_the_front_is_lazy() -> None:
    """Type checkers and programs find its names in the same place; `import spark_engine` imports no
    other module of ours and no library."""
    (front,) = FRONT
    tree = ast.parse((ROOT / front).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imported = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    upward = [name for name, _ in _imports(Path(front)) if name.startswith(FRONT[front])]
    assert len(upward) == 2 * len(imported), "an import is not among those for type checkers"
    code = (
        "import sys, spark_engine\n"
        "mine = [n for n in sys.modules if n.startswith('spark_engine.')]\n"
        "assert not mine and 'numpy' not in sys.modules, mine\n"
        "import spark_engine.builder.cli\n"
        "assert not [n for n in sys.modules if n.startswith('spark_engine.runtime.offline')]\n"
    )
    for node in imported:
        name = node.names[0].name
        code += f"assert spark_engine.{name} is sys.modules[{node.module!r}].{name}, {name!r}\n"
    code += f"assert sorted(spark_engine.__all__) == {sorted(n.names[0].name for n in imported)}\n"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": PATH}, check=True)


def test_every_package_is_listed() -> None:
    for inside, folders in FOLDERS.items():
        within = [path for path in SOURCES if path.as_posix().startswith(f"{inside}/")]
        assert {_folder(path.parts, inside) for path in within} == set(folders), inside
    assert {path.parts[0] for path in SOURCES} == set(PACKAGES) == set(ALLOWED)


def test_every_folder_with_folders_is_listed() -> None:
    """A new model family adds a folder and no row here."""
    folders = {path.parent for path in SOURCES if len(path.parts) > 2}
    inside = {folder.parent.as_posix() for folder in folders}
    assert inside <= {*FOLDERS, "models/families"}


@pytest.mark.parametrize("inside", FOLDERS)
def test_folders_are_listed_bottom_up(inside: str) -> None:
    below: set[str] = set()
    for folder, uses in FOLDERS[inside].items():
        assert uses <= below, f"{inside}/{folder} uses {uses - below} above it"
        below.add(folder)


@pytest.mark.parametrize(
    ("path", "line", "words"),
    [
        ("plugins/x.py", "from spark_engine.models import y", "may not import models"),
        ("plugins/x.py", "import onnx", "may not import onnx"),
        (
            "plugins/ops/linear/x.py",
            "from spark_engine.plugins.ops.moe import y",
            "plugins/ops/linear may not import plugins/ops/moe",
        ),
        ("plugins/kernels/gemm/x.py", "from spark_engine.plugins.ops import y", "plugins/ops: "),
        ("plugins/formats/x.py", "from spark_engine.plugins.ops.norm import y", "plugins/ops: "),
        ("plugins/state/x.py", "import spark_engine.plugins.kernels.gemm.y", "plugins/kernels: "),
        ("runtime/text/x.py", "from spark_engine.runtime.server import y", "runtime/server"),
        ("runtime/text/x.py", "from spark_engine.runtime import cli", "runtime/cli: "),
        (
            "runtime/server/api/x.py",
            "from spark_engine.runtime.server.service import y",
            "runtime/server/api may not import runtime/server/service",
        ),
        ("runtime/server/page/x.py", "import spark_engine.runtime.server.http.y", "server/http"),
        (
            "runtime/engine/policy/x.py",
            "from spark_engine.runtime.engine.scheduler import y",
            "runtime/engine/policy may not import runtime/engine/: ",
        ),
        ("runtime/x.py", "from spark_engine import plugins", "may not import plugins"),
        ("runtime/x.py", "def f():\n    import torch", "may not import torch"),
        ("runtime/x.py", "import onnxruntime as ort", "only"),
        ("builder/x.py", "from builder.y import z", "bare import"),
        ("builder/x.py", "from .y import z", "relative import"),
        ("spark_engine/x.py", "from spark_engine.plugins import y", "may not import plugins"),
        ("spark_engine/x.py", "from spark_engine.device.gpu import y", "may not import device"),
        ("device/x.py", "from spark_engine.plugins import y", "may not import plugins"),
    ],
)
def test_a_wrong_import_is_seen(
    path: str, line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert any(words in wrong for wrong in _wrong(Path(path)))
