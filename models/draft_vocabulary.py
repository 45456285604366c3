"""The shipped list of ids that a draft head may draft from, and the vocabulary that it is for.

Knows the list (draft_vocabulary.json) and how a tokenizer.json is known to have that vocabulary;
knows no options. `training/draft_vocabulary.py` counts the list.
"""

import hashlib
import json
import zlib
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")


def listed(rows: int, folder: Path) -> tuple[int, ...]:
    """The ids of the list, ascending, for a model with so many rows of its vocabulary and the
    tokenizer.json of this folder; empty if the list is for another vocabulary.

    Where there is no such file, the number of rows decides.
    """
    known = json.loads(FILE.read_text())
    if rows != known["rows"]:
        return ()
    try:
        vocabulary = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
        if digest(vocabulary, known["tokens"]) != known["digest"]:
            return ()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # the build will name it
        return ()
    bits = np.frombuffer(zlib.decompress(b64decode(known["ids"])), np.uint8)
    return tuple(np.flatnonzero(np.unpackbits(bits)).tolist())


def digest(vocabulary: Mapping[str, int], tokens: int) -> str:
    """BLAKE2b of the tokens with the ids below `tokens`, in their order: those that text has."""
    own = sorted((i, token) for token, i in vocabulary.items() if i < tokens)
    text = "\n".join(f"{i} {token}" for i, token in own)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
