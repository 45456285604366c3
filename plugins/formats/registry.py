"""The weight formats, in the order of docs/graph.md. Knows nothing else of them."""

from collections.abc import Mapping
from types import MappingProxyType

from spark_engine.plugins.formats import dense, fp8, fp8_block, int4, nvfp4
from spark_engine.plugins.formats.format import Format

_ALL = (
    *(dense.FORMAT, fp8.STATIC, fp8_block.FORMAT, nvfp4.W4A16, nvfp4.W4A4, fp8.BY_TOKEN),
    nvfp4.W4A8,
    int4.FORMAT,
)
FORMATS: Mapping[str, Format] = MappingProxyType({form.name: form for form in _ALL})
