"""What may be in which file: operands by position, kernels of an op, instructions; class names."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.repository import PACKAGES, ROOT, files

LAUNCH = Path("plugins/launch.py")
PLANNERS = [path for path in files("plugins/*.py") if path != LAUNCH]
# Of several classes of plugins/, and of spark_engine/kernel.py: renamed when their files move.
# And the name that users of the Python API expect: theirs are fields of a request, the engine's are
# checked.
SHARED_NAMES = {"Problem", "SamplingParams", "Shape"}


def _is_index(node: ast.expr) -> bool:
    """An integer, or one with a sign."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int)


def positional(text: str) -> list[int]:
    """Lines that take an operand by its position: `specs[0]`, `specs[1:3]`, a `Pointer(...)`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == "specs":
            bounds = (node.slice,)
            if isinstance(node.slice, ast.Slice):
                bounds = (node.slice.lower, node.slice.upper)
            if any(bound is not None and _is_index(bound) for bound in bounds):
                found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Pointer":
            found.append(node.lineno)
    return sorted(found)


def test_operands_are_taken_by_name() -> None:
    for path in PLANNERS:
        lines = positional((ROOT / path).read_text())
        assert not lines, f"{path}:{lines}: ask the node by name; {LAUNCH} alone knows positions"


def test_positions_are_seen() -> None:
    text = "a = specs[0]\nb = node.specs[-1]\nc = specs[:2]\nd = Pointer('input', i)\n"
    assert positional(text + "e = specs['x']\nf = dims[0]\ng = specs[i:]\n") == [1, 2, 3, 4]
    assert positional((ROOT / LAUNCH).read_text())


OPS = files("plugins/ops/*.py")
# The last word of a kernel's file: the instruction or the mechanism that does its work.
INSTRUCTIONS = {
    "mma": "mma.sync",
    "wgmma_sm90": "warpgroup matrix instructions",
    "fp4_sm120": "block-scaled FP4 matrix instructions",
    "cluster_sm90": "mma.sync, and blocks of a cluster read each other's shared memory",
    "fma": "arithmetic of one thread",
    "copy": "loads and stores of 16 bytes",
    "atomic": "atomic operations",
    "scalar": "a thread for each row",
    "peer": "loads and stores of other ranks' memory",
}
SOURCES = files("plugins/*.cu", "plugins/*.cuh")
_NAME = re.compile(rf"[a-z][a-z0-9_]*_({'|'.join(INSTRUCTIONS)})\.cu")
_HEADER = re.compile(r'^#include "\S+_(sm\d+)\.cuh"', re.MULTILINE)


def kernel_modules(tree: ast.Module) -> set[str]:
    """The names under which a module imports planners, `<stem>_kernels`."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    aliases = (alias for node in imports for alias in node.names)
    return {alias.asname or alias.name for alias in aliases if alias.name.endswith("_kernels")}


def loose(text: str) -> set[str]:
    """What a module of ops uses of kernels outside of `serve(...)`, which binds an op to them."""
    tree = ast.parse(text)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "serve"
    ]
    bound = {id(node) for call in calls for node in ast.walk(call)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    used = {node.id for node in names if id(node) not in bound} & kernel_modules(tree)
    if not calls and "spark_engine.plugins.kernels" in text:
        used.add("spark_engine.plugins.kernels")
    return used


@pytest.mark.parametrize("path", OPS, ids=str)
def test_an_op_knows_its_kernels_where_it_is_bound_to_them(path: Path) -> None:
    assert not loose((ROOT / path).read_text()), f"{path}: give kernels to serve(...) alone"


def test_a_use_of_kernels_is_seen() -> None:
    head = "from spark_engine.plugins.kernels.gemm import a_kernels as a\n"
    assert loose(head + "OP = serve(Op(), a.CANDIDATES)\n") == set()
    assert loose(head + "OP = serve(Op(), a.CANDIDATES)\nx = a.threads()\n") == {"a"}
    assert loose("import spark_engine.plugins.kernels.gemm.b\n") == {"spark_engine.plugins.kernels"}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_kernel_is_named_after_its_instruction(path: Path) -> None:
    """A file that includes a header of one architecture unconditionally is for it too."""
    assert path.parts[:2] == ("plugins", "kernels")
    if path.suffix == ".cu":
        assert _NAME.fullmatch(path.name), f"{path}: end it in one of {', '.join(INSTRUCTIONS)}"
    text = re.sub(r"^#if.*?^#endif", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    for architecture in _HEADER.findall(text):
        assert path.stem.endswith(f"_{architecture}"), f"{path} includes what {architecture} has"


def test_every_instruction_has_a_kernel() -> None:
    found = {m[1] for path in SOURCES if (m := _NAME.fullmatch(path.name))}
    assert found == INSTRUCTIONS.keys()


def shared_names(texts: Iterable[str]) -> set[str]:
    """Names, private ones apart, of more than one class."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1 and not name.startswith("_")}


def test_no_two_classes_have_one_name() -> None:
    sources = files(*(f"{package}/*.py" for package in PACKAGES))
    found = shared_names((ROOT / path).read_text() for path in sources)
    assert found == SHARED_NAMES, "say in the class's name which of them it is"


def test_two_classes_of_one_name_are_seen() -> None:
    texts = ["class A: pass", "class A:\n  class B: pass\nclass _C: pass", "class _C: pass"]
    assert shared_names(texts) == {"A"}
