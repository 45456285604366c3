"""Options of other servers' command lines, and what does the same here.

Knows names of options only: foreign_options.json, which `docs/start/other_servers.md` shows too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click

# {option: what to use}, of vLLM, SGLang, llama.cpp and TensorRT-LLM
FOREIGN: Mapping[str, str] = MappingProxyType(
    json.loads(Path(__file__).resolve().with_suffix(".json").read_text(encoding="utf-8"))
)


class Explaining(click.Command):
    """A command that names its own option where it is given another server's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does; NoSuchOption for another server's option names ours."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            words = error.message + _explain(error.option_name)
            raise click.NoSuchOption(error.option_name, words, error.possibilities, ctx) from None


def _explain(option: str) -> str:
    """A sentence about what does the same here as `option` elsewhere; empty if it is unknown."""
    words = FOREIGN.get(option.partition("=")[0].replace("_", "-"), "")
    return f" Here: {words}." if words else ""
