"""Which rows of the state `image_rows` hold which image's result, by digest.

The least recently used are given up first. Launches run in their order, so rows may be given to
another image once all launches that read them are made: only those of a step that is being planned
are kept. Knows counts; computes no image.
"""

from collections.abc import Collection, Sequence

from spark_engine.vision import Image


class ImageRows:
    """A pool of `size` rows; an image has consecutive ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._spans: dict[bytes, tuple[int, int]] = {}  # by digest: first row, end; oldest first

    def first(self, image: Image) -> int:
        """The row that has the image's first result. Raises KeyError if it is not here."""
        return self._spans[image.digest][0]

    def missing(self, images: Sequence[Image]) -> list[Image]:
        """Those that are not here, each digest once."""
        found = {i.digest: i for i in images if i.digest not in self._spans}
        return [*found.values()]

    def place(self, images: Sequence[Image], kept: Collection[bytes]) -> list[Image] | None:
        """Has all of `images` here at once and never gives up one of `kept`; returns those that
        are to be computed, None where there is no space."""
        new = self.missing(images)
        for image in images:
            if image.digest in self._spans:  # now the most recently used
                self._spans[image.digest] = self._spans.pop(image.digest)
        wanted = {i.digest for i in images}
        if all(self._take(image, wanted.union(kept)) for image in new):
            return new
        # no gap between those in use is large enough: all are placed again
        new = [*{i.digest: i for i in images if i.digest not in kept}.values()]
        for digest in [d for d in self._spans if d not in kept]:
            del self._spans[digest]
        if all(self._take(image, wanted.union(kept)) for image in new):
            return new
        for image in new:  # one that has rows is not computed either
            self._spans.pop(image.digest, None)
        return None

    def _take(self, image: Image, kept: Collection[bytes]) -> bool:
        while (first := self._gap(image.tokens)) is None:
            oldest = next((d for d in self._spans if d not in kept), None)
            if oldest is None:
                return False
            del self._spans[oldest]
        self._spans[image.digest] = first, first + image.tokens
        return True

    def _gap(self, rows: int) -> int | None:
        """The first of so many free rows."""
        end = 0
        for first, behind in sorted(self._spans.values()):
            if first - end >= rows:
                return end
            end = behind
        return end if self.size - end >= rows else None
