"""Rounds of drafts of a chosen acceptance: ms a round, tokens a round, ms a kept token.

For each number of sequences and each k the prompts first run with the draft head's own drafts,
which drawn weights never get right: that records what this bucket says, token by token. Then they
run again along the record, with drafts that are right as often as each acceptance asks
(`forced_drafts`), one acceptance after the other. A bucket is held to its own record, since another
one's bits differ and drawn weights turn near ties into other tokens; a token's bits do not depend
on its place in the round. k = 0 is a step without drafts; `auto` shows, of the rows measured, the
one whose k the engine's table of costs promises most for the acceptance. The floor reads the
weights once (of routed experts those that all tokens of a round are expected to hit), keys, values
and states once, and the draft head with the rows that it drafts from k times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.floors import H200_BANDWIDTH, Floor, Work
from benchmarks.forced_drafts import Forced
from spark_engine.interface import DECODE, PREFILL_TILE, verify_family
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.weights_file import read_index

AUTO = "auto"
WARM = 6  # rounds
SPARE = 64  # tokens of room left at the end, for launches that are timed one by one
LOGIT_BYTES = 8  # f32, written and read
Row = dict[str, Any]
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Trial:
    """What is measured: `rounds` of each acceptance at each k. `ctx`: tokens of a prompt."""

    ctx: int
    rounds: int
    depths: tuple[int | str, ...]
    acceptances: tuple[tuple[float, ...], ...]

    def tokens(self, most: int) -> int:
        """Tokens that a sequence may say in all rounds of one k, where a round has up to `most`."""
        return len(self.acceptances) * (WARM + self.rounds) * most


class Rounds:
    """One engine's rounds. `forced` is to be told of every launch by the executors."""

    def __init__(self, engine: Engine, forced: Forced, trial: Trial) -> None:
        self.engine, self.forced, self.trial = engine, forced, trial
        self._choose: Callable[..., int] = engine.scheduler.depth.choose

    def rows(self, prompts: Prompts) -> Iterator[Row]:
        """Of so many sequences: k = 0, every k with every acceptance, then what is best of each."""
        plain = self._plain(prompts)
        yield plain
        found: dict[tuple[int, tuple[float, ...]], Row] = {}
        for k in self.trial.depths:
            if k in (0, AUTO):
                continue
            if not self._fits(int(k), len(prompts)):
                print(f"  no bucket verifies {k} drafts of {len(prompts)} sequences", flush=True)
                continue
            for row in self._along(prompts, self._record(prompts, int(k)), int(k)):
                found[int(k), tuple(row["acceptance"])] = row
                yield row
        for acceptance in self.trial.acceptances if AUTO in self.trial.depths else ():
            k = self._promised(len(prompts), acceptance, {k for k, _ in found})
            best = found.get((k, acceptance), plain)
            yield {**best, "k": AUTO, "chosen": k, "acceptance": list(acceptance)}

    def _promised(self, npl: int, acceptance: tuple[float, ...], known: set[int]) -> int:
        """The k of most tokens for the time, by the engine's table of costs."""
        cost = self.engine.scheduler.depth.cost(npl)
        kept = np.cumprod([1.0, *acceptance])
        return max({0, *known}, key=lambda k: kept[: k + 1].sum() / cost[k])

    def _plain(self, prompts: Prompts) -> Row:
        """The row of a step without drafts."""
        self.hold(0)
        self.forced.follow({}, 1)
        ids = self._start(prompts)
        said: dict[int, list[int]] = {i: [] for i in ids}
        while not all(said.values()):
            _collect(self.step()[0], said)
        walls = [self.step()[1] for _ in range(WARM + self.trial.rounds)][WARM:]
        self._end(ids)
        return self._row(0, (), walls, len(ids) * len(walls), len(ids))

    def _record(self, prompts: Prompts, k: int) -> list[list[int]]:
        """What each says in rounds of k drafts, none of which is likely to be kept."""
        self.hold(k)
        self.forced.follow({}, 1)
        ids = self._start(prompts)
        said: dict[int, list[int]] = {i: [] for i in ids}
        while not self.engine.idle:
            _collect(self.step()[0], said)
        self.engine.check_idle()
        return [said[i] for i in ids]

    def _along(self, prompts: Prompts, said: list[list[int]], k: int) -> Iterator[Row]:
        """One k over its record, an acceptance after the other."""
        self.hold(k)
        first, length = len(prompts[0]), max(map(len, said))
        ids = self._start(prompts)
        follow = {i: (first, tokens) for i, tokens in zip(ids, said, strict=True)}
        self.forced.follow(follow, length)
        self.forced.draw((0.0,) * k, 0)  # the first ones run in smaller buckets, as recorded
        came: dict[int, list[int]] = {i: [] for i in ids}
        while not all(came.values()):
            _collect(self.step()[0], came)
        share = (self._room() - SPARE) // len(self.trial.acceptances)
        for number, acceptance in enumerate(self.trial.acceptances):
            self.forced.draw(acceptance, number + 1)
            end = self._room() - share
            yield self._window(k, acceptance, end, len(ids))
        self._end(ids)

    def _end(self, ids: Sequence[int]) -> None:
        for i in ids:
            self.engine.cancel(i, FinishReason.LENGTH)
        while not self.engine.idle:
            self.step()
        self.engine.check_idle()
        self.hold(AUTO)

    def _window(self, k: int, acceptance: tuple[float, ...], end: int, npl: int) -> Row:
        """Rounds of one acceptance, until the least room of a sequence is `end` tokens."""
        most = k + 1
        quarter = end + 3 * (self._room() - end) // 4
        for _ in range(WARM):
            if self._room() <= quarter:
                break
            self.step()
        before = deepcopy(self.engine.stats())
        walls, tokens = [], 0
        while len(walls) < self.trial.rounds and self._room() > max(end, 3 * most):
            events, wall = self.step()
            walls.append(wall)
            tokens += sum(e.token is not None for e in events)
        row = self._row(k, acceptance, walls, tokens, npl)
        return row | measured(before, self.engine.stats())

    def _row(
        self, k: int | str, acceptance: Sequence[float], walls: list[float], tokens: int, npl: int
    ) -> Row:
        if not walls:
            raise RuntimeError("the context has no room for a round: give a smaller --ctx")
        each = tokens / (npl * len(walls))
        mean = statistics.mean(walls)
        return {
            "npl": npl,
            "k": k,
            "acceptance": list(acceptance),
            "ctx": self.trial.ctx,
            "rounds": len(walls),
            "round_ms": round(statistics.median(walls) * 1e3, 3),
            "mean_ms": round(mean * 1e3, 3),
            "tokens_per_round": round(each, 3),
            "ms_per_token": round(mean / each * 1e3, 3) if each else math.inf,
            "decode_tok_s": round(tokens / sum(walls), 1),
        }

    def step(self) -> tuple[list[Event], float]:
        """One step of the engine and its seconds. Raises RuntimeError when a sequence failed."""
        start = time.perf_counter()
        events = self.engine.step()
        wall = time.perf_counter() - start
        failed = next((e for e in events if e.finish is FinishReason.ERROR), None)
        if failed is not None:
            raise RuntimeError(f"request {failed.request_id}: {failed.message}")
        return events, wall

    def hold(self, k: int | str) -> None:
        """Every round has k drafts from here on, or as many as the engine chooses."""
        depth: Any = self.engine.scheduler.depth
        depth.choose = self._choose if k == AUTO else lambda requests, brisk=False: int(k)

    def _fits(self, k: int, npl: int) -> bool:
        loaded = self.engine.loaded
        rows = loaded.buckets(verify_family(k)) if k <= self.engine.drafts else ()
        return any(r >= npl for r in rows)

    def _start(self, prompts: Prompts) -> list[int]:
        """Submits all; each may say as much as all rounds of one k can bring."""
        loaded, ctx = self.engine.loaded, len(prompts[0])
        early = -(-len(prompts) * ctx // (PREFILL_TILE * loaded.rows("prefill")[-1]))
        wanted = early + WARM + self.trial.tokens(1 + self.engine.drafts)
        most = min(wanted, loaded.limits.max_context - ctx - 1)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        return [self.engine.submit(Request(tuple(p), params)) for p in prompts]

    def _room(self) -> int:
        """Tokens that every sequence can still take."""
        return min((s.limit - s.launched for s in self.engine.scheduler.running), default=0)


def _collect(events: list[Event], said: Mapping[int, list[int]]) -> int:
    """Adds the tokens to what was said; how many there were."""
    count = 0
    for event in events:
        if event.token is not None:
            said[event.request_id].append(event.token)
            count += 1
    return count


def measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> Row:
    """What became of the drafts between two readings of the engine's counters."""

    def more(name: str) -> list[int]:
        return [b - a for a, b in zip(before[name], after[name], strict=True)]

    tried, kept = more("drafts_by_position"), more("accepted_by_position")
    reached = [tried[0] if tried else 0, *kept]  # a draft counts where those before it were kept
    rates = [round(b / a, 3) if a else None for a, b in zip(reached, kept, strict=False)]
    rounds = {
        str(k): n - before["rounds_by_k"].get(k, 0)
        for k, n in sorted(after["rounds_by_k"].items())
        if n > before["rounds_by_k"].get(k, 0)
    }
    return {"measured": rates, "rounds_by_k": rounds}


class RoundFloor:
    """The floor of a round. The draft head's bytes are the engine's, as it stores them."""

    def __init__(self, floor: Floor, engine: Engine) -> None:
        self._floor, self._vocab = floor, engine.loaded.limits.vocab
        folder = engine.loaded.folder
        assert folder is not None
        dtypes, limits = folder.manifest.dtypes, folder.manifest.limits
        self._bytes = (dtypes.state.itemsize, dtypes.kv.itemsize)
        self._ring = limits.gdn_ring
        held = {name: entry.spec.nbytes for name, entry in read_index(folder.weights_path).items()}
        self._layer = sum(n for name, n in held.items() if name.startswith("mtp."))
        own = any(name.startswith("mtp.head") for name in held)
        head = ("lm_head.",) if any(n.startswith("lm_head.") for n in held) else ("embed_tokens.",)
        self._head = 0 if own else sum(n for name, n in held.items() if name.startswith(head))

    def parts(self, npl: int, ctx: int, k: int) -> Mapping[str, float]:
        """Bytes of one round by part."""
        state, kv = self._bytes
        work = Work(npl, ctx, state, kv, self._ring)
        found = dict(self._floor.parts(work))
        wide = self._floor.parts(replace(work, npl=npl * (1 + k)))
        if "moe" in found:  # the experts that all tokens hit
            found["moe"] = wide["moe"]
        found["sample"] = wide["sample"]
        found["draft"] = k * (self._layer + self._head + npl * self._vocab * LOGIT_BYTES)
        return found

    def add(self, row: Row, ctx: int) -> Row:
        """The row with its floor in ms."""
        k = row.get("chosen", row["k"])
        parts = self.parts(row["npl"], ctx, k)
        floors = {p: round(n / H200_BANDWIDTH * 1e3, 4) for p, n in parts.items()}
        return row | {"floor_ms": round(sum(floors.values()), 3), "floor_parts_ms": floors}


def line(row: Row) -> str:
    """One printed line."""
    asked = "/".join(f"{a:g}" for a in row["acceptance"]) or "no drafts"
    got = "/".join("-" if a is None else f"{a:.2f}" for a in row.get("measured", []))
    share = row["floor_ms"] / row["round_ms"]
    k = f"{row['k']} {row['chosen']}" if "chosen" in row else str(row["k"])
    return (
        f"{row['npl']:4} sequences, k {k:>6}, {asked:14} ({got or '-'})  "
        f"{row['round_ms']:8.3f} ms a round (mean {row['mean_ms']:.3f}), floor "
        f"{row['floor_ms']:.2f} ({share:.0%}), {row['tokens_per_round']:.2f} tokens a round, "
        f"{row['ms_per_token']:.3f} ms a kept token, {row['decode_tok_s']:.0f} tokens/s"
    )


def family_of(k: int | str) -> str:
    """The bucket family of a round of k drafts."""
    return DECODE if k in (0, AUTO) else verify_family(int(k))
