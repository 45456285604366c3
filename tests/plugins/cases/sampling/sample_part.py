"""The seeded cases of sample_part and sample_join."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spark_engine.op import Attrs, Case
from spark_engine.plugins.ops.sampling import sample_part
from spark_engine.tensors import Array
from tests.plugins.cases.sampling.sample import Launch, broken, ties

Part = Callable[[Attrs, tuple[Array, ...]], tuple[Array, ...]]
_ALL = Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, top_k=30, bias=True, width=320, vocab=301, mask=0.4)


@dataclass(frozen=True)
class RankedCase:
    """A launch of `sample` with its vocabulary shared by `ranks`."""

    label: str
    launch: Launch
    ranks: int = 2

    @property
    def attrs(self) -> Attrs:
        return {**self.launch.attrs, "ranks": self.ranks}

    def shares(self, arrays: tuple[Array, ...]) -> list[tuple[Array, ...]]:
        """The operands of `sample_part` on each rank."""
        size = self.launch.width // self.ranks
        firsts = [np.asarray([r * size], np.int32) for r in range(self.ranks)]
        cuts = [np.ascontiguousarray(x) for x in np.split(arrays[0], self.ranks, axis=1)]
        return [(cut, *arrays[1:], first) for first, cut in zip(firsts, cuts, strict=True)]

    def joined(self, part: Part, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """The operands of `sample_join`, from `part`; logits of unwanted rows are NaN."""
        made = [part(self.attrs, share) for share in self.shares(arrays)]
        wanted = made[0][1]
        logits = np.where(wanted[:, None] == 1, arrays[0], np.nan).astype(np.float32)
        return (np.concatenate([m[0] for m in made], axis=1), wanted, logits, *arrays[1:])


SHARED = (
    RankedCase("greedy", Launch(0.0, width=320, vocab=320)),
    RankedCase("greedy, ties", Launch(0.0, width=320, vocab=320, edit=ties), 4),
    RankedCase("few", Launch(0.8, 0.95, top_k=20, width=320, vocab=320)),
    RankedCase("everything", _ALL),
    RankedCase("all ids", Launch(1.0, width=320, vocab=317, mask=0.02), 4),
    RankedCase("not finite", Launch(1.0, 0.9, width=320, vocab=320, edit=broken)),
    RankedCase(
        "4 tokens a row", Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, 30, 320, 301, bias=True, tile=4)
    ),
)


def _part(shared: RankedCase, rank: int) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return shared.shares(shared.launch.inputs(rng))[rank]

    def ignore(outputs: tuple[Array, ...]) -> None:
        launch = shared.launch
        idle = ~launch.live.reshape(-1) if launch.tile else launch.idle
        for output in outputs:
            output[idle] = 0

    label = f"{shared.label}, {rank} of {shared.ranks}"
    return Case(label, shared.attrs, make, 1e-5, 2e-5, ignore=ignore)


def join_case(shared: RankedCase, part: Part) -> Case:
    """The case of `sample_join` after `part`."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return shared.joined(part, shared.launch.inputs(rng))

    ignore = shared.launch.ignore
    return Case(shared.label, shared.attrs, make, 1e-5, 2e-5, ignore=ignore)


PARTS = tuple(_part(shared, rank) for shared in SHARED for rank in (0, shared.ranks - 1))
CASES = {
    "sample_part": PARTS,
    "sample_join": tuple(join_case(shared, sample_part.reference) for shared in SHARED),
}
