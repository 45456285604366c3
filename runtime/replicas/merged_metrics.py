"""The metrics of several servers in one text: each sample gets the label `replica`.

Knows Prometheus' text format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_ABOUT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)")
LABEL = "replica"


def merge(texts: Mapping[str, str]) -> str:
    """Merges metrics by replica. The format requires that a family's samples are consecutive."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        quoted = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        family = ""
        for line in text.splitlines():
            if found := _ABOUT.match(line):
                family = found[1]
                known = about.setdefault(family, [])
                samples.setdefault(family, [])
                if line.split(" ", 3)[1] not in {row.split(" ", 3)[1] for row in known}:
                    known.append(line)
            elif found := _SAMPLE.match(line):
                labels = f",{found[2].rstrip(',')}" if found[2] else ""
                row = f'{found[1]}{{{LABEL}="{quoted}"{labels}}} {found[3]}'
                samples.setdefault(family, []).append(row)
    lines = [line for family, rows in samples.items() for line in (*about.get(family, ()), *rows)]
    return "\n".join((*lines, ""))
