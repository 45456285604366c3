"""An engine without a model: answers from a script, one token a step for every running request.

    python fake_engine.py worker TOKENIZER ADDRESS     the engine process
    python fake_engine.py server TOKENIZER OPTIONS     the server, OPTIONS being JSON
    python fake_engine.py batch TOKENIZER FILES        a batch, FILES being SOURCE,TARGET

What a prompt says decides what happens: STALL never comes back from a step, BOOM raises in it, NAN
ends with an error, SLOW makes steps slow, TOOL calls a tool, ECHO gets its own prompt again and
again, ROUND gets three tokens a step, two of them kept of the three drafts that were verified, WARM
finds all of its prompt but the last token in a cache; any other prompt gets thoughts and an answer
in words.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from spark_engine.interface import Limits
from spark_engine.progress import Progress
from spark_engine.runtime.engine.draft_counts import DraftCounts
from spark_engine.runtime.engine.request import Event, FinishReason, Request
from spark_engine.runtime.offline import batch, service_thread
from spark_engine.runtime.server.engine_client import worker
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.operation import logs
from spark_engine.runtime.server.operation.json_stderr import standard_error
from spark_engine.runtime.server.process import server
from spark_engine.runtime.text.tokenizer import Tokenizer

SLOTS = 8
CONTEXT = 512
STEP_S = 0.002
SLOW_S = 0.02
THOUGHT = "I add é 🙂.\n</think>\n\n"
ANSWER = "The answer is 42, 猫! "
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>"
)


class FakeEngine:
    """Enough of `runtime.engine.Engine` for the worker's loop."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        self._eos = eos
        self._live: dict[int, tuple[Request, list[int], int]] = {}
        self._ends: list[Event] = []
        self._steps = 0
        self._rounds = 0
        self._slow = False
        self.started: list[tuple[int, float]] = []

    @property
    def idle(self) -> bool:
        return not (self._live or self._ends)

    def check(self) -> float | None:
        return None

    def add(self, request_id: int, request: Request) -> None:
        text = self._tokenizer.decode(request.prompt, skip_special=False)
        words = THOUGHT if text.endswith("<think>\n") else ""
        script = self._tokenizer.encode(words + (CALL if "TOOL" in text else ANSWER))
        tail = [self._eos] if "TOOL" in text else self._tokenizer.encode(ANSWER * 50)
        self._live[request_id] = (request, echo(request) if "ECHO" in text else script + tail, 0)
        self._slow = "SLOW" in text

    def cancel(self, request_id: int) -> bool:
        if self._live.pop(request_id, None) is None:
            return False
        self._ends.append(Event(request_id, finish=FinishReason.CANCELLED))
        return True

    def step(self) -> list[Event]:
        time.sleep(SLOW_S if self._slow else STEP_S)
        self.started = []
        self._steps += 1
        events, self._ends = self._ends, []
        rows, now = list(self._live)[:SLOTS], time.monotonic()
        self.started = [(n, now) for n in rows if self._live[n][2] == 0]
        for number in rows:
            events += self._round(number)
        return events

    def _round(self, number: int) -> list[Event]:
        request, _, at = self._live[number]
        if "ROUND" not in self._tokenizer.decode(request.prompt):
            return [self._advance(number)]
        self._rounds += 1
        rounds, events = at // 3 + 1, []
        while len(events) < 3 and number in self._live:
            event = self._advance(number)
            event = event._replace(drafted=3 * rounds, accepted=2 * rounds)
            own = {"mtp": DraftCounts([rounds] * 3, [rounds, rounds, 0])}
            asked = request.params.draft_counts
            events.append(event._replace(by_source=own) if asked else event)
        return events

    def _advance(self, number: int) -> Event:
        request, script, at = self._live[number]
        text = self._tokenizer.decode(request.prompt)
        if "STALL" in text:
            time.sleep(1000)
        if "BOOM" in text:
            raise RuntimeError("the step went wrong")
        if "NAN" in text:
            del self._live[number]
            return Event(number, finish=FinishReason.ERROR, message="logits are not finite")
        token, params = script[at % len(script)], request.params
        finish = FinishReason.LENGTH if at + 1 == params.max_tokens else None
        finish = FinishReason.STOP if token in params.stop_ids((self._eos,)) else finish
        self._live[number] = (request, script, at + 1)
        if finish:
            del self._live[number]
        top = tuple((token + i, -0.5 - i) for i in range(params.logprobs or 0))
        cached = len(request.prompt) - 1 if "WARM" in text else 0
        logprob = None if params.logprobs is None else -0.5
        return Event(number, token, logprob, top, finish, cached=cached)

    def settle(self) -> None:
        """It writes nothing to a disk."""

    def state(self) -> dict[str, Any]:
        return {"live": list(self._live)}

    def stats(self) -> dict[str, Any]:
        running = min(len(self._live), SLOTS)
        return {
            "running": running,
            "waiting": len(self._live) - running,
            "swapped": 0,
            "free_pages": 8 - running,
            "pages": 8,
            "free_slots": SLOTS - running,
            "preempted_swap": 0,
            "preempted_recompute": 0,
            "steps": self._steps,
            "buckets": {"decode_8": self._steps},
            "padded_rows": 0,
            "errors": 0,
            "drafts_by_position": [self._rounds] * 3,
            "accepted_by_position": [self._rounds, self._rounds, 0],
            "by_source": {"mtp": DraftCounts([self._rounds] * 3, [self._rounds, self._rounds, 0])},
            "prefix_queries": 30 * self._rounds,
            "prefix_hits": 20 * self._rounds,
            "prefix_lost_for_state": self._rounds,
            "snapshots": 2,
            "snapshot_rows": 5,
            "cache_bytes": 1 << 20,
            "cache_budget": 1 << 22,
            "evicted_pages": 3,
            "evicted_snapshots": 4,
            "rounds_by_k": {0: self._steps - self._rounds, 3: self._rounds},
        }


def echo(request: Request) -> list[int]:
    return list(request.prompt) * 50


def open_fake(folder: Path) -> worker.Opened:
    tokenizer = Tokenizer.load(folder)
    eos = tokenizer.id_of("<|im_end|>")
    assert eos is not None
    limits = Limits(max_seqs=SLOTS, max_context=CONTEXT, pages=64, vocab=len(tokenizer), drafts=3)
    info = EngineInfo("fake", limits, (eos,), {"temperature": 0.7, "top_k": 20})
    return info, FakeEngine(tokenizer, eos)


def main() -> int:
    mode, folder, last = sys.argv[1:]
    if mode == "worker":
        return worker.serve(last, lambda: open_fake(Path(folder)))
    command = (sys.executable, __file__, "worker", folder)
    if mode == "batch":
        source, target = map(Path, last.split(","))
        service_thread.prepare = lambda _, options: (command, options)
        options, shown = server.ServerOptions(), Progress(sys.stderr)
        print(batch.run_batch(source, target, Path(folder).parent, options, shown))
        return 0
    options = server.ServerOptions(**json.loads(last))
    form = logs.LogFormat(options.log_format)
    with standard_error(form):
        logs.set_up(form, logs.LogLevel(options.log_level))
        return asyncio.run(server.serve(command, Path(folder).parent, options))


if __name__ == "__main__":
    sys.exit(main())
