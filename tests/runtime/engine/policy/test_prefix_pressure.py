"""A prefix cache that is too small for its load: the share that is found falls by degrees.

Agents ask in turns, each of a conversation that grows; a state of the recurrent layers is as large
as 32 pages, as those of the served models are.
"""

import random
from dataclasses import dataclass, replace

import pytest

from spark_engine.interface import Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.policy.prefix_eviction import HYSTERESIS, TAU
from spark_engine.runtime.engine.request import Request, SamplingParams
from tests.runtime.engine.drive import drain, tokens_of
from tests.runtime.engine.invariants import check_scheduler
from tests.runtime.fake_executor import VOCAB, build_fake

LIMITS = Limits(4, 4032, 1200, VOCAB, page_size=64, bias_slots=8, top_logprobs=3, snapshots=400)
SYSTEM, FIRST, NEW, ANSWER = 256, 1024, 128, 32  # tokens
AGENTS, TURNS = 12, 5
SECONDS = 5.0  # between two requests: a round of all agents is within what HYSTERESIS holds fast
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
assert AGENTS * SECONDS < HYSTERESIS * TAU


@dataclass
class Agent:
    ids: list[int]


class Pressed:
    """An engine with a cache for `share` of the agents' conversations."""

    def __init__(self, share: float) -> None:
        self.engine = Engine(build_fake(LIMITS, (1, 4), (1, 8), lazy=False), EngineOptions())
        cache, self.now, self._rng = self.engine.scheduler.prefix.cache, 0.0, random.Random(3)
        page, row = cache._page_bytes, 32 * cache._page_bytes
        conversation = SYSTEM + FIRST + (NEW + ANSWER) * (TURNS - 1)
        cache.budget = int(share * AGENTS * (conversation // 64 * page + 2 * row))
        cache._row_bytes, order = row, cache._order
        order.scores = replace(order.scores, row_bytes=row)
        cache._clock = lambda: self.now
        system = self.draw(SYSTEM)
        self.agents = [Agent(system + self.draw(FIRST)) for _ in range(AGENTS)]

    def draw(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]

    def ask(self, agent: Agent) -> int:
        """One turn; the tokens of its prompt that were found."""
        marks = (SYSTEM, len(agent.ids) - 8)
        request = Request(tuple(agent.ids), GREEDY, marks=marks)
        (events,) = drain(self.engine, request).values()
        check_scheduler(self.engine.scheduler)
        self.now += SECONDS
        agent.ids += tokens_of(events) + self.draw(NEW)
        return events[-1].cached

    def found(self, shuffled: bool) -> float:
        asked = found = 0
        for _ in range(TURNS):
            order = self._rng.sample(self.agents, AGENTS) if shuffled else self.agents
            for agent in order:
                asked += len(agent.ids)
                found += self.ask(agent)
        return found / asked


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_agents_find_falls_gradually_with_the_budget(shuffled: bool) -> None:
    """With the order in which they were used alone, of agents in turns none would find its own
    conversation in a cache for half of them: the system message is all, 16 % of the tokens."""
    shares = {share: Pressed(share).found(shuffled) for share in (4.0, 1.0, 0.5, 0.2)}
    assert shares[4.0] > 0.8
    assert shares[1.0] > 0.9 * shares[4.0], "all of them fit"
    assert shares[0.5] > 0.6 * shares[4.0]
    assert shares[0.2] > 0.3 * shares[4.0]


def test_of_a_conversation_the_latest_state_stays() -> None:
    """Those that it has left behind go first, the one that others begin at does not."""
    world = Pressed(2 / AGENTS)
    first, other = world.agents[:2]
    world.ask(first)
    assert world.ask(other) == SYSTEM
    for _ in range(TURNS - 1):
        before = len(first.ids)
        assert world.ask(first) >= before - NEW - 64 - 8 - ANSWER
    assert world.ask(world.agents[2]) == SYSTEM


def test_several_answers_to_a_prompt_leave_none_of_them_behind() -> None:
    world = Pressed(4.0)
    prompt, cache = tuple(world.draw(300)), world.engine.scheduler.prefix.cache
    params = (SamplingParams(max_tokens=9, ignore_eos=True, seed=seed) for seed in range(3))
    drain(world.engine, *(Request(prompt, each) for each in params))
    assert len(cache._states) == 4 and not any(state.superseded for state in cache._states)


def test_a_shared_beginning_is_found_in_a_cache_full_of_recent_pages() -> None:
    world = Pressed(0.1)
    for agent in world.agents[:3]:
        world.ask(agent)
        world.ask(agent)
    begin = world.draw(640)
    events = drain(world.engine, *(Request((*begin, n), GREEDY) for n in range(8)))
    assert [of[-1].cached for of in events.values()].count(640) == 7


def test_what_was_not_used_for_long_goes_for_what_is_new() -> None:
    world = Pressed(0.15)
    for agent in world.agents[:6]:
        world.ask(agent)
    world.now += 2 * HYSTERESIS * TAU
    last = world.agents[6]
    world.ask(last)
    assert world.ask(last) > FIRST
