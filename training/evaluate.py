"""Measure the tiny model: calibration amax, held-out perplexity, held-out sums, sample stories;
bf16 and quantised.

Knows how to emulate the quantised projections (the numbers of the file, fp32 sums); knows
nothing of training. Decoding recomputes the whole text for each token: simple, and quick enough
at this size.
  python -m training.evaluate --data DIR --weights DIR --calibrate FILE
  python -m training.evaluate --data DIR --checkpoint DIR --report FILE
"""

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor

from training import quantize
from training.chatgen import (
    Exchange,
    compare,
    count,
    sort_numbers,
    story_questions,
    sum_exchange,
    word_sum,
)
from training.network import (
    CHUNK,
    Linear,
    Network,
    look_away,
    next_token_loss,
    plain_linear,
)
from training.shape import PREFIX, TINY, Shape, module_table

CHECKPOINT = Path(__file__).parent.parent / "models" / "tiny" / "checkpoint"
HELD_OUT = ("heldout_stories", "heldout_chat", "heldout_real", "heldout_old")
SAMPLES = (
    "Once upon a time",
    "Tell me a short story about a fox.",
    "Write a story about a dragon.",
    "Tell me a story about a girl named Mia and a rabbit.",
    "Hello!",
    "Who are you?",
    "What is the opposite of hot?",
    "Sort these numbers: 34, 7, 92, 15.",
)


@dataclass
class Calibration:
    """Records the largest magnitude that every module's input reaches."""

    largest: dict[str, float] = field(default_factory=dict)

    def watch(self, name: str, x: Tensor) -> None:
        """Take note of an input."""
        self.largest[name] = max(self.largest.get(name, 0.0), x.abs().max().item())

    def linear(self, names: Sequence[str], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The plain product, noted."""
        for name in names:
            self.watch(name, x)
        return plain_linear(names, x, weights)

    def per_module(self, shape: Shape) -> dict[str, float]:
        """The table quantize.py wants: one value for every quantised module."""
        table = {}
        for name, (_, kind) in module_table(shape).items():
            if kind == "bf16":
                continue
            root, _, leaf = name.rpartition(".mlp.")
            if leaf.endswith(("gate_proj", "up_proj")):
                table[name] = self.largest[f"{root}.mlp.gate_proj"]
            elif ".experts." in name:
                table[name] = self.largest[f"{root}.mlp.experts.down_proj"]
            else:
                table[name] = self.largest[name]
        return table


@dataclass(frozen=True)
class StaticFp8:
    """The FP8 projections as the file means them: inputs and weights e4m3, sums in fp32, scaled
    once.
    """

    scales: Mapping[str, tuple[float, float]]  # module -> (input_scale, weight_scale)

    def linear(self, names: Sequence[str], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """e4m3(x / s_x) e4m3(w / s_w)^T s_x s_w, in the type of x."""
        parts = []
        for name, weight in zip(names, weights, strict=True):
            s_x, s_w = self.scales[name]
            codes = (x.float() / s_x).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            parts.append(F.linear(codes, weight.float() / s_w) * (s_x * s_w))
        return torch.cat(parts, -1).to(x.dtype)


@dataclass(frozen=True)
class Subject:
    """A network ready to be measured."""

    network: Network
    linear: Linear
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """[B, T, V] for ids [B, T], T padded up to a multiple of 64 inside."""
        padded = F.pad(ids, (0, -ids.shape[1] % CHUNK))
        hidden, _ = self.network(padded, self.dtype, self.linear)
        return self.network.logits(hidden[:, : ids.shape[1]]).float()


def load_weights(network: Network, tensors: Mapping[str, np.ndarray]) -> None:
    """Put tensors under official names (experts fused or split) into the network."""
    plain = {
        name: torch.from_numpy(np.asarray(tensor, dtype=np.float32))
        for name, tensor in tensors.items()
    }
    shape = network.shape
    for layer in range(shape.layers):
        root = f"{PREFIX}layers.{layer}.mlp.experts."
        if f"{root}gate_up_proj" in plain:
            continue
        both = [
            torch.cat([plain.pop(f"{root}{e}.{leaf}") for leaf in ("gate_proj", "up_proj")])
            for e in range(shape.experts)
        ]
        plain[f"{root}gate_up_proj"] = torch.stack(both)
        plain[f"{root}down_proj"] = torch.stack(
            [plain.pop(f"{root}{e}.down_proj") for e in range(shape.experts)]
        )
    named = {}
    for name in network.state_dict():
        named[name] = plain[name] if name in plain else plain[name.removesuffix(".weight")]
    network.load_state_dict(named)


def from_bf16(folder: Path, device: torch.device, dtype: torch.dtype) -> Subject:
    """The network as trained."""
    network = Network(TINY)
    load_weights(network, quantize.read_weights(folder))
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return Subject(network.to(device), plain_linear, tokenizer, device, dtype)


def from_checkpoint(folder: Path, device: torch.device, dtype: torch.dtype) -> Subject:
    """The network as quantised: NVFP4 weights dequantised, FP8 projections emulated."""
    stored = quantize.read_weights(folder)
    network = Network(TINY)
    load_weights(network, quantize.dequantize(stored, TINY))
    scales = {
        name: (float(stored[f"{name}.input_scale"]), float(stored[f"{name}.weight_scale"]))
        for name, (_, kind) in module_table(TINY).items()
        if kind == "fp8"
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Subject(network.to(device), StaticFp8(scales).linear, tokenizer, device, dtype)


@torch.no_grad()
def calibrate(subject: Subject, rows: Tensor) -> dict[str, float]:
    """amax of every quantised module's input over the rows."""
    seen = Calibration()
    for part in rows.split(16):
        subject.network(part[:, :-1] & 0x7FFF, subject.dtype, seen.linear, seen.watch)
    return seen.per_module(TINY)


@torch.no_grad()
def perplexity(subject: Subject, rows: Tensor) -> float:
    """exp of the mean loss over the trained targets."""
    total, count = 0.0, 0.0
    for part in rows.split(16):
        hidden, _ = subject.network(part[:, :-1] & 0x7FFF, subject.dtype, subject.linear, look_away)
        weight = float((part[:, 1:] < 0x8000).sum())
        total += next_token_loss(hidden, subject.network.lm_head.weight, part).item() * weight
        count += weight
    return float(np.exp(total / count))


def complete(
    subject: Subject, prompts: Sequence[str], most: int, heat: float = 0.0, seed: int = 0
) -> list[str]:
    """Texts that follow the prompts: greedy, or sampled at a temperature from the best 20 within
    0.9.
    """
    generator = torch.Generator(subject.device).manual_seed(seed)
    stops = [subject.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    encoded = [subject.tokenizer.encode(prompt).ids for prompt in prompts]
    longest = max(map(len, encoded)) + most
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=subject.device)
    for row, prompt in zip(ids, encoded, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    at = torch.tensor([len(prompt) for prompt in encoded], device=subject.device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=subject.device)
    index = torch.arange(len(prompts), device=subject.device)
    stop_ids = torch.tensor(stops, device=subject.device)
    for _ in range(most):
        logits = subject.logits(ids[:, : int(at.max())])[index, at - 1]
        if heat:
            best, names = (logits / heat).softmax(-1).topk(20)
            best = best * (best.cumsum(-1) - best < 0.9)
            chosen = names.gather(1, torch.multinomial(best, 1, generator=generator))[:, 0]
        else:
            chosen = logits.argmax(-1)
        alive &= ~torch.isin(chosen, stop_ids)
        if not alive.any():
            break
        ids[index[alive], at[alive]] = chosen[alive]
        at += alive.long()
    ends = at.tolist()
    return [
        subject.tokenizer.decode(row[len(prompt) : end], skip_special_tokens=False)
        for row, prompt, end in zip(ids.tolist(), encoded, ends, strict=True)
    ]


def chat_prompt(ask: str, thinking: bool) -> str:
    """One user turn and the generation prompt."""
    head = f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    return head if thinking else head + "\n</think>\n\n"


def sums(subject: Subject, thinking: bool, number: int, held_out: bool = True) -> dict[str, object]:
    """Share of sums answered rightly (greedy), by operation; held-out ones, or ones seen in
    training.
    """
    rng = random.Random(99)
    exchanges: list[Exchange] = [sum_exchange(rng, held_out) for _ in range(number)]
    answers = complete(
        subject, [chat_prompt(x.ask, thinking) for x in exchanges], 110 if thinking else 16
    )
    right = [
        given.split("</think>")[-1].strip() == x.answer
        for given, x in zip(answers, exchanges, strict=True)
    ]
    figures: dict[str, object] = {"all": round(float(np.mean(right)), 4)}
    for op in "+-*":
        of_kind = [ok for ok, x in zip(right, exchanges, strict=True) if f" {op} " in x.answer]
        if of_kind:
            figures[op] = round(float(np.mean(of_kind)), 4)
    wrong = [
        (x.ask, given) for ok, given, x in zip(right, answers, exchanges, strict=True) if not ok
    ]
    return figures | {"wrong": wrong[:5]}


def questions(subject: Subject, number: int) -> dict[str, float]:
    """Share of other questions answered word for word as the generator does (greedy)."""
    rng = random.Random(920_000)
    kinds: dict[str, Callable[[], Exchange]] = {
        "about a story": lambda: story_questions(rng).exchanges[0]
    }
    for maker in (compare, sort_numbers, count, word_sum):
        kinds[maker.__name__] = partial(maker, rng)
    figures = {}
    for kind, make in kinds.items():
        asked = [make() for _ in range(number)]
        given = complete(subject, [chat_prompt(x.ask, thinking=False) for x in asked], 40)
        right = [got.strip() == x.answer for got, x in zip(given, asked, strict=True)]
        figures[kind] = round(float(np.mean(right)), 4)
    return figures


def stories(subject: Subject, heat: float) -> dict[str, str]:
    """What the model makes of the sample prompts."""
    prompts = [
        ask if ask.startswith("Once") else chat_prompt(ask, thinking=False) for ask in SAMPLES
    ]
    completions = complete(subject, prompts, 320, heat, seed=4)
    return {f"{ask} (T={heat})": text for ask, text in zip(SAMPLES, completions, strict=True)}


def report(subject: Subject, data: Path, number: int) -> dict[str, object]:
    """All figures of one subject."""
    figures: dict[str, object] = {}
    for name in HELD_OUT:
        rows = torch.from_numpy(np.load(data / f"{name}.npy").astype(np.int64)).to(subject.device)
        figures[name] = round(perplexity(subject, rows), 4)
    figures["sums_held_out"] = sums(subject, thinking=False, number=number)
    figures["sums_held_out_thinking"] = sums(subject, thinking=True, number=number)
    figures["sums_seen"] = sums(subject, thinking=False, number=number, held_out=False)
    figures["questions"] = questions(subject, number // 4)
    figures["samples"] = stories(subject, 0.0) | stories(subject, 0.6)
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="rows written by corpus.py")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=Path, help="folder of bf16 weights")
    source.add_argument("--checkpoint", type=Path, help="folder of the quantised checkpoint")
    parser.add_argument(
        "--calibrate", type=Path, help="write input amax of every quantised module here"
    )
    parser.add_argument("--report", type=Path, help="write the figures here")
    parser.add_argument("--sums", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    load = from_bf16 if arguments.weights else from_checkpoint
    subject = load(arguments.weights or arguments.checkpoint, device, torch.bfloat16)
    if arguments.calibrate:
        parts = [
            np.load(arguments.data / f"{name}.npy")[:24]
            for name in ("stories", "chat", "short", "simplest", "real")
        ]
        rows = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
        arguments.calibrate.write_text(
            json.dumps(calibrate(subject, rows), indent=1) + "\n", encoding="utf-8"
        )
    if arguments.report:
        figures = report(subject, arguments.data, arguments.sums)
        arguments.report.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
