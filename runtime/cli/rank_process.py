"""A rank's process: opens its part of the engine and follows rank 0, until rank 0 releases it.

    python -m spark_engine.runtime.cli.rank_process SPEC        SPEC as JSON

Knows the engine's executors and rank 0's messages; knows no request. It ends with rank 0, however
that ends: its socket closes, and on one host the system ends it as well.
"""

import contextlib
import ctypes
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from spark_engine.device.choice import VISIBLE, visible
from spark_engine.engine_file import MANIFEST
from spark_engine.errors import CapacityError, EngineError, SparkError, UserError
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.ranks import messages
from spark_engine.runtime.ranks.channel import Receiver
from spark_engine.runtime.ranks.follower import Follower
from spark_engine.runtime.ranks.open_progress import ReportedProgress
from spark_engine.runtime.ranks.spawn import RankChannels, RankSpec, connect_rank, manifest_digest

PR_SET_PDEATHSIG = 1
BEAT_S = 1.0  # interval of its messages that it runs
GRACE_S = 2.0  # for a step that cannot end, after rank 0 has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rank; its exit code is 0 if rank 0 released it."""
    (given,) = sys.argv[1:] if arguments is None else arguments
    spec = msgspec.json.decode(given, type=RankSpec)
    _end_with(spec.parent)
    if spec.beat >= 0:
        threading.Thread(target=_beat, args=(spec.beat,), daemon=True).start()
    if not spec.hosts:
        _show_own_first(os.environ, spec.rank, spec.ranks)
    try:
        channels = connect_rank(spec)
    except SparkError as error:
        print(f"rank {spec.rank}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    receiver = Receiver(spec.rank, channels.control, channels.ring)
    threading.Thread(target=_leave_with_rank_0, args=(receiver,), daemon=True).start()
    loaded: Loaded | None = None
    try:
        packet = receiver.receive()
        if packet is None:
            return 0
        _check(spec, messages.STAMP.decode(packet))
        loaded = _opened(spec, channels, messages.BEGIN.decode(packet), receiver)
        parts = loaded.states, loaded.tables, loaded.device_states, loaded.table_writer
        follower = Follower(loaded.executors, *parts)
        receiver.answer(messages.encode(messages.Opened(os.getpid())))
        gc.collect()
        gc.freeze()
        _follow(receiver, follower)
    except Exception as error:
        return _report_failure(receiver, error)
    finally:
        if loaded is not None:
            loaded.close()
        channels.comm.close()
    return 0


def _opened(
    spec: RankSpec, channels: RankChannels, begin: messages.Begin, receiver: Receiver
) -> Loaded:
    """Opens the rank's part, and reports the progress to rank 0."""
    comm = channels.comm
    comm.limit_s = math.inf  # only rank 0 decides which rank is late: it may have been stopped

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # rank 0 has ended, which ends this process
            receiver.answer(messages.encode(messages.Opening(text)))

    reported = ReportedProgress(tell)
    comm.at_wait(reported.wait)
    how: dict[str, Any] = {"mark": reported.mark, "shown": reported, "comm": comm}
    loaded = load(Path(spec.engine), **how, **msgspec.structs.asdict(begin.options))
    comm.at_wait(lambda: None)
    return loaded


def _follow(receiver: Receiver, follower: Follower) -> None:
    while (packet := receiver.receive()) is not None:
        if not follower.follow(messages.ORDERS.decode(packet)):
            return


def _report_failure(receiver: Receiver, error: Exception) -> int:
    user, passing = isinstance(error, UserError), isinstance(error, CapacityError)
    if not user:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    words = str(error) if user else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # rank 0 may have ended before
        receiver.answer(messages.encode(messages.RankFailed(words, user, passing)))
    return 2 if user and not passing else 1  # after 1 its host waits for rank 0 again


def _check(spec: RankSpec, stamp: messages.Stamp) -> None:
    """Raises EngineError where rank 0 has another engine or another version."""
    mine = manifest_digest(Path(spec.engine)), version("spark-engine")
    if mine == (stamp.digest, stamp.version):
        return
    if mine[1] != stamp.version:
        words = f"runs spark-engine {mine[1]}, rank 0 {stamp.version}: install one version"
    else:
        words = f"has another {MANIFEST} than rank 0: copy the engine folder from there"
    raise EngineError(f"{spec.engine} on {os.uname().nodename} {words}")


def _end_with(parent: int) -> None:
    """Lets the system end this process with its parent, even if it hangs."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it has ended already
        os._exit(1)


def _show_own_first(environment: MutableMapping[str, str], rank: int, ranks: int) -> None:
    """Makes the GPU with this rank's number, of those that rank 0 sees, this process's first."""
    given = visible(environment)
    seen = [str(i) for i in range(ranks)] if given is None else given
    environment[VISIBLE] = ",".join([*seen[rank:], *seen[:rank]])


def _beat(pipe: int) -> None:
    """Sends beats from a thread, while Python runs here, whatever the loop waits for."""
    with contextlib.suppress(OSError):  # the waiting process has ended, which ends this one
        while True:
            os.write(pipe, b".")
            time.sleep(BEAT_S)


def _leave_with_rank_0(receiver: Receiver) -> None:
    receiver.gone()
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
