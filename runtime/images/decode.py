"""The bytes of an image file become the pixels that the vision tower reads.

The values are those of transformers' `Qwen2VLImageProcessorPil` after `exif_transpose`: white
behind what is transparent, bicubic on uint8. Files are untrusted: this runs in a process with
limits of memory and time. Knows no URL, no request and no tower.
"""

import hashlib
import io
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from spark_engine.runtime.images.sizes import BadImage, resized
from spark_engine.vision import DIGEST, VisionInfo

MOST_BYTES = 20 << 20  # of a file
MOST_SENT = 48 << 20  # pixels of a file (8192 x 6144); a process needs 17 bytes for each at most
STRIP = 256  # rows that are put on white at a time: the whole would take twice the memory
READ = "PNG, JPEG, WebP, GIF or BMP"
# By their first bytes, and not by `Image.open`: that also loads and tries readers of other formats.
FORMATS: tuple[tuple[bytes, type[ImageFile.ImageFile]], ...] = (
    (b"\x89PNG\r\n\x1a\n", PngImageFile),
    (b"\xff\xd8\xff", JpegImageFile),
    (b"GIF87a", GifImageFile),
    (b"GIF89a", GifImageFile),
    (b"BM", BmpImageFile),
    (b"RIFF", WebPImageFile),
)
# For the error alone.
NOT_READ = (
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "PSD"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"),
)
_BOXES = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}  # after `ftyp`
TURNS = {  # by the number that EXIF has for the orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The fields of `spark_engine.vision.Image` without its place in a prompt: rows and columns of
    the residual stream, pixels by patches, digest of all of it."""

    rows: int
    columns: int
    pixels: bytes
    digest: bytes


def decode(
    data: bytes, info: VisionInfo, most_pixels: int | None = None, detail: str = "auto"
) -> DecodedImage:
    """The first picture of a PNG, JPEG, WebP, GIF or BMP file, resized for the tower.

    `most_pixels`: the server's limit of the resized area. `detail`: of OpenAI's API.

    Raises BadImage, in one sentence, for whatever is wrong with the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about damage that it repairs
            image = on_white(_turned(_read(data)))
        height, width = resized(image.height, image.width, info, most_pixels, detail)
        pixels = image.resize((width, height), Image.Resampling.BICUBIC).tobytes()
        rows, columns = height // info.unit, width // info.unit
        # here and not in the engine's loop: it takes 50 ms for the largest image
        ordered = _by_patches(pixels, rows, columns, info)
    except MemoryError:
        words = "decoding the image takes more memory than a request has"
        raise BadImage(f"{words}: send a smaller one") from None
    digest = hashlib.blake2b(f"{height} x {width} ".encode(), digest_size=DIGEST)
    digest.update(pixels)
    return DecodedImage(rows, columns, ordered, digest.digest())


def _by_patches(pixels: bytes, rows: int, columns: int, info: VisionInfo) -> bytes:
    """u8 [4 · rows · columns, 3 · patch · patch] of pixels [rows · unit, columns · unit, 3]: the
    patches of one row of the residual stream follow one another; each is (colour, y, x)."""
    shape = rows, info.merge, info.patch, columns, info.merge, info.patch, 3
    return np.frombuffer(pixels, np.uint8).reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5).tobytes()


def _read(data: bytes) -> Image.Image:
    """The file's first picture as it is stored. Its size is checked before pixels are decoded."""
    if len(data) > MOST_BYTES:
        raise BadImage(f"the image has {len(data)} bytes; at most {MOST_BYTES} are read")
    kind = next((kind for first, kind in FORMATS if data.startswith(first)), None)
    if kind is None:
        raise BadImage(f"{_name(data)} is not read: send {READ}")
    try:
        image = kind(io.BytesIO(data))
        if image.width * image.height > MOST_SENT:
            words = f"{image.width} x {image.height} pixels are more than {MOST_SENT}"
            raise BadImage(f"{words}: send a smaller image")
        if image.tile and image.tile[0].codec_name == "bmp_rle":  # seconds for a few bytes
            raise BadImage("BMP with run-length compression is not read: send it as PNG")
        image.load()
    except (BadImage, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise BadImage(f"the image has more than {MOST_SENT} pixels: send a smaller one") from None
    except Exception as error:  # damaged data raises about any class in Pillow
        if "truncated" in str(error).lower():
            raise BadImage("the image is truncated: send the whole file") from None
        words = "the image is damaged, or of a kind that is not read"
        raise BadImage(f"{words}: save it again as PNG") from None
    return image


def _name(data: bytes) -> str:
    """What data is that is none of FORMATS."""
    if data[4:8] == b"ftyp":
        return _BOXES.get(data[8:12], "a video")
    names = (name for first, name in NOT_READ if data.startswith(first))
    return next(names, "this kind of file" if data else "an empty file")


def _turned(image: Image.Image) -> Image.Image:
    """The picture as its EXIF data says that it is to be shown."""
    try:
        turn = TURNS.get(image.getexif().get(Base.Orientation, 1))
    except MemoryError:
        raise
    except Exception:  # damaged data about the picture does not change the picture
        turn = None
    return image if turn is None else image.transpose(turn)


def on_white(image: Image.Image) -> Image.Image:
    """RGB, with white behind what is transparent."""
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    found = Image.new("RGB", image.size)
    for top in range(0, image.height, STRIP):
        box = (0, top, image.width, min(top + STRIP, image.height))
        part = image.crop(box).convert("RGBA")
        if part.getchannel("A").getextrema()[0] != 255:
            part = Image.alpha_composite(Image.new("RGBA", part.size, "white"), part)
        found.paste(part.convert("RGB"), box)
    return found
