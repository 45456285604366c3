"""An engine of fakes; other fakes replay every call, through the bytes of messages.

The other ranks run when their packets arrive, or later. Each launch's outputs must equal rank 0's,
bit for bit, after the waits of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from spark_engine.errors import ExecutorError, SparkError
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Executor, Specs, Wait
from spark_engine.runtime.ranks.follower import Follower
from spark_engine.runtime.ranks.leader import LeadExecutor, LeadStates, LeadTables, Orders
from spark_engine.runtime.ranks.messages import ORDERS, CopyRows
from spark_engine.tensors import Array

Outputs = dict[str, bytes]


class Listening:
    """An executor that records the outputs of each launch."""

    def __init__(self, inner: Executor, heard: list[Callable[[], Outputs]]) -> None:
        self._inner, self._heard = inner, heard

    @property
    def specs(self) -> Specs:
        return self._inner.specs

    def run(self, buffers: Mapping[str, Array]) -> None:
        self.launch(buffers)()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        return self._keep(self._inner.launch(buffers), buffers)

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        rest = self._inner.launch_to_sample(buffers)
        return lambda: self._keep(rest(), buffers)

    def close(self) -> None:
        self._inner.close()

    def _keep(self, wait: Wait, buffers: Mapping[str, Array]) -> Wait:
        found: Outputs = {}

        def waited() -> None:
            wait()
            if not found:
                found.update({s.name: buffers[s.name].tobytes() for s in self.specs.outputs})

        def ask() -> Outputs:
            waited()
            return found

        self._heard.append(ask)
        return waited


class InProcess:
    """Followers that receive packets by a call."""

    def __init__(self, followers: list[Follower]) -> None:
        self.followers, self.packets, self.waits = followers, 0, False
        self.fallen: SparkError | None = None

    def send(self, data: bytes) -> None:
        self.packets += 1
        for follower in self.followers:
            assert follower.follow(ORDERS.decode(data))

    def check(self) -> None:
        if self.fallen is not None:
            raise self.fallen

    def explain(self, error: ExecutorError) -> SparkError:
        return self.fallen or error

    def waiting(self, waits: bool) -> None:
        assert self.waits != waits
        self.waits = waits


class FakeGroup:
    """`loaded`: rank 0's, wrapped by the leader; `heard`: the outputs of launches, by rank."""

    def __init__(self, fakes: list[Loaded]) -> None:
        self.heard: list[list[Callable[[], Outputs]]] = [[] for _ in fakes]
        listening = [
            replace(one, executors={k: Listening(e, heard) for k, e in one.executors.items()})
            for one, heard in zip(fakes, self.heard, strict=True)
        ]
        own, *others = listening
        self.link = InProcess(
            [Follower(one.executors, one.states, one.tables, one.device_states) for one in others]
        )
        orders, names = Orders(self.link), [spec.name for spec in own.tables]
        assert own.device_states is not None
        executors = {k: LeadExecutor(e, k, orders, names, {}) for k, e in own.executors.items()}
        states, tables = LeadStates(own.device_states, orders), LeadTables(None, orders)
        self.orders = orders
        self.loaded = replace(own, executors=executors, device_states=states, table_writer=tables)

    def check(self) -> int:
        """Compares every launch of the other ranks with rank 0's; returns their number."""
        first, *others = self.heard
        for heard in others:
            assert len(heard) == len(first)
            for mine, other in zip(first, heard, strict=True):
                assert other() == mine()
        return len(first)

    @property
    def snapshots(self) -> int:
        """Snapshots of the other ranks, once they have processed all packets."""
        self.orders.add(CopyRows([]))
        self.orders.send()
        return sum(len(follower.snapshots) for follower in self.link.followers)
