"""Lines are spent like money: limits per file, per function and in total."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repository import PACKAGES, ROOT, files

# The cap of all lines only falls; a rise needs a line in docs/decisions.md that says what it buys.
FILE, FUNCTION, TOTAL = 400, 80, 90_828
# Lines of tests and benchmarks for a line of the packages: only falls, too; the aim is 0.9.
SHARE = 1.066
TRAINING = "training/"  # of the embedded model: outside the package, and not counted
KINDS = (".py", ".cu", ".cuh")
SOURCES = files(*(f"{package}/*{kind}" for package in (*PACKAGES, "training") for kind in KINDS))
MEASURING = files("benchmarks/*.py")  # as short
TESTS = files(*(f"tests/*{kind}" for kind in KINDS))
CUDA = files("*.cu", "*.cuh")
HEADER, WIDTH = 15, 100  # lines of the comment at the top of a CUDA file; columns, comments too
# CUDA functions that stay long, and why.
LONG = {
    "gdn_decode": "it decides the time of a step; split by phase it takes up to 4 registers more",
}
_BEGIN = re.compile(r'^( *)(?:template\b.*|extern "C".*|__global__\b.*|DEVICE\b.*)')
_NAME = re.compile(r"(\w+)\((?<!__launch_bounds__\()")
_LOG = re.compile(r"(?:benchmarks/)?(log/(?:\w+/)?\w+\.md)")


def _lines(path: Path) -> int:
    return len((ROOT / path).read_text().splitlines())


def test_a_file_fits_in_one_head() -> None:
    long = {str(path): n for path in (*SOURCES, *MEASURING) if (n := _lines(path)) > FILE}
    assert not long, f"{long} (lines; the limit is {FILE}): each is two files"


def test_a_function_fits_on_a_screen() -> None:
    long = {}
    for path in (p for p in SOURCES if p.suffix == ".py"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long |= {f"{path}: {node.name}": lines} if lines > FUNCTION else {}
    assert not long, f"{long} (lines; the limit is {FUNCTION})"


def _cuda_functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function of a file that clang-format has formatted."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin = _BEGIN.match(lines[at])
        if begin is None:
            at += 1
            continue
        end = at
        while end < len(lines) and not re.search(r"[{};]\s*(?://.*)?$", lines[end]):
            end += 1
        head = " ".join(lines[at : end + 1])
        if "(" not in head or re.search(r"\bstruct\b", head) or "{" not in lines[end]:
            at = end + 1
            continue
        first, close = at, f"{begin[1]}}}"
        if not re.search(r"\}\s*(?://.*)?$", lines[end]):
            end = next(
                i for i in range(end, len(lines)) if lines[i].split(";")[0].rstrip() == close
            )
        yield _NAME.findall(head)[0], end - first + 1
        at = end + 1


def test_the_reader_sees_cuda_functions() -> None:
    text = """
template <int N>
DEVICE void one(int a,
                int b) {
#pragma unroll
  for (;;) {
  }
}
struct S {
  DEVICE bool two() const { return true; }
  template <int N>
  DEVICE static void three() {
    four();
  }
};
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    five(const int* x) {
}
"""
    found = list(_cuda_functions(text))
    assert found == [("one", 7), ("two", 1), ("three", 4), ("five", 3)]


def test_cuda_functions_fit_on_a_screen() -> None:
    found = {(p.name, n): k for p in CUDA for n, k in _cuda_functions((ROOT / p).read_text())}
    assert len(found) > 300, "nothing was read"
    long = {name: lines for (_, name), lines in found.items() if lines > FUNCTION}
    assert long.keys() == LONG.keys(), f"{long} (lines; the limit is {FUNCTION})"


def test_a_cuda_file_says_first_what_it_is() -> None:
    """In a few lines: benchmarks/log has what was tried, and its figures."""
    for path in CUDA:
        lines = (ROOT / path).read_text().splitlines()
        header = next(i for i, line in enumerate(lines) if not line.startswith("//"))
        assert 0 < header <= HEADER, f"{path} begins with {header} lines of comment"
        wide = [i for i, line in enumerate(lines, 1) if len(line) > WIDTH]
        assert not wide, f"{path}: lines {wide} have more than {WIDTH} columns"
        logs = [log for line in lines[:header] for log in _LOG.findall(line)]
        missing = [log for log in logs if not (ROOT / "benchmarks" / log).is_file()]
        assert not missing, f"{path} names {missing}"


def _product() -> int:
    return sum(_lines(p) for p in SOURCES if not p.as_posix().startswith(TRAINING))


def test_the_whole_stays_in_budget() -> None:
    assert 0 < _product() <= TOTAL, f"{_product()} lines: take some out, or argue for more here"


def test_tests_and_benchmarks_are_a_share_of_the_packages() -> None:
    lines, product = sum(map(_lines, (*TESTS, *MEASURING))), _product()
    share = lines / product
    assert 0 < share <= SHARE, (
        f"{lines} lines are {share:.3f} of {product}: which tests repeat others?"
    )
