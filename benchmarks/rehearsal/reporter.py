"""How a part of the rehearsal tells what it finds: a line of JSON for each thing, as it comes.

`benchmarks.rehearsal` reads them. A part that dies or hangs is started again without the labels
that were reported, the one it died of among them.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from spark_engine.errors import ExecutorError

Row = dict[str, Any]
LAUNCHES = "launches.json.xz"  # of `benchmarks.time_step --per-launch`, kept with the rows
PREFILLS = "prefill.json"  # of `benchmarks.rehearsal.prefill_floor`, too


class Reporter:
    """Standard output, or the stream, and the labels that are done: the JSON list that argv
    names."""

    def __init__(self, words: Sequence[str] | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream
        given = sys.argv[1:] if words is None else words
        self.done: set[str] = set(json.loads(Path(given[0]).read_text())) if given else set()
        self.options: Row = json.loads(given[1]) if len(given) > 1 else {}

    def head(self, **known: Any) -> None:
        """What holds for all rows."""
        self._say("head", known)

    def note(self, text: str) -> None:
        self._say("note", text)

    def row(self, label: str, **fields: Any) -> None:
        """A finding; `right` says whether it is as it should be."""
        self._say("row", {"label": label, **fields})

    def begin(self, label: str) -> None:
        self._say("begin", label)

    @contextmanager
    def trial(self, label: str) -> Iterator[None]:
        """What fails in it is a row that is not right; a lost GPU ends the process."""
        self.begin(label)
        try:
            yield
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).strip()[:400]}"
            self.row(label, right=False, note=words)
            if isinstance(error, ExecutorError):
                raise

    def _say(self, kind: str, value: Any) -> None:
        print(json.dumps({kind: value}), file=self._stream, flush=True)
