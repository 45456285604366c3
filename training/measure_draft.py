"""Measure how many drafts the quantised model keeps, in rounds as a server runs them: greedy, k
drafts a round, on held-out beginnings.

Knows a draft head in numpy, one token at a time in float32, with its own keys and values; it
shares no code with draft_head.py, which the tests hold to it. The model's own side recomputes the
whole text in each round.
  python -m training.measure_draft [--texts N --tokens N --drafts K]
"""

import argparse
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training import quantize
from training.evaluate import CHECKPOINT, Subject, chat_prompt, from_checkpoint
from training.lexicon import ANIMALS
from training.network import CHUNK
from training.quantize import Codes
from training.shape import PREFIX, TINY, Shape
from training.storyteller import tell

F32 = NDArray[np.float32]
BEGINNING = 24  # tokens of a held-out story that the model continues


def normal(x: F32, weight: F32, eps: float) -> F32:
    """x / rms(x) * (1 + w) over the last axis."""
    rms = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
    out: F32 = (x / rms * (1 + weight)).astype(np.float32)
    return out


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    out: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return out


@dataclass
class Cache:
    """Keys and values of one sequence, a row for each position [kv heads, D]."""

    keys: list[F32] = field(default_factory=list)
    values: list[F32] = field(default_factory=list)


class NumpyHead:
    """The head of a checkpoint, one token at a time."""

    def __init__(self, stored: Mapping[str, Codes], shape: Shape) -> None:
        self.shape = shape
        self.own = {
            name.removeprefix("mtp."): tensor.astype(np.float32)
            for name, tensor in stored.items()
            if name.startswith("mtp.")
        }
        plain = quantize.dequantize(stored, shape)
        self.embed, self.lm_head = plain[f"{PREFIX}embed_tokens.weight"], plain["lm_head"]

    def step(self, cache: Cache, position: int, hidden: F32, token: int) -> F32:
        """y [H] of one position. Writes its keys and values into the cache; drops what the cache
        held from there on.
        """
        own, shape = self.own, self.shape
        left = normal(self.embed[token], own["pre_fc_norm_embedding.weight"], shape.eps)
        right = normal(hidden, own["pre_fc_norm_hidden.weight"], shape.eps)
        x = own["fc.weight"] @ np.concatenate((left, right))
        inner = normal(x, own["layers.0.input_layernorm.weight"], shape.eps)
        x = x + self.attend(cache, position, inner)
        inner = normal(x, own["layers.0.post_attention_layernorm.weight"], shape.eps)
        x = x + self.experts(inner)
        return normal(x, own["norm.weight"], shape.eps)

    def attend(self, cache: Cache, position: int, x: F32) -> F32:
        """Gated attention of one token over the positions up to its own."""
        shape = self.shape
        own = {
            name.removeprefix("layers.0.self_attn."): tensor for name, tensor in self.own.items()
        }
        both = (own["q_proj.weight"] @ x).reshape(shape.heads, 2, shape.head_dim)
        k = (own["k_proj.weight"] @ x).reshape(shape.kv_heads, shape.head_dim)
        v = (own["v_proj.weight"] @ x).reshape(shape.kv_heads, shape.head_dim)
        q = self.turn(normal(both[:, 0], own["q_norm.weight"], shape.eps), position)
        del cache.keys[position:], cache.values[position:]
        cache.keys.append(self.turn(normal(k, own["k_norm.weight"], shape.eps), position))
        cache.values.append(v)
        keys, values = np.stack(cache.keys), np.stack(cache.values)  # [positions, kv heads, D]
        mixed = []
        for head in range(shape.heads):
            of = head // (shape.heads // shape.kv_heads)
            scores = keys[:, of] @ q[head] / np.sqrt(np.float32(shape.head_dim))
            weights = np.exp(scores - scores.max())
            mixed.append(weights @ values[:, of] / weights.sum() * sigmoid(both[head, 1]))
        out: F32 = own["o_proj.weight"] @ np.concatenate(mixed)
        return out

    def turn(self, x: F32, position: int) -> F32:
        """Rotary embedding of the first dims of [heads, D]: dim i goes with dim i + half."""
        half = self.shape.rotary_dim // 2
        angle = position * self.shape.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        out = x.copy()
        out[:, :half] = x[:, :half] * cos - x[:, half : 2 * half] * sin
        out[:, half : 2 * half] = x[:, half : 2 * half] * cos + x[:, :half] * sin
        return out

    def experts(self, x: F32) -> F32:
        """The best experts by the router, weighted, and the shared one by its gate."""
        own = {name.removeprefix("layers.0.mlp."): tensor for name, tensor in self.own.items()}
        scores = own["gate.weight"] @ x
        best = np.argsort(-scores, kind="stable")[: self.shape.top_k]
        share = np.exp(scores[best] - scores[best].max())
        out = np.zeros_like(x)
        for expert, part in zip(best, share / share.sum(), strict=True):
            gate, up = np.split(own["experts.gate_up_proj"][expert] @ x, 2)
            out += part * (own["experts.down_proj"][expert] @ (gate * sigmoid(gate) * up))
        gate, up = (own[f"shared_expert.{leaf}_proj.weight"] @ x for leaf in ("gate", "up"))
        shared = own["shared_expert.down_proj.weight"] @ (gate * sigmoid(gate) * up)
        total: F32 = out + sigmoid(own["shared_expert_gate.weight"] @ x) * shared
        return total

    def best(self, y: F32) -> int:
        """The token that the head expects."""
        return int((self.lm_head @ y).argmax())


@dataclass
class Sample:
    """A text in the making; `filled`: how many of its tokens the head has seen."""

    ids: list[int]
    end: int
    cache: Cache = field(default_factory=Cache)
    drafts: list[int] = field(default_factory=list)
    filled: int = 0

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.ids) >= self.end


@torch.no_grad()
def target_states(subject: Subject, texts: list[list[int]]) -> F32:
    """Hidden states after the last norm [texts, T, H] of texts padded to one length."""
    longest = max(map(len, texts))
    longest += -longest % CHUNK
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    hidden, _ = subject.network(ids, subject.dtype, subject.linear)
    states: F32 = hidden.float().numpy()
    return states


def play_round(
    sample: Sample, head: NumpyHead, hidden: F32, best: NDArray[np.int64], k: int
) -> int:
    """One round after the model has read ids + drafts (its best tokens in `best`): keep drafts,
    fill the head's cache, draft again. Gives the number of drafts kept.
    """
    kept, last = 0, len(sample.ids) - 1
    while kept < len(sample.drafts) and sample.drafts[kept] == best[last + kept]:
        kept += 1
    sample.ids += [*sample.drafts[:kept], int(best[last + kept])]
    for at in range(sample.filled, len(sample.ids) - 1):
        y = head.step(sample.cache, at, hidden[at], sample.ids[at + 1])
    sample.filled = len(sample.ids) - 1
    sample.drafts = [head.best(y)]
    for at in range(sample.filled, sample.filled + k - 1):
        y = head.step(sample.cache, at, y, sample.drafts[-1])
        sample.drafts.append(head.best(y))
    return kept


def measure(
    subject: Subject, head: NumpyHead, prompts: list[list[int]], tokens: int, k: int
) -> dict[str, object]:
    """Continue the prompts: how often the first, the first two, .. drafts were kept, and the tokens
    of a round.
    """
    stops = {subject.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    texts = [Sample(list(prompt), len(prompt) + tokens) for prompt in prompts]
    counts = np.zeros(k + 1, dtype=np.int64)
    while running := [text for text in texts if not text.done]:
        hidden = target_states(subject, [text.ids + text.drafts for text in running])
        with torch.no_grad():
            best = subject.network.logits(torch.from_numpy(hidden).to(subject.dtype))
        best = best.float().argmax(-1).numpy()
        for text, own, row in zip(running, hidden, best, strict=True):
            drafted, before = bool(text.drafts), len(text.ids)
            kept = play_round(text, head, own, row, k)
            ended = [at for at in range(before, len(text.ids)) if text.ids[at] in stops]
            if ended:
                text.end = ended[0]
            elif drafted:
                counts[kept] += 1
    rounds = int(counts.sum())
    at_least = counts[::-1].cumsum()[::-1][1:] / rounds
    return {
        "rounds": rounds,
        "kept": [round(float(share), 4) for share in at_least],
        "tokens a round": round(float(1 + at_least.sum()), 3),
    }


def beginnings(tokenizer: Tokenizer, number: int) -> dict[str, list[list[int]]]:
    """Prompts: beginnings of held-out stories, and stories asked for in chat."""
    rng = random.Random(930_000)
    sample = [tokenizer.encode(tell(rng).text).ids[:BEGINNING] for _ in range(number)]
    asks = [f"Tell me a short story about a {rng.choice(list(ANIMALS))}." for _ in range(number)]
    asked = [tokenizer.encode(chat_prompt(ask, thinking=False)).ids for ask in asks]
    return {"stories": sample, "chat": asked}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--head", type=Path, help="a head outside of the checkpoint")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stored = quantize.read_weights(arguments.checkpoint)
    if arguments.head:
        stored |= quantize.read_file(arguments.head)
    subject = from_checkpoint(arguments.checkpoint, torch.device("cpu"), torch.bfloat16)
    head = NumpyHead(stored, TINY)
    for name, prompts in beginnings(subject.tokenizer, arguments.texts).items():
        figures = measure(subject, head, prompts, arguments.tokens, arguments.drafts)
        print(json.dumps({name: figures}), flush=True)


if __name__ == "__main__":
    main()
