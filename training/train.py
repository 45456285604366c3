"""Train the tiny model from scratch on the rows that corpus.py wrote.

Knows the mixture, the schedule and how to stop and resume; the maths is network.py's. A run may
be split: it stops by itself after --time-limit seconds, and the same command resumes from the
saved state.
  python -m training.train --data DIR --work DIR --steps 9400
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from training.muon import Muon
from training.network import Network, next_token_loss
from training.shape import TINY

MAIN = MappingProxyType(
    {"stories": 0.36, "chat": 0.31, "short": 0.28, "real": 0.02, "old": 0.012, "tales": 0.018}
)
FINAL = MappingProxyType(
    {"stories": 0.30, "chat": 0.38, "short": 0.31, "real": 0.005, "simplest": 0.005}
)
HELD_OUT = ("heldout_stories", "heldout_chat", "heldout_real", "heldout_old")
WARM_UP, FALL_FROM, FINAL_FROM = 200, 0.65, 0.82
BALANCE = 0.005
SHARD_BYTES = 12 << 20


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up, level, then straight down to zero."""
    fall = (steps - step) / (steps * (1 - FALL_FROM))
    return peak * min(1.0, (step + 1) / min(WARM_UP, max(1, steps // 10)), fall)


class Rows:
    """All parts of the corpus on the device, drawn from by a mixture."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        names = {*MAIN, *FINAL, *HELD_OUT}
        self.parts = {
            name: torch.from_numpy(np.load(folder / f"{name}.npy").view(np.int16)).to(device)
            for name in names
        }

    def take(self, name: str, at: Tensor) -> Tensor:
        """Rows of one part, widened: int64 [n, 1025] with bit 15 for ids that are not trained."""
        return self.parts[name][at].long() & 0xFFFF

    def batch(self, mixture: Mapping[str, float], size: int, seed: int) -> Tensor:
        """A batch drawn by the mixture; the seed fixes it."""
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(size, list(mixture.values()))
        drawn = []
        for name, count in zip(mixture, counts, strict=True):
            at = torch.from_numpy(rng.integers(0, len(self.parts[name]), count)).to(self.device)
            drawn.append(self.take(name, at))
        return torch.cat(drawn)


class Trainer:
    """Network, optimisers and the step counter."""

    def __init__(self, device: torch.device, compiled: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.device, self.seed, self.done, self.seconds = device, seed, 0, 0.0
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.network = Network(TINY).to(device)
        matrices: list[tuple[Tensor, int]] = []
        tables: list[Tensor] = []
        vectors: list[Tensor] = []
        for name, parameter in self.network.named_parameters():
            if name.endswith(("gate_up_proj",)):
                matrices.append((parameter, TINY.expert_width))
            elif (
                "proj_a" in name
                or "proj_b" in name
                or "gate.weight" in name
                or parameter.shape[1:2] in ((), (1,))
            ):
                vectors.append(parameter)
            elif "embed" in name or "lm_head" in name:
                tables.append(parameter)
            else:
                matrices.append((parameter, parameter.shape[-2]))
        self.muon = Muon(matrices)
        groups = [
            {"params": tables, "weight_decay": 0.05},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), eps=1e-10, fused=device.type == "cuda"
        )
        self.loss = next_token_loss
        if compiled:
            for layer in self.network.model.language_model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(next_token_loss, dynamic=False)

    def measure(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(next-token loss, balance loss) of rows."""
        hidden, balance = self.network(rows[:, :-1] & 0x7FFF, self.dtype)
        return self.loss(hidden, self.network.lm_head.weight, rows), balance

    def step(self, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One update."""
        loss, balance = self.measure(rows)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.muon.step(rate)
        self.network.zero_grad(set_to_none=True)
        self.done += 1
        return loss.detach(), balance.detach()

    @torch.no_grad()
    def held_out(self, rows: Rows, size: int) -> dict[str, float]:
        """Perplexity on up to `size` rows of each held-out part."""
        figures = {}
        for name in HELD_OUT:
            part = rows.take(name, torch.arange(size, device=self.device) % len(rows.parts[name]))
            figures[name] = self.measure(part)[0].exp().item()
        return figures

    def save(self, path: Path) -> None:
        """Saves the state of the run."""
        state = {
            "network": self.network.state_dict(),
            "adam": self.adam.state_dict(),
            "muon": self.muon.state(),
        }
        torch.save(state | {"done": self.done, "seconds": self.seconds}, path)

    def load(self, path: Path) -> None:
        """Resumes from a saved state."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.adam.load_state_dict(state["adam"])
        self.muon.load(state["muon"])
        self.done, self.seconds = state["done"], state["seconds"]


def write_weights(network: Network, folder: Path) -> None:
    """bf16 safetensors shards of at most 12 MiB under the official names, experts fused."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in network.state_dict().items():
        size = tensor.numel() * 2
        if used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor.bfloat16().contiguous().cpu()
        used += size
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"part{number}.safetensors")


def train(
    trainer: Trainer, rows: Rows, steps: int, batch: int, peak: float, limit: float, log: Path
) -> None:
    """Run until the last step or the time limit, writing a line of figures now and then."""
    start = mark = time.monotonic()
    mark_step = trainer.done
    while trainer.done < steps:
        at = trainer.done
        mixture = FINAL if at >= FINAL_FROM * steps else MAIN
        loss, balance = trainer.step(
            rows.batch(mixture, batch, trainer.seed * 10**6 + at), learning_rate(at, steps, peak)
        )
        every = 20 if trainer.done < 100 else 200
        if trainer.done % every == 0 or trainer.done == steps:
            figures = {
                "step": trainer.done,
                "loss": round(loss.item(), 4),
                "balance": round(balance.item(), 3),
            }
            now = time.monotonic()
            figures["tokens_per_second"] = round(
                (trainer.done - mark_step) * batch * 1024 / (now - mark)
            )
            mark, mark_step = now, trainer.done
            if trainer.done % 1000 == 0 or trainer.done == steps:
                figures |= {
                    name: round(value, 3) for name, value in trainer.held_out(rows, batch).items()
                }
            with log.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(figures) + "\n")
            print(json.dumps(figures), flush=True)
        if trainer.done % 20 == 0 and time.monotonic() - start > limit:
            break
    trainer.seconds += time.monotonic() - start


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="rows written by corpus.py")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for state, log and final weights"
    )
    parser.add_argument("--steps", type=int, default=9400)
    parser.add_argument("--batch", type=int, default=64, help="rows of 1,024 tokens in a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument(
        "--time-limit", type=float, default=1e9, help="seconds after which to save and stop"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    device = torch.device(arguments.device)
    trainer = Trainer(device, not arguments.no_compile, arguments.seed)
    state = arguments.work / "state.pt"
    if state.exists():
        trainer.load(state)
    rows = Rows(arguments.data, device)
    log = arguments.work / "log.jsonl"
    train(
        trainer, rows, arguments.steps, arguments.batch, arguments.rate, arguments.time_limit, log
    )
    trainer.save(state)
    write_weights(trainer.network, arguments.work / "weights")
    print(f"{trainer.done} of {arguments.steps} steps, {trainer.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
