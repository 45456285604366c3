"""Input scales of experts that calibration has not met, taken from the layer's other experts.

Exporters leave such a scale out, or write 0, a denormal number or infinity. What is used in its
place is the largest of the layer's others, so that no expert's input is clipped more than theirs.
Knows scales, and no file: weight scales are never replaced.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError
from spark_engine.models.weights import recipes
from spark_engine.models.weights.recipes import Reads, Recipe
from spark_engine.models.weights.value_checks import LEAST
from spark_engine.tensors import Array, DType, TensorSpec

NAMED = 2  # replaced scales that a note names


@dataclass(frozen=True)
class _Borrow:
    """The function of `borrowed`: [parts, E] -> [E]. `name` has a `*` for the expert's number."""

    name: str

    def __call__(self, array: Array) -> Array:
        known = self.known(array)
        return np.where(known > 0, known, known.max())

    def known(self, array: Array) -> NDArray[np.float32]:
        """[E]: the largest sound scale of an expert's parts, 0 if there is none."""
        wide = array.astype(np.float32)
        sound = (wide >= LEAST) & (wide < np.inf)
        found: NDArray[np.float32] = np.where(sound, wide, np.float32(0)).max(axis=0)
        if not found.any():
            raise CheckpointError(
                f"{self.name}: no expert of this layer has an input scale, so its inputs cannot be "
                "quantised; take a calibrated export, or one with 16-bit inputs (W4A16)"
            )
        return found


def borrowed(name: str, parts: Sequence[Sequence[Recipe]]) -> Recipe:
    """f32 [E]: the scale of each expert's input, of projections that read one input. 0: not
    stored."""
    stored = recipes.stack([recipes.stack(part) for part in parts])
    spec = TensorSpec("", DType.F32, stored.shape[1:])
    return recipes.transform(stored, spec, _Borrow(name))


def borrowed_note(weights: Iterable[Recipe], checkpoint: Reads) -> tuple[str, ...]:
    """A note if input scales are replaced, with their number. Raises as reading them does."""
    found = dict(borrow for weight in weights for borrow in _borrows(weight))
    names, total = [], 0
    for borrow, stored in found.items():
        known = borrow.known(stored.evaluate(checkpoint))
        total += known.size
        names += [borrow.name.replace("*", str(e)) for e in np.flatnonzero(known == 0)]
    if not names:
        return ()
    shown = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    return (
        f"{len(names)} of {total} input scales of experts are missing, 0, denormal or infinite (no "
        f"calibration met them): each is the largest of its layer's other experts: {shown}",
    )


def _borrows(recipe: Recipe) -> Iterator[tuple[_Borrow, Recipe]]:
    if isinstance(recipe.function, _Borrow):
        yield recipe.function, recipe.args[0]
    for arg in recipe.args:
        yield from _borrows(arg)
