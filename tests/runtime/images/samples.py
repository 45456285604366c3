"""Image files of every mode and format that is read, drawn at random; and damaged ones."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from spark_engine.vision import VisionInfo

# least_pixels and most_pixels are low, so that small images are shrunk and grown too
INFO = VisionInfo(16, 2, 8192, 40_000, (0.5,) * 3, (0.5,) * 3, 7, 8, 9)
QWEN = VisionInfo(16, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3, 7, 8, 9)
ORIENTATION = 0x0112
Draw = Callable[[np.random.Generator, tuple[int, int]], Image.Image]


def _noise(rng: np.random.Generator, size: tuple[int, int], bands: int) -> np.ndarray:
    """u8 [h, w, bands]: smooth, with edges and noise."""
    width, height = size
    y, x = np.mgrid[:height, :width]
    slopes = rng.uniform(3, 40, (2, bands))
    waves = np.sin(x[..., None] / slopes[0] + y[..., None] / slopes[1])
    values = 128 + 100 * waves + rng.normal(0, 20, (height, width, bands))
    values[: height // 2, : width // 3] = rng.integers(0, 256, bands)
    return values.clip(0, 255).astype(np.uint8)


def _of(mode: str, bands: int) -> Draw:
    def draw(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
        values = _noise(rng, size, bands)
        return Image.frombytes(mode, size, values.tobytes())

    return draw


def _bits(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    return _of("L", 1)(rng, size).convert("1")


def _deep(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    values = _noise(rng, size, 1)[..., 0].astype(np.uint16) * 3
    return Image.fromarray(values)


def _palette(transparency: int | bytes | None = None, colours: int = 256) -> Draw:
    def draw(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
        values = np.minimum(_noise(rng, size, 1), colours - 1)
        image = Image.frombytes("P", size, values.tobytes())
        image.putpalette(rng.integers(0, 256, 3 * colours, np.uint8).tobytes())
        if transparency is not None:
            image.info["transparency"] = transparency
        return image

    return draw


def _clear(mode: str, bands: int, colour: int | tuple[int, ...]) -> Draw:
    def draw(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
        image = _of(mode, bands)(rng, size)
        image.paste(colour, (0, 0, size[0] // 2 + 1, size[1] // 2 + 1))
        image.info["transparency"] = colour
        return image

    return draw


_ALPHAS = bytes(range(0, 256, 2)) + bytes(range(255, 0, -2))
# (format, what is drawn, arguments of save)
KINDS: tuple[tuple[str, Draw, dict[str, object]], ...] = (
    ("PNG", _bits, {}),
    ("PNG", _of("L", 1), {}),
    ("PNG", _of("LA", 2), {}),
    ("PNG", _of("RGB", 3), {}),
    ("PNG", _of("RGBA", 4), {}),
    ("PNG", _deep, {}),
    ("PNG", _palette(), {}),
    ("PNG", _palette(colours=13), {"bits": 4}),
    ("PNG", _palette(3), {}),
    ("PNG", _palette(_ALPHAS), {}),
    ("PNG", _clear("RGB", 3, (9, 200, 77)), {}),
    ("PNG", _clear("L", 1, 9), {}),
    ("JPEG", _of("L", 1), {"quality": 90}),
    ("JPEG", _of("RGB", 3), {"quality": 60}),
    ("JPEG", _of("RGB", 3), {"progressive": True, "subsampling": 0}),
    ("JPEG", _of("YCbCr", 3), {}),
    ("JPEG", _of("CMYK", 4), {"quality": 80}),
    ("WEBP", _of("RGB", 3), {"method": 0}),
    ("WEBP", _of("RGB", 3), {"lossless": True, "method": 0}),
    ("WEBP", _of("RGBA", 4), {"lossless": True, "method": 0}),
    ("GIF", _of("L", 1), {}),
    ("GIF", _palette(colours=40), {}),
    ("GIF", _palette(5), {"transparency": 5}),
    ("BMP", _bits, {}),
    ("BMP", _of("L", 1), {}),
    ("BMP", _palette(), {}),
    ("BMP", _of("RGB", 3), {}),
    ("BMP", _of("RGBA", 4), {}),
)
ANIMATED = ("GIF", "WEBP", "PNG")  # every ninth file of these has further pictures


def file_of(kind: int, seed: int, size: tuple[int, int]) -> bytes:
    """A file of KINDS[kind mod its length]. Two in three of a format with EXIF are turned."""
    form, draw, options = KINDS[kind % len(KINDS)]
    rng = np.random.default_rng(seed)
    image = draw(rng, size)
    more = dict(options)
    if form in ("JPEG", "PNG", "WEBP") and seed % 3:
        exif = Image.Exif()
        exif[ORIENTATION] = int(rng.integers(0, 10))  # 0 and 9 say nothing
        more["exif"] = exif
    if form in ANIMATED and seed % 9 == 0 and image.mode in ("L", "RGB", "RGBA"):
        more |= {"save_all": True, "append_images": [draw(rng, size)]}
    return saved(image, form, **more)


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def size_of(seed: int) -> tuple[int, int]:
    """Width and height up to 300, odd ones and strips among them."""
    rng = np.random.default_rng(seed)
    most = 300 if seed % 4 else 40
    width, height = (int(side) for side in rng.integers(1, most, 2))
    return (width, height) if max(width, height) <= 200 * min(width, height) else (width, 2)
