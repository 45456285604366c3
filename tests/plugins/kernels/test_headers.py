"""What the CUDA sources share is written once. Compiles nothing."""

import re
from collections import defaultdict

from spark_engine.builder.native.cuda_sources import SOURCES, sources
from tests.repository import ROOT, files

_TEXT = r'\s*"(?:[^"\\]|\\.)*"'
_ASM = re.compile(rf"\basm\s*(?:volatile)?\s*\(((?:{_TEXT})+)")
_SPACE = re.compile(r'[\s"]|\\n')


def instructions(source: str) -> set[str]:
    """The PTX of every asm statement, without white space; those of no instruction are left out."""
    return {_SPACE.sub("", text) for text in _ASM.findall(source)} - {""}


def test_the_reader_sees_statements_over_lines() -> None:
    source = 'asm volatile("a.b %0,"\n  " %1;\\n" : "=r"(x)); asm("" ::: "memory"); asm("c;");'
    assert instructions(source) == {"a.b%0,%1;", "c;"}


def test_no_instruction_is_wrapped_in_two_files() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in files("plugins/*.cu", "plugins/*.cuh"):
        for text in instructions((ROOT / path).read_text()):
            found[text].add(path.name)
    assert len(found) > 40, "nothing was read"
    twice = {text: sorted(names) for text, names in found.items() if len(names) > 1}
    assert not twice, "put it into ptx.cuh (or numeric.cuh) and include that"


def test_kernels_declare_their_dynamic_shared_memory() -> None:
    made = {p.relative_to(SOURCES).as_posix() for p in SOURCES.rglob("*.cu")}
    texts = {name: "".join(sources(name).values()) for name in made}
    using = {name for name, text in texts.items() if "extern __shared__" in text}
    declaring = {name for name, text in texts.items() if re.search(r"^DYNAMIC_SHARED", text, re.M)}
    assert len(using) > 15 and using == declaring
