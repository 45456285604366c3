"""How a checkpoint resizes images, and which tokens stand for them.

Knows the keys of preprocessor_config.json (or `image_processor` in processor_config.json) and of
config.json. A key that is missing has the value of every published model: transformers' defaults
are another model's.
"""

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, Reader
from spark_engine.vision import COLOURS, MERGE, PATCH, VisionInfo

FILES = ("preprocessor_config.json", "processor_config.json")
LEAST_PIXELS, MOST_PIXELS = 1 << 16, 1 << 24
HALF = (0.5,) * COLOURS


def vision_info(config: Json, own: Json, both: Json) -> VisionInfo:
    """The values, from config.json and FILES, {} where a file is absent.

    Raises CheckpointError for values that are malformed or not supported.
    """
    ids = Reader(config, "config.json")
    name, row = (FILES[0], own) if own else (FILES[1], both.get("image_processor") or {})
    if not isinstance(row, dict) or not isinstance(size := row.get("size") or {}, dict):
        raise CheckpointError(f"{name} is malformed: take it from the model's source")
    pixels, keys = Reader(row, name), Reader(size, f"{name}: size")
    least = keys.count("shortest_edge", pixels.count("min_pixels", LEAST_PIXELS))
    most = keys.count("longest_edge", pixels.count("max_pixels", MOST_PIXELS))
    for key, legal in (("patch_size", PATCH), ("merge_size", MERGE)):
        if pixels.count(key, legal) != legal:
            raise CheckpointError(f"{name}: {key} is {row[key]}; {legal} is compiled, no other")
    mean, std = (_colours(row, key, name) for key in ("image_mean", "image_std"))
    kinds = ("image", "vision_start", "vision_end")
    tokens = (ids.count(f"{kind}_token_id", least=0) for kind in kinds)
    if not least <= most or min(std) <= 0:
        raise CheckpointError(f"{name}: size {least} to {most}, image_std {std}: no image fits")
    return VisionInfo(PATCH, MERGE, least, most, mean, std, *tokens)


def _colours(row: Json, key: str, name: str) -> tuple[float, ...]:
    found = HALF if row.get(key) is None else row[key]
    numbers = isinstance(found, list | tuple) and all(type(x) in (int, float) for x in found)
    if not numbers or len(found) != COLOURS or not all(abs(x) < 1e3 for x in found):
        raise CheckpointError(f"{name}: {key} is {found!r}; expected {COLOURS} numbers")
    return tuple(map(float, found))
