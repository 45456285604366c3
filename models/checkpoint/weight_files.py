"""Which safetensors files of a folder are read: those of its index, or those that belong together.

Without an index `model.safetensors`, or a whole set of shards, is the model, and other files add to
it. A file of tensors that no text needs (a draft head, vision: `optional` prefixes) may be missing,
or be next to the files that the index names. Knows names, and no dtype.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from spark_engine import hints
from spark_engine.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "download this file again"
LORA = "merge the LoRA adapter into its base model, and give the result"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_MODEL = (
    "model.",
    "lm_head.",
    "language_model.",
)  # how names begin in a file that adds to a model without an index


def fail(file: str, what: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{file}: {what}; {remedy}")


def weight_files(
    folder: Path, names: Collection[str], table: Mapping[str, str] | None, optional: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """The files that are the model, of those in a folder or to be fetched into it, and notes about
    those that are missing and not needed. `table`: of tensor to file, where there is an index."""
    found = {name for name in names if name.endswith(".safetensors")}
    if table is None:
        return _unnamed(folder, found), []
    needed = {file for name, file in table.items() if not name.startswith(optional)}
    files, notes = sorted(set(table.values())), []
    for file in files:
        if Path(file).name != file or len(file) > 200:
            fail(INDEX, f"names {file[:80]!r}, which is not a plain file name", "do not trust it")
        if file not in found:
            if file in needed:
                fail(file, f"the shard is missing from {folder}", AGAIN)
            notes.append(f"{file} is missing; {INDEX} names no text tensor in it: built without it")
    if SINGLE in found and SINGLE not in files:
        what = f"is in a folder with {INDEX}, which does not name it"
        fail(SINGLE, what, "remove one of the two")
    return [file for file in files if file in found], notes


def _unnamed(folder: Path, found: Collection[str]) -> list[str]:
    models = sorted(name for name in found if not is_adapter(name))
    if SINGLE in models:
        return [SINGLE]
    sets = {(m[1], m[3]) for m in map(_SHARD.fullmatch, models) if m}
    for start, count in sorted(sets):
        shards = [
            f"{start}-{i:05}-of-{count}.safetensors" for i in range(1, min(int(count), 9999) + 1)
        ]
        missing = [name for name in shards if name not in models]
        if not missing:
            return shards
        if len(sets) == 1:
            fail(missing[0], f"the shard is missing from {folder}, as is {INDEX}", AGAIN)
    if models:
        return models
    if found:
        fail(min(found), "a LoRA adapter alone is no checkpoint", LORA)
    if words := hints.other_format(folder):
        raise CheckpointError(words)
    fail(SINGLE, f"missing from {folder}: there are no weights", "give a checkpoint's folder")


def is_model(file: str) -> bool:
    """True if the name says that a file without an index is the model, or a part of it."""
    return file == SINGLE or bool(_SHARD.fullmatch(file))


def is_adapter(file: str) -> bool:
    return file.startswith("adapter") or "lora" in file.lower()


def adds(
    names: Collection[str], known: Collection[str], optional: tuple[str, ...], index: bool
) -> bool:
    """True if a further file of these tensors belongs to the model that has the tensors `known`."""
    starts = optional if index else (*optional, *_MODEL)
    new = names and not any(name in known for name in names)
    return bool(new) and all(name.startswith(starts) for name in names)
