"""`VisionInfo` from a checkpoint's config.json and its preprocessor's file.

Knows the keys of transformers' `Qwen2VLImageProcessor` and the values that Qwen3.5 publishes (the
class has others, of an older model). Knows no tensor of the tower.
"""

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, Reader, malformed_json
from spark_engine.models.config.published_values import text_of
from spark_engine.vision import VisionInfo

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
LEAST_PIXELS, MOST_PIXELS = 65_536, 16_777_216
_ALLOWED = 1 << 26  # pixels
# What is computed in one way only; absent means this too.
_FIXED: dict[str, tuple[object, ...]] = {
    "resample": (3, "bicubic"),
    "rescale_factor": (1 / 255,),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
}


def vision_info(config: Json, preprocessor: Json, processor: Json) -> VisionInfo | None:
    """How images are read; None for a checkpoint without a vision tower. `preprocessor` and
    `processor`: the objects of the two files, {} where absent; the second one's `image_processor`
    is used before the first, as in transformers.

    Raises CheckpointError naming file and key for a value that is malformed, out of range, not
    supported, or another one than config.json has.
    """
    if not config.get("vision_config"):
        return None
    file, row = PREPROCESSOR, preprocessor.get("image_processor") or preprocessor
    if processor.get("image_processor"):
        file, row = f"{PROCESSOR}: image_processor", processor["image_processor"]
    with malformed_json(file):
        _check_fixed(file, row)
        patch, merge = _tower_sizes(config, Reader(row, file))
        least, most = _areas(file, row)
        mean = _colours(file, row, "image_mean", least=0.0)
        std = _colours(file, row, "image_std", least=1e-3)
    image, start, end = _tokens(config)
    return VisionInfo(patch, merge, least, most, mean, std, image, start, end)


def _check_fixed(file: str, row: Json) -> None:
    for key, legal in _FIXED.items():
        if (value := row.get(key)) is not None and value not in legal:
            raise CheckpointError(f"{file}: {key} is {value!r}; supported: {legal[0]!r}")


def _tower_sizes(config: Json, row: Reader) -> tuple[int, int]:
    """Pixels of a patch, patches of a row's side. The tower's sizes decide; the preprocessor's must
    be the same."""
    tower = Reader(config["vision_config"], "config.json: vision_config")
    pairs = (("patch_size", "patch_size", 16), ("spatial_merge_size", "merge_size", 2))
    sizes = []
    for own, its, default in (*pairs, ("temporal_patch_size", "temporal_patch_size", 2)):
        size = tower.count(own, default, most=64)
        if (other := row.count(its, size)) != size:
            words = f"{its} is {other}, but config.json: vision_config.{own} is {size}"
            raise CheckpointError(f"{row.where}: {words}; take both files from one source")
        sizes.append(size)
    return sizes[0], sizes[1]


def _areas(file: str, row: Json) -> tuple[int, int]:
    """The least and the greatest area of an image in pixels."""
    size = Reader(row.get("size") or {}, f"{file}: size")
    own = Reader(row, file)  # the older names come first, as in transformers
    least = own.count(
        "min_pixels", size.count("shortest_edge", LEAST_PIXELS, most=_ALLOWED), most=_ALLOWED
    )
    most = own.count(
        "max_pixels", size.count("longest_edge", MOST_PIXELS, most=_ALLOWED), most=_ALLOWED
    )
    if least > most:
        words = f"images have at least {least} pixels and at most {most}"
        raise CheckpointError(f"{file}: {words}; take the file from the model's source")
    return least, most


def _colours(file: str, row: Json, key: str, least: float) -> tuple[float, ...]:
    value = row.get(key)
    values = [0.5] * 3 if value is None else value if isinstance(value, list) else [value] * 3
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(values) != 3 or len(numbers) != 3 or not all(least <= v <= 1 for v in numbers):
        words = f"expected three numbers from {least} to 1"
        raise CheckpointError(f"{file}: {key} is {value!r}: {words}")
    return tuple(float(v) for v in numbers)


def _tokens(config: Json) -> tuple[int, int, int]:
    """Ids of an image's rows, of its start and of its end."""
    ids = Reader(config, "config.json")
    last = text_of(config).count("vocab_size") - 1
    image = ids.count("image_token_id", 248_056, least=0, most=last)
    start = ids.count("vision_start_token_id", 248_053, least=0, most=last)
    end = ids.count("vision_end_token_id", 248_054, least=0, most=last)
    if len({image, start, end}) != 3:
        words = f"image_token_id {image}, vision_start_token_id {start}, vision_end_token_id {end}"
        raise CheckpointError(f"config.json: {words}: each must be another token")
    return image, start, end
