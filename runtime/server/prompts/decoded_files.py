"""Images that requests have sent before: a chat sends its whole history each time.

Pixels by what they were made from: the bytes of a file and how it was decoded. Knows no worker.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from spark_engine.runtime.server.prompts.contract import Prepared, Seen
from spark_engine.runtime.server.prompts.limits import MOST_DECODED, MOST_SEEN

Files = Mapping[bytes, tuple[Seen, bytes]]  # with the pixels


class DecodedFiles:
    """Keeps MOST_DECODED bytes of pixels of at most MOST_SEEN files, those used last."""

    def __init__(self) -> None:
        self._files: OrderedDict[bytes, tuple[Seen, bytes]] = OrderedDict()
        self._size = 0

    def now(self) -> Files:
        """Those that are here, for one job: what is given up meanwhile stays in this mapping."""
        return dict(self._files)

    def complete(self, found: Prepared, blobs: Sequence[bytes], known: Files) -> list[bytes]:
        """The blobs with the pixels that the job did not send, since it had read `known`."""
        whole, at = list(blobs), len(found.prompts) + len(found.forms)
        for prompt in found.prompts:
            for image, file in zip(prompt.images, prompt.files, strict=True):
                if not whole[at]:
                    whole[at] = known[file][1]
                self._keep(file, image.rows, image.columns, image.digest, whole[at])
                at += 1
        return whole

    def _keep(self, file: bytes, rows: int, columns: int, digest: bytes, pixels: bytes) -> None:
        if (old := self._files.pop(file, None)) is not None:
            self._size -= len(old[1])
        self._files[file] = Seen(file, rows, columns, digest), pixels
        self._size += len(pixels)
        while self._size > MOST_DECODED or len(self._files) > MOST_SEEN:
            self._size -= len(self._files.popitem(last=False)[1][1])
