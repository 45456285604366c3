"""The messages between the HTTP process and the engine process.

MessagePack over one ZeroMQ PAIR socket; the pixels of images are further frames, so that sending
copies none. Knows no transport and no HTTP. The HTTP process numbers the requests; the engine uses
these numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from spark_engine.interface import Limits
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.draft_counts import BySource
from spark_engine.runtime.engine.request import Event, Request, SamplingParams
from spark_engine.vision import Image, VisionInfo


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Run a checked request under the id `id`; ids increase. `prompt` is i32 bytes: decoding ids
    one by one would take longer than all other work before a first token's launch. The pixels of
    `images` are in further frames."""

    id: int
    prompt: bytes
    params: SamplingParams
    priority: int
    marks: tuple[int, ...]
    constraint: ConstraintSpec | None
    owner: str = ""
    salt: bytes = b""
    images: tuple[Image, ...] = ()

    @classmethod
    def of(cls, number: int, request: Request) -> Submit:
        """The message that sends it. Raises RequestError for one that is too large to be sent."""
        request.check_sizes()
        more = request.params, request.priority, request.marks, request.constraint
        images = tuple(replace(image, pixels=b"") for image in request.images)
        return cls(number, request.packed, *more, request.owner, request.salt, images)

    def request(self, pixels: Sequence[bytes] = ()) -> Request:
        """The request with the pixels of its images."""
        prompt = array("i", self.prompt)
        pairs = zip(self.images, pixels, strict=True)
        images = tuple(replace(image, pixels=data) for image, data in pairs)
        more = self.constraint, self.owner, self.salt, images
        return Request(prompt, self.params, self.priority, self.marks, *more)


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """End the request; unknown ids are ignored, since it may have ended by itself."""

    id: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answer with a StepReport, with or without events."""


class Stats(msgspec.Struct, frozen=True):
    """The engine's counters since its start; the first five and those with `now` are current."""

    running: int = 0
    waiting: int = 0  # swapped ones among them
    swapped: int = 0
    kv_usage: float = 0.0  # share of the KV pages that are taken, 0…1
    free_slots: int = 0
    preemptions: int = 0
    steps: int = 0  # rises with every step: what the watchdog looks at
    buckets: dict[str, int] = {}  # launches per bucket, e.g. {"decode_b4": 17}
    padded_rows: int = 0  # rows launched without a sequence
    errors: int = 0  # requests ended because their logits were not finite
    drafts_by_position: list[int] = []  # how often the draft at each position was verified
    accepted_by_position: list[int] = []  # and kept
    by_source: BySource = {}  # both, by what made the drafts
    rounds_by_k: dict[int, int] = {}  # rounds launched, by drafts a row
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # and found: not computed
    prefix_lost_for_state: int = 0  # with pages that were found, but no state to resume from
    snapshots: int = 0  # states that the cache holds now
    snapshot_rows: int = 0  # and could hold
    cache_bytes: int = 0  # that it holds now, pages and states
    cache_budget: int = 0  # and may hold; 0: there is no cache
    evicted_pages: int = 0
    evicted_snapshots: int = 0
    disk_bytes: int = 0  # of the prefix cache's files now
    disk_budget: int = 0  # and at most; 0: none are written
    disk_read: int = 0  # bytes of prefixes that came from them
    disk_refused: int = 0  # files: damaged, foreign or half written
    disk_evicted: int = 0
    restarts: int = 0  # of the engine process; the HTTP process knows
    memory_short: bool = False  # the host's memory: no new request is accepted

    @property
    def draft_rounds(self) -> int:
        """Rounds of one sequence that verified a draft."""
        return self.drafts_by_position[0] if self.drafts_by_position else 0

    @property
    def tokens_per_round(self) -> float | None:
        """Mean of those rounds; None before the first."""
        rounds = self.draft_rounds
        return 1 + sum(self.accepted_by_position) / rounds if rounds else None


def summarise(row: Mapping[str, Any], memory_short: bool = False) -> Stats:
    """The counters of `Engine.stats`."""
    own = {
        "waiting": row["waiting"] + row["swapped"],
        "kv_usage": 1 - row["free_pages"] / row["pages"],
        "preemptions": row["preempted_swap"] + row["preempted_recompute"],
        "drafts_by_position": list(row["drafts_by_position"]),
        "accepted_by_position": list(row["accepted_by_position"]),
        "memory_short": memory_short,
    }
    return Stats(**{name: row[name] for name in Stats.__struct_fields__ if name in row} | own)


class EngineInfo(msgspec.Struct, frozen=True):
    """The HTTP process's description of an engine. `generation` is generation_config.json.

    Once it is open, `cache_bytes` is the size of its prefix cache and `snapshots` the number of
    recurrent states in it. `build`: the fingerprint of the folder's engine; "" without one.
    `vision`: how it reads images; None: it reads none. `disk_bytes`: of `--cache-dir`, 0 without.
    """

    name: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any] = {}
    cache_bytes: int = 0
    snapshots: int = 0
    build: str = ""
    vision: VisionInfo | None = None
    disk_bytes: int = 0


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is loaded."""

    info: EngineInfo


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """The events of one step, and the counters after it.

    `started`: requests that got a slot, first or again, and when (`time.monotonic`).
    """

    events: list[Event]
    stats: Stats
    started: list[tuple[int, float]] = []


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The engine's queue is full; the request may be sent again later."""

    id: int
    message: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine process is about to exit. `user`: something outside the program is wrong;
    `passing`: it may be right later, such as memory that another process still holds."""

    message: str
    user: bool
    passing: bool = False


Command = Submit | Cancel | Ping
Report = Ready | StepReport | Refused | Failed

# read-only mappings are sent as dicts
encode: Callable[[Command | Report], bytes] = msgspec.msgpack.Encoder(enc_hook=dict).encode


def submitted(number: int, request: Request) -> list[bytes]:
    """The frames that send a request. Raises RequestError for one that is too large to be sent."""
    return [encode(Submit.of(number, request)), *(image.pixels for image in request.images)]


decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
