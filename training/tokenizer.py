"""Train the tiny model's tokenizer: byte-level BPE with Qwen's special tokens, 4,096 ids in all.

Knows the pre-split rule and the token list; knows nothing of the model.
  python -m training.tokenizer --texts DIR
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from training.chatgen import chat
from training.storyteller import tell

CHECKPOINT = Path(__file__).parent.parent / "models" / "tiny" / "checkpoint"
VOCABULARY = 4096
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# Contractions; letters with one leading mark; single digits; marks; line ends; other white space
# (Qwen3.5's rule).
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sample_text(texts: Path, rng: random.Random) -> Iterator[str]:
    """The real documents, and as much again of generated stories and chat."""
    for path in sorted(texts.glob("*.txt")):
        limit = 1_500_000
        yield path.read_text(encoding="utf-8")[:limit].replace("<|endoftext|>", "")
    for _ in range(6000):
        yield tell(rng).text
        for exchange in chat(rng).exchanges:
            yield f"user\n{exchange.ask}\nassistant\n{exchange.thought}\n\n{exchange.answer}"


def train(texts: Path, seed: int) -> Tokenizer:
    """A tokenizer; its last ids are the special tokens, in Qwen's order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL) - len(VISIBLE),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(texts, random.Random(seed)), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in VISIBLE])
    return tokenizer


def config(tokenizer: Tokenizer) -> dict[str, object]:
    """tokenizer_config.json as transformers reads it; the chat template is in another file."""
    tokens = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in CONTROL,
        }
        for text in CONTROL + VISIBLE
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": tokens,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    """Write tokenizer.json (compact) and tokenizer_config.json into the checkpoint folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--texts", type=Path, required=True, help="folder of the training texts (*.txt)"
    )
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    tokenizer = train(arguments.texts, arguments.seed)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the texts gave only {tokenizer.get_vocab_size()} tokens; give more text")
    packed = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (CHECKPOINT / "tokenizer.json").write_text(packed + "\n", encoding="utf-8")
    (CHECKPOINT / "tokenizer_config.json").write_text(
        json.dumps(config(tokenizer), indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
