"""The proxy's path of one request: pick a replica, forward, stream back, retry where that is safe.

Retries only failures before the client has received any byte. Knows HTTP headers and status; knows
no socket.
"""

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spark_engine.runtime.replicas.fleet import Fleet, Replica
from spark_engine.runtime.replicas.front_metrics import FrontMetrics
from spark_engine.runtime.replicas.prompt_digests import Place, places
from spark_engine.runtime.replicas.routing import RouteChoice, Ticket
from spark_engine.runtime.replicas.upstream import Events, Headers, Lost, Upstream, UpstreamAnswer
from spark_engine.runtime.server.api.answers import anthropic_error, error, event
from spark_engine.runtime.server.http.bodies import ReceivedBody

TRIES = 3  # replicas that may refuse a request before it fails
BREAKS = 2  # replicas that a request may break: it might be the cause
REFUSED = 503
ENGINE_ERROR = b'"engine_error"'
ASK_S = 5.0  # time limit of asking all replicas for a stored answer
ASKING = 16  # concurrent questions for stored answers, over all requests
MOST_KEPT = 1 << 16  # ids of stored answers with a known replica
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}
_HOP |= {"proxy-connection", "proxy-authenticate", "proxy-authorization"}
_NOT_UP = _HOP | {"host", "content-length", "content-encoding", "expect", "x-request-id"}
_NOT_DOWN = _HOP | {"content-length", "date", "server", "x-request-id"}
_PREVIOUS = re.compile(rb'"previous_response_id"\s{0,64}:\s{0,64}"([^"]{1,200})"')
LOOK = 2 << 20  # bytes of a body that are searched at a time
_LONGEST = 512  # bytes of the longest match
_MADE = re.compile(rb'"id"\s*:\s*"(resp_[^"]+)"')
_BYTES = "surrogateescape"  # as aiohttp decodes a header that is not UTF-8
_ID = re.compile(r"resp_[A-Za-z0-9_-]{1,128}")

Send = Callable[[int, Headers, bytes, bool], Awaitable[None]]


@dataclass
class ClientRequest:
    """A client's request. `target`: its path and query; `name`: its x-request-id. Its body is
    decompressed, and freed when no other replica can need it.

    `send` gets the status and the headers (0 and none after the first call), a part of the body,
    and whether more follows.
    """

    method: str
    path: str
    target: str
    headers: Headers
    body: ReceivedBody
    name: str
    send: Send
    started: bool = False  # the client has received bytes
    ended: bool = False  # the client has received everything
    tried: set[str] = field(default_factory=set)

    @property
    def up(self) -> Headers:
        """The headers for a replica."""
        kept = passed(self.headers, _NOT_UP)
        return [*kept, ("x-request-id", self.name)] if self.name else kept


@dataclass(frozen=True)
class ReplicaRefusal:
    """A replica's refusal of a request, which another replica may accept."""

    status: int
    headers: Headers
    body: bytes


class Unsure(Exception):
    """A replica that may store the answer did not reply."""


class EngineFailed(Lost):
    """The engine of a replica failed; its server is running."""


class Forwarder:
    def __init__(self, fleet: Fleet, upstream: Upstream, metrics: FrontMetrics) -> None:
        self._fleet, self._upstream, self._metrics = fleet, upstream, metrics
        self._kept: OrderedDict[str, str] = OrderedDict()  # id of an answer -> its replica
        self._asking = asyncio.Semaphore(ASKING)

    async def forward(self, asked: ClientRequest) -> None:
        prompt = places(asked.body.parts) if asked.method == "POST" else ()
        try:
            owner = await self._owner(asked)
        except Unsure as problem:  # another replica would answer that the id does not exist
            await self._refuse(asked, str(problem))
            return
        refused: ReplicaRefusal | None = None
        lost: list[Lost] = []
        again = ""  # reason of a retry, for the metrics
        for left in reversed(range(TRIES)):
            choice = self._fleet.router.choose(prompt, asked.tried)
            name = owner or (choice.name if choice else None)
            replica = self._fleet.replicas.get(name) if name else None
            if replica is None:
                break
            asked.tried.add(replica.name)
            if choice is None or choice.name != replica.name:
                choice = RouteChoice(replica.name)
            if again:
                self._metrics.again.labels(again).inc()
            last = not left or owner or all(r.name in asked.tried for r in self._fleet.up)
            self._metrics.routed(prompt[-1].length if prompt else 0, choice.shared)
            try:
                refused = await self._through(replica, asked, prompt, choice, bool(last))
            except Lost as problem:
                if await self._broke(replica, asked, problem):
                    return
                lost.append(problem)
                if len(lost) == BREAKS or last:
                    break
                again = "lost"
                continue
            if refused is None:
                return
            if last:
                break
            again = "refused"
        await self._fail(asked, refused, lost[-1] if lost else None)

    async def _through(
        self,
        replica: Replica,
        asked: ClientRequest,
        prompt: Sequence[Place],
        choice: RouteChoice,
        last: bool,
    ) -> ReplicaRefusal | None:
        router = self._fleet.router
        ticket = router.begin(choice, prompt)
        try:
            with replica.flight():
                url = replica.address.url + asked.target
                sent = asked.body.drop if last and asked.body.large else None
                parts = asked.body.parts
                asking = self._upstream.ask(asked.method, url, asked.up, parts, sent)
                del parts  # the sender holds the body now
                async with asking as answer:
                    return await self._pass_on(replica, asked, answer, ticket)
        finally:
            router.end(ticket)

    async def _pass_on(
        self, replica: Replica, asked: ClientRequest, answer: UpstreamAnswer, ticket: Ticket
    ) -> ReplicaRefusal | None:
        headers = passed(answer.headers, _NOT_DOWN)
        if answer.status not in (401, 403):  # the replica's name may be its address
            headers.append(("x-spark-replica", replica.name))
        if not answer.streams:
            body = await answer.whole()
            if answer.status == REFUSED:
                return ReplicaRefusal(answer.status, headers, body)
            if answer.status == 500 and ENGINE_ERROR in body:
                raise EngineFailed(f"its engine failed: {body.decode('utf-8', 'replace')[:300]}")
            self._note_kept(asked, replica, body)
            await self._send(asked, answer.status, headers, body, more=False)
            return None
        status, events = answer.status, Events()
        async for part in answer.parts():
            if not (whole := events.take(part)):
                continue
            if not asked.started:
                self._fleet.router.started(ticket)
                self._note_kept(asked, replica, whole)
                await self._send(asked, status, headers, whole, more=True)
            else:
                await self._send(asked, 0, (), whole, more=True)
        await self._send(asked, 0 if asked.started else status, headers, events.left, more=False)
        return None

    async def _send(
        self, asked: ClientRequest, status: int, headers: Headers, part: bytes, more: bool
    ) -> None:
        asked.started, asked.ended = True, not more
        asked.body.drop()
        await asked.send(status, headers, part, more)

    async def _broke(self, replica: Replica, asked: ClientRequest, problem: Lost) -> bool:
        """Handles a replica that broke; returns whether the request has ended."""
        if not isinstance(problem, EngineFailed):
            self._fleet.down(replica, str(problem))
        if not asked.started:
            return False
        if asked.ended:  # the rest was in transit to a slow client
            return True
        self._metrics.broken.inc()
        words = f"replica {replica.name} ended during its answer: {problem}; send the request again"
        await asked.send(0, (), last_words(asked.path, words, asked.name), False)
        return True

    async def _fail(
        self, asked: ClientRequest, refused: ReplicaRefusal | None, lost: Lost | None
    ) -> None:
        if refused is not None:
            await self._send(asked, refused.status, refused.headers, refused.body, more=False)
            return
        if lost is not None:
            words = f"the replica ended before its first token: {lost}; send the request again"
        else:
            words = "no replica takes requests now; retry"
        await self._refuse(asked, words)

    async def _refuse(self, asked: ClientRequest, words: str) -> None:
        self._metrics.failed.inc()
        status, body, headers = problem_of(asked.path, REFUSED, words, asked.name)
        await self._send(asked, status, headers, body, more=False)

    def _note_kept(self, asked: ClientRequest, replica: Replica, body: bytes) -> None:
        """Stores which replica has this answer, if it can be requested later."""
        if asked.path == RESPONSES and (found := _MADE.search(body)):
            self._keep(found[1].decode("utf-8", "replace"), replica)

    def _keep(self, ident: str, replica: Replica) -> None:
        if _ID.fullmatch(ident):
            self._kept[ident] = replica.name
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

    async def _owner(self, asked: ClientRequest) -> str | None:
        """The replica that stores the answer in the request's path; None if any replica will do.
        Raises Unsure."""
        ident = ""
        if asked.path == RESPONSES:
            ident = await _previous(asked.body)
        elif asked.path.startswith(RESPONSES + "/"):
            ident = asked.path.removeprefix(RESPONSES + "/").partition("/")[0]
        if not _ID.fullmatch(ident):  # it must not get into a URL
            return None
        known = self._kept.get(ident)
        if known is not None and known in self._fleet.replicas:
            return known
        headers = credentials(asked)
        # this front was restarted, or there are several
        replica = await self._ask_all(f"{RESPONSES}/{ident}", headers)
        if replica is not None:
            self._keep(ident, replica)
        return replica.name if replica else None

    async def _ask_all(self, path: str, headers: Headers) -> Replica | None:
        """The first replica found that stores it; asks ASKING replicas at a time within ASK_S
        seconds. Raises Unsure if none is found and some did not reply."""
        left, silent = deque(self._fleet.up), 0

        async def ask() -> Replica | None:
            nonlocal silent
            while left:
                async with self._asking:
                    if not left:
                        break
                    replica = left.popleft()
                    try:
                        url = replica.address.url + path
                        status, _ = await self._upstream.get(url, ASK_S, headers)
                    except Lost:
                        silent += 1
                        continue
                if status == 200:
                    return replica
                silent += status == REFUSED
                if status in (401, 403):  # every replica would refuse this key
                    left.clear()
            return None

        tasks = [asyncio.ensure_future(ask()) for _ in range(min(ASKING, len(left)))]
        try:
            async with asyncio.timeout(ASK_S):
                for task in asyncio.as_completed(tasks):
                    if (found := await task) is not None:
                        return found
        except TimeoutError:
            silent += 1
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if silent:
            raise Unsure("a replica did not reply whether it stores this answer; retry")
        return None


async def _previous(body: ReceivedBody) -> str:
    """The body's `previous_response_id`; empty without one. The event loop runs other tasks after
    each LOOK bytes."""
    end, searched = b"", 0  # the end of the parts before: a match may begin in it
    for part in list(body.parts):
        for at in range(0, len(part), LOOK):
            text = end + part[at : at + LOOK]
            if found := _PREVIOUS.search(text):
                return found[1].decode("utf-8", "replace")
            end, searched = bytes(text[-_LONGEST:]), searched + len(text)
            if searched > LOOK:
                searched = 0
                await asyncio.sleep(0)
    return ""


def credentials(asked: ClientRequest) -> Headers:
    """The headers that authenticate the request at a replica."""
    return [row for row in asked.up if row[0].lower() in ("authorization", "x-api-key")]


def problem_of(
    path: str, status: int, words: str, name: str, code: str = "no_replica"
) -> tuple[int, bytes, Headers]:
    """(status, body, headers) of an error in the format of the API under `path`; `code`: of a
    refusal."""
    headers = [("content-type", "application/json")]
    if status == REFUSED:
        headers.append(("retry-after", "1"))
        body = _form(path, status, words, name, "service_unavailable", code)
    else:
        body = _form(path, status, words, name, "invalid_request_error", None)
    return status, msgspec.json.encode(body), headers


def last_words(path: str, words: str, name: str) -> bytes:
    """Final events of a started stream, in the format of its API."""
    body = _form(path, 500, words, name, "server_error", "replica_lost")
    if path.startswith(MESSAGES):
        return event("error", body)
    if path.startswith(RESPONSES):
        return event("error", {k: body["error"][k] for k in ("code", "message", "param")})
    return b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(body)


def _form(
    path: str, status: int, words: str, name: str, kind: str, code: str | None
) -> dict[str, Any]:
    body = error(words, kind, code=code)
    body |= {"request_id": name} if name else {}
    return anthropic_error(status, body) if path.startswith(MESSAGES) else body


def passed(headers: Headers, without: set[str]) -> list[tuple[str, str]]:
    """The headers to forward: without those in `without`, and those that `Connection` lists."""
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == "connection"
        for word in value.split(",")
    }
    return [(k, v) for k, v in headers if k.lower() not in without | named]


def decoded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """ASGI headers as text: decoded as UTF-8, in which they are sent, or in an encoding of any
    bytes."""
    return [(k.decode("latin-1"), _text(v)) for k, v in headers]


def encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """A replica's headers for ASGI, with their original bytes."""
    return [(k.encode("utf-8", _BYTES), v.encode("utf-8", _BYTES)) for k, v in headers]


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
