"""How a part of the rehearsal tells what it finds: a line of JSON for each thing, as it comes.

`benchmarks.rehearsal` reads them. A part that dies or hangs is started again without the labels
that were reported, the one it died of among them. What an earlier call kept counts as done only
where it was measured of the sources that are here now: each row carries a digest of them
(`source_digest`).
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from spark_engine.errors import ExecutorError

Row = dict[str, Any]
Digests = str | Mapping[str, str] | Callable[[str], str]  # of all rows, or by label
LAUNCHES = "launches.json.xz"  # of `benchmarks.time_step --per-launch`, kept with the rows
PREFILLS = "prefill.json"  # of `benchmarks.rehearsal.prefill_floor`, too


class Reporter:
    """Standard output, or the stream, and the labels that are done: the keys of the JSON object
    that argv names. Its values are digests, or null for what this call reported without one."""

    def __init__(self, words: Sequence[str] | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream
        given = sys.argv[1:] if words is None else words
        self._kept: dict[str, str | None] = json.loads(Path(given[0]).read_text()) if given else {}
        self._digest: Digests = ""
        self.done = set(self._kept)
        self.options: Row = json.loads(given[1]) if len(given) > 1 else {}

    def hold(self, digest: Digests) -> None:
        """The digest of what is measured now, of all rows or by label ("" of one that is measured
        no more): kept rows of another are not done, and rows reported from here on carry theirs."""
        self._digest = digest
        stale = [k for k, kept in self._kept.items() if kept is not None and kept != self._of(k)]
        self.done -= {*stale}
        if stale:
            self._say("stale", stale)

    def _of(self, label: str) -> str:
        if isinstance(self._digest, str):
            return self._digest
        return self._digest(label) if callable(self._digest) else self._digest.get(label, "")

    def head(self, **known: Any) -> None:
        """What holds for all rows."""
        self._say("head", known)

    def note(self, text: str) -> None:
        """A sentence for the parent process."""
        self._say("note", text)

    def row(self, label: str, **fields: Any) -> None:
        """A finding; `right` says whether it is as it should be."""
        own = self._of(label)
        self._say("row", {"label": label, **fields} | ({"digest": own} if own else {}))

    def begin(self, label: str) -> None:
        """What a death would be of."""
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
