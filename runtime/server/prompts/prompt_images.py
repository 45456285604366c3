"""The images of one body: which are read, their limits, decoding, and their tokens.

Runs in a worker process. A body has the whole history of its chat, so of the images only those that
the user sends now may be refused: any other that cannot be read, and the oldest beyond a limit, are
left to become notes (`parts`). Knows no template and no engine.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.request import MOST_PIXELS
from spark_engine.runtime.images.decode import MOST_BYTES, DecodedImage, decode
from spark_engine.runtime.images.fetch import MOST_URL
from spark_engine.runtime.server.api.fields import BadField, short, too_long
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.contract import NotFetched, PreparedPrompt, Seen
from spark_engine.runtime.server.prompts.tokenising import encode_within
from spark_engine.runtime.text.image_parts import ImagePart, Marks, find_images
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.vision import Image, VisionInfo

_DATA = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_WEB = re.compile(r"https?://", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}:")
_SEND = "send the image as data:image/png;base64,…"


class PromptImages:
    """The images of one body that are read."""

    def __init__(
        self, info: VisionInfo, options: ChatOptions, fetched: Mapping[str, bytes | str],
        seen: Sequence[Seen] = (),
    ) -> None:  # fmt: skip
        """`fetched`: images, or why there is none, by their URLs. `seen`: images that another
        process has; their pixels are 0 here, and are left out."""
        self.marks: Marks | None = None  # of the images that are read, if there are any
        self._info, self._options, self._fetched = info, options, fetched
        self._images: list[Image] = []  # by the numbers of their marks; where they start is unknown
        self._left = MOST_PIXELS
        self._seen = {one.file: one for one in seen}
        self._decoded: dict[bytes, DecodedImage] = {}  # by what they were decoded from
        self._files: dict[bytes, bytes] = {}  # of each digest what it was decoded from

    def take(self, messages: Sequence[Mapping[str, Any]], field: str, shift: int = 0) -> None:
        """Reads the images of messages or items and replaces them by marks; `field[i + shift]` is
        the place of message i. Raises BadField, and NotFetched for images to be fetched."""
        found = find_images(messages, field, shift)
        for one in found:
            if one.new and one.video:
                words = f"{one.place} is a video, which this server does not read"
                raise BadField(f"{words}: send frames of it as images", one.place)
        kept = self._kept([one for one in found if not one.video], field)
        if self._options.media_domains:
            urls = [url for one in kept if isinstance(url := one.source()[1], str)]
            urls = [url for url in urls if _WEB.match(url) and len(url) <= MOST_URL]
            if urls := [url for url in urls if url not in self._fetched]:
                raise NotFetched(urls)
        for one in reversed(kept):
            if self._left < 0:
                break
            try:
                image = self._read(one)
            except BadField:
                if one.new:
                    raise
                continue
            self.marks = self.marks or Marks()
            one.replace(self.marks.of(len(self._images)))
            self._images.append(image)

    def tokens(
        self, text: str, tokenizer: Tokenizer, most: int
    ) -> tuple[list[int], tuple[Image, ...]]:
        """The ids of a text with marks, and its images. Raises BadField for `most` or more ids, and
        what `encode_within` raises."""
        before, *pieces = [text] if self.marks is None else self.marks.split(text)
        images = [self._images[int(number)] for number in pieces[::3]]
        if (size := sum(image.tokens for image in images)) >= most:
            raise too_long(f"its images are {size} tokens", most, "messages")
        info, ids, placed = self._info, encode_within(tokenizer, before, most), []
        words = tokenizer.decode([info.start_id, info.image_id, info.end_id], skip_special=False)
        for image, inside, after in zip(images, pieces[1::3], pieces[2::3], strict=True):
            # what the template writes around its words, such as a picture's number
            head, _, tail = inside.partition(words) if words in inside else ("", "", "")
            ids += [*tokenizer.encode(head), info.start_id]
            placed.append(replace(image, start=len(ids)))
            ids += [*[info.image_id] * image.tokens, info.end_id, *tokenizer.encode(tail)]
            ids += encode_within(tokenizer, after, most)
        return ids, tuple(placed)

    def _kept(self, found: Sequence[ImagePart], field: str) -> Sequence[ImagePart]:
        """Those within the limit. Above it the oldest are left out, a quarter of the limit at a
        time: each one changes the prompt from its place on, which then is in no cache. Raises
        BadField where the user sends too many now."""
        most, new = self._options.max_images, sum(one.new for one in found)
        if new > most:
            words = f"{field} has {new} images in the last message; at most {most} are read"
            raise BadField(f"{words}: send fewer (spark-run --max-images)", field)
        some = max(1, most // 4)
        over = -(-max(0, len(found) - most) // some) * some
        return found[min(over, len(found) - new) :]

    def _read(self, one: ImagePart) -> Image:
        """Raises BadField."""
        place, value, plain = one.source()
        try:
            data = self._data(value, plain, place)
            detail = one.detail()
            if not isinstance(detail, str | None):
                raise RequestError(f"detail is {short(detail)}; it must be auto, low or high")
            found = self._image(data, self._options.max_image_pixels, detail or "auto")
        except RequestError as error:
            raise BadField(f"{place}: {error}", place) from None
        self._left -= len(found.pixels)
        if self._left < 0:
            words = f"the images of the request are over {MOST_PIXELS >> 20} MiB of pixels together"
            raise BadField(f"{place}: {words}: send fewer or smaller ones", place)
        return Image(0, found.rows, found.columns, found.pixels, found.digest)

    def _image(self, data: bytes, most: int | None, detail: str) -> DecodedImage:
        """The image of a file, which is decoded once. Raises RequestError."""
        name = hashlib.blake2b(f"{most} {detail} ".encode(errors="replace"), digest_size=32)
        name.update(data)
        file, known = name.digest(), self._decoded
        if file not in known and (one := self._seen.get(file)) is not None:
            blank = bytes(3 * one.rows * one.columns * self._info.unit**2)
            known[file] = DecodedImage(one.rows, one.columns, blank, one.digest)
        elif file not in known:
            known[file] = decode(data, self._info, most, detail)
        # of files with the same pixels the first
        return known[self._files.setdefault(known[file].digest, file)]

    def leave_out(self, row: PreparedPrompt, blobs: list[bytes]) -> None:
        """Notes in a row what its images were decoded from, and empties the blobs, the last ones,
        of those that were seen."""
        row.files = tuple(self._files[image.digest] for image in row.images)
        for at, file in enumerate(reversed(row.files), 1):
            if file in self._seen:
                blobs[-at] = b""

    def _data(self, value: Any, plain: bool, place: str) -> bytes:
        """The encoded image of a URL, or of base64 alone (`plain`). Raises RequestError."""
        if not isinstance(value, str) or not value:
            raise RequestError(f"it is {short(value)}; {_SEND}")
        if place.endswith("file_id"):
            raise RequestError(f"it is {short(value)}, and this server stores no files; {_SEND}")
        head = _DATA.match(value)
        if head is None and _WEB.match(value):
            return self._at(value)
        if head is None and (not plain or _SCHEME.match(value)):
            raise RequestError(f"it is {short(value)}, no base64 data URI; {_SEND}")
        text = value[head.end() if head else 0 :]
        if len(text) // 4 * 3 > MOST_BYTES:
            raise RequestError(
                f"the image has over {MOST_BYTES >> 20} MiB; send it in fewer pixels or as JPEG"
            )
        try:
            # in lines, as e-mail and `base64 FILE` have it
            return base64.b64decode(re.sub(r"\r?\n", "", text), validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"it is not valid base64 ({error}); {_SEND}") from None

    def _at(self, url: str) -> bytes:
        """What was fetched. Raises RequestError."""
        if len(url) > MOST_URL:
            raise RequestError(f"the URL has {len(url)} characters; at most {MOST_URL} are read")
        words = "this server fetches no URLs (spark-run --media-domains allows some)"
        found = self._fetched.get(url, f"it is {short(url)}; {words}: {_SEND}")
        if isinstance(found, str):
            raise RequestError(found)
        return found
