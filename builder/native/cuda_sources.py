"""Finds a kernel's CUDA sources, the headers that they include, and its log of variants.

Knows the form of the project's sources (a header comment, `extern "C"` entries). Needs no compiler,
so that `spark-inspect` works on any machine.
"""

import re
from pathlib import Path

from spark_engine import plugins
from spark_engine.errors import InternalError

SOURCES = Path(next(iter(plugins.__path__))) / "kernels"
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_LOG = re.compile(r"\b(log/(?:\w+/)?\w+\.md)")
_ENTRY = r'^extern "C" __global__[^;{]*?\b%s\('


def sources(name: str, folder: Path = SOURCES) -> dict[str, str]:
    """The texts of a source and of all headers that it includes, by name; the source comes
    first."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found[current] = (folder / current).read_text()
            waiting += _INCLUDE.findall(found[current])
    return found


def entry(symbol: str, source: str, folder: Path = SOURCES) -> tuple[Path, int]:
    """The file and line of a kernel in `source` or one of its headers.

    Raises InternalError when there is none.
    """
    form = re.compile(_ENTRY % re.escape(symbol), re.MULTILINE)
    for name, text in sources(source, folder).items():
        match = form.search(text)
        if match:
            return folder / name, text.count("\n", 0, match.start()) + 1
    raise InternalError(f"{source} and its headers have no kernel {symbol}")


def logs(source: str, folder: Path = SOURCES) -> tuple[str, ...]:
    """The logs of measured variants that the header comments of a source and of its headers name,
    as paths from the repository's root."""
    tops = (_top(text) for text in sources(source, folder).values())
    return tuple(dict.fromkeys(f"benchmarks/{log}" for top in tops for log in _LOG.findall(top)))


def _top(text: str) -> str:
    """The comment at the top of a file, its lines joined."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return " ".join(line.removeprefix("//").strip() for line in lines[:end])
