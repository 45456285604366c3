"""/v1/responses: starts an answer, and finds, lists, deletes or cancels stored ones."""

import re
import time
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from spark_engine.runtime.server.api.answers import Json, Part, Reply, new_id
from spark_engine.runtime.server.api.fields import BadField, renamed, short
from spark_engine.runtime.server.api.responses import NAMES, PLACES
from spark_engine.runtime.server.api.responses_tools import ToolNames
from spark_engine.runtime.server.api.stored_items import StoredItems
from spark_engine.runtime.server.operation import http_request
from spark_engine.runtime.server.prompts.contract import Blobs, JobKind
from spark_engine.runtime.server.replies.responses_reply import ResponsesReply
from spark_engine.runtime.server.service.service import Service

Query = Mapping[str, str]
MOST_LISTED = 100  # items of one page


async def start(service: Service, data: Blobs) -> Reply:
    """Starts to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline, owner = service.deadline(), http_request.key()

    def stored(ident: str) -> Sequence[Blobs]:
        last = service.responses.ended(ident, owner)
        return last.before.parts, [last.data]

    with renamed(NAMES, PLACES):  # for a form that its worker refuses
        found = await service.prepare(JobKind.RESPONSES, data, deadline, stored)
    asked, (kept, ends, repeated) = found.asked, found.more
    items = StoredItems(kept, array("Q", ends))
    if asked.store:
        service.responses.check(items, owner)
    running = service.submit(found, deadline)
    try:
        head = _head(repeated, service, new_id("resp", "_"))
        names = ToolNames.of_special(asked.names)
        reply = ResponsesReply(running, found, service, head, asked.token_logprobs, names)
        if asked.store:
            reply.keep(service.responses, items, owner)
    except BaseException:
        running.generation.close()
        raise
    if asked.background:
        reply.run_by_itself()
    return reply


def _head(repeated: bytes, service: Service, ident: str) -> Json:
    """The response before its first token. Fields that repeat the request stay raw JSON."""
    asked = msgspec.json.decode(repeated, type=dict[str, msgspec.Raw])
    return {
        "id": ident,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": service.names[0],
        "output": [],
        "usage": None,
        **asked,
    }


def find(service: Service, ident: str, query: Query) -> list[Part]:
    """GET /v1/responses/ID."""
    if query.get("stream", "false") != "false":
        raise BadField("a stored response is not streamed; leave stream out", "stream")
    return [service.responses.find(ident, http_request.key()).data]


def inputs(service: Service, ident: str, query: Query) -> list[Part]:
    """GET /v1/responses/ID/input_items: the newest first, unless `order` says otherwise."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise BadField(f"order is {short(order)}; it must be 'asc' or 'desc'", "order")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MOST_LISTED:
        raise BadField(f"limit is {short(limit)}; it must be 1 to {MOST_LISTED}", "limit")
    before = service.responses.find(ident, http_request.key()).before
    return before.page(int(limit), query.get("after"), order == "asc")


def delete(service: Service, ident: str, query: Query) -> list[Part]:
    """DELETE /v1/responses/ID."""
    service.responses.drop(ident, http_request.key())
    return [msgspec.json.encode({"id": ident, "object": "response", "deleted": True})]


def cancel(service: Service, ident: str, query: Query) -> list[Part]:
    """POST /v1/responses/ID/cancel: ends a running one; a finished one stays as it is."""
    entry = service.responses.find(ident, http_request.key())
    if entry.stop is not None:
        entry.stop()
    return [entry.data]
