"""The `record` level: does every bucket still generate the tokens of its build's record?

Knows the md5 sums of the manifest (`runtime/engine/build_record.py` makes them), nothing else.
"""

from __future__ import annotations

from contextlib import closing

from spark_engine.check.compare import Verdict
from spark_engine.check.engines import folder_of, has_graph
from spark_engine.check.report import Finding, Level
from spark_engine.runtime.engine.build_record import greedy, machine
from spark_engine.runtime.engine.load import Loaded, load

NO_RECORD = "the build did not run this engine (spark-build --record does, if it can)"


def check_record(loaded: Loaded) -> Level | str:
    """A finding for each bucket of the record, or the reason why the record cannot be compared.

    On another machine a near tie may be decided differently, which is no error.
    """
    folder = folder_of(loaded)
    kept, here = folder.manifest.greedy, machine(loaded)
    if not kept.md5:
        return NO_RECORD
    if kept.machine != here:
        return f"the record was made on {kept.machine}, and this is {here}"
    level = Level("record", f"its build's, on {kept.machine}", {})
    level.launches = len(kept.md5)
    if has_graph(loaded):  # with as many threads and buckets as when it was made
        least = len(kept.md5) < len(folder.manifest.buckets)
        with closing(load(folder.path, threads=1, cache_bytes=0, least=least)) as alike:
            found = greedy(alike).md5
    else:
        found = greedy(loaded).md5
    for name, wanted in kept.md5.items():
        same = found.get(name) == wanted
        finding = Finding(name, "greedy text")
        words = "other tokens than when it was built"
        finding.add(Verdict(name, same, "" if same else words, hard=not same), found.get(name, ""))
        level.findings.append(finding)
    level.settle(lambda f: f.name, 0)
    return level
