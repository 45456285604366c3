"""`spark-run --batch`: answers a file of requests in OpenAI's batch form, and continues where an
interrupted run ended.

Knows OpenAI's lines and the server's paths. The bodies are read, answered and refused by the
server's own functions.
"""

import queue
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType

from spark_engine.errors import InternalError, OptionError
from spark_engine.progress import Progress, Step
from spark_engine.runtime.offline.answering import Answering
from spark_engine.runtime.offline.batch_files import AnswerFile, BatchLine, read_lines
from spark_engine.runtime.offline.service_thread import ServiceThread
from spark_engine.runtime.server.api.answers import Json, Reply, new_id
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.prompts.contract import Blobs
from spark_engine.runtime.server.replies import chat, completions, messages, responses
from spark_engine.runtime.server.replies.errors import error_response
from spark_engine.runtime.server.service.service import Service

Start = Callable[[Service, Blobs], Awaitable[Reply]]
PATHS = MappingProxyType(
    {
        "/v1/chat/completions": chat.start,
        "/v1/completions": completions.start,
        "/v1/responses": responses.start,
        "/v1/messages": messages.start,
    }
)
OK = 200


def run_batch(
    source: Path, target: Path, folder: Path, options: ServerOptions, shown: Progress
) -> str:
    """Answers the requests in `source` that `target` has no answer to; appends to `target`.

    Returns a sentence about the answers. Raises OptionError where a file cannot be used, before any
    work; the engine's errors; and what a signal asks for. Whatever ends it, the next run continues.
    """
    if not source.is_file():
        raise OptionError(f"--batch {source} is not a file; name a file of JSON lines")
    if target.exists() and target.samefile(source):
        raise OptionError(f"--out {target} is the file of requests: name another")
    most = options.max_body_mib << 20
    shown.say(f"reading {source}")
    wanted = _ids(source, most)
    file = AnswerFile(target)
    try:
        if foreign := file.done - wanted.keys():
            words = f"has {len(foreign)} answers to requests that {source} does not have"
            raise OptionError(f"--out {target} {words}: name another file")
        for done in file.done:
            del wanted[done]
        if file.done:
            shown.say(f"{len(file.done)} requests are answered already; {len(wanted)} are left")
        if not wanted:
            return f"all {len(file.done)} requests are answered"
        lines = (line for line in read_lines(source, most) if wanted.pop(line.ident, 0))
        with ServiceThread(folder, options) as thread:
            with shown.track("answering the batch", len(wanted)) as step:
                counts = _answer_all(thread, lines, file, step)
        bad = counts.total() - counts[OK]
        return f"{counts.total()} answered, {bad} with an error"
    finally:
        file.close()


def _ids(source: Path, most: int) -> dict[str, int]:
    """The number of the line of each id. Raises OptionError for two of one id."""
    found: dict[str, int] = {}
    for line in read_lines(source, most):
        if (first := found.setdefault(line.ident, line.number)) != line.number:
            words = f"custom_id {line.custom_id!r:.80} is that of line {first}; each must be unique"
            raise OptionError(f"--batch {source}, line {line.number}: {words}")
    return found


def _answer_all(
    thread: ServiceThread, lines: Iterator[BatchLine], file: AnswerFile, step: Step
) -> Counter[int]:
    """Writes the answers as they come; at most `answering.most` lines are in memory.
    Returns their numbers by status."""
    counts, box = Counter[int](), queue.SimpleQueue[Future[tuple[int, bytes]]]()
    flying = 0
    while True:
        while flying < thread.answering.most and (line := next(lines, None)) is not None:
            thread.start(_answer(thread.answering, line)).add_done_callback(box.put)
            flying += 1
        if not flying:
            return counts
        status, data = box.get().result()
        flying -= 1
        file.write(data)
        counts[status] += 1
        step()


async def _answer(answering: Answering, line: BatchLine) -> tuple[int, bytes]:
    """The status and the line of one answer. Raises InternalError where the engine has ended for
    good, since that is no answer to the request."""
    if line.problem:
        return 400, line.answer(None, {"code": "invalid_request", "message": line.problem})
    if (start := PATHS.get(line.url)) is None:
        words = f"line {line.number}: url is {line.url!r:.80}; it must be one of {', '.join(PATHS)}"
        return 404, line.answer(None, {"code": "invalid_url", "message": words})
    try:
        status, body = OK, await answering.patiently(lambda: _whole(answering, start, line.body))
    except Exception as problem:
        client = answering.service.client
        if client.died.is_set():
            raise InternalError(f"the engine ended: {client.reason}; run it again") from problem
        status, body = error_response(problem)
    response = {"status_code": status, "request_id": new_id("req", "_"), "body": body}
    return status, line.answer(response)


async def _whole(answering: Answering, start: Start, body: bytes) -> Json:
    reply = await start(answering.service, [body])
    try:
        return await reply.whole()
    finally:
        reply.close()
