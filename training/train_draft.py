"""Train the tiny model's draft head on what draft_states.py wrote; the model itself stays as it is.

Knows the loss, the schedule and the files; the maths is draft_head.py's. The head learns the
model's own distribution of the token after next, step by step of a chain; the first part of the
training is of the first step alone. What the user says in chat is read but not learned.
  python -m training.train_draft --data DIR --out FILE
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from training.draft_head import DraftHead
from training.draft_states import PARTS, load_states
from training.evaluate import CHECKPOINT, from_checkpoint
from training.muon import Muon
from training.network import Network
from training.quantize import BF16, write_file
from training.shape import DRAFT_PREFIX, TINY
from training.train import BALANCE

SHARES = (1.0, 0.8, 0.6)  # of the loss, by step of the chain
ALONE_UNTIL, WARM_UP = 0.4, 20
HELD_OUT = tuple(name for name, (share, _, _) in PARTS.items() if not share)


class DraftTrainer:
    """Head, optimisers and the tables that the head shares with the model."""

    def __init__(self, network: Network, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.dtype = dtype
        self.embed = network.model.language_model.embed_tokens.weight.detach().to(dtype)
        self.lm_head = network.lm_head.weight.detach().to(dtype)
        self.head = DraftHead(TINY)
        self.head.start_from(network)
        matrices, vectors = [], []
        for name, parameter in self.head.named_parameters():
            if parameter.dim() == 1 or "gate.weight" in name:
                vectors.append(parameter)
            else:
                rows = TINY.expert_width if "gate_up_proj" in name else parameter.shape[-2]
                matrices.append((parameter, rows))
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(vectors, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)

    def chain(self, rows: Tensor, hidden: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
        """The head's states by step, and its balance loss; positions 0 .. T - 2, where the next
        hidden state is known.
        """
        tokens = rows[:, 1:-1] & 0x7FFF
        states: tuple[list[Tensor], Tensor] = self.head(
            F.embedding(tokens, self.embed), hidden[:, :-1].to(self.dtype), steps
        )
        return states

    def loss(self, rows: Tensor, hidden: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """(loss to learn from, cross-entropy of the first step) against the model's distribution,
        over the positions with a trained target.
        """
        states, balance = self.chain(rows, hidden, steps)
        wanted = rows[:, 2:] < 0x8000
        wanted[:, : steps - 1] = False
        with torch.no_grad():
            target = F.linear(hidden[:, 1:][wanted].to(self.dtype), self.lm_head)
            target = target.float().softmax(-1)
        losses = [
            F.cross_entropy(F.linear(state[wanted], self.lm_head).float(), target)
            for state in states
        ]
        total = sum(
            (share * one for share, one in zip(SHARES, losses, strict=False)), BALANCE * balance
        )
        return total, losses[0].detach()

    def step(self, rows: Tensor, hidden: Tensor, steps: int, rate: float) -> float:
        """One update; the first step's loss."""
        loss, first = self.loss(rows, hidden, steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.muon.step(rate)
        self.head.zero_grad(set_to_none=True)
        return float(first)

    @torch.no_grad()
    def agreement(self, rows: Tensor, hidden: Tensor, steps: int) -> list[float]:
        """Share of positions at which a step's best token is the model's, by step; the text is
        given. A quick figure: acceptance is measured by measure_draft.py.
        """
        states, _ = self.chain(rows, hidden, steps)
        wanted = rows[:, 2:] < 0x8000
        wanted[:, : steps - 1] = False
        best = F.linear(hidden[:, 1:][wanted].to(self.dtype), self.lm_head).argmax(-1)
        drafts = (F.linear(state[wanted], self.lm_head).argmax(-1) for state in states)
        return [round((draft == best).float().mean().item(), 4) for draft in drafts]

    def write(self, path: Path) -> None:
        """The head as bf16 under its names in the checkpoint."""
        tensors = {
            DRAFT_PREFIX + name: tensor.numpy().astype(BF16)
            for name, tensor in self.head.state_dict().items()
        }
        write_file(tensors, path)


def train(trainer: DraftTrainer, folder: Path, arguments: argparse.Namespace) -> None:
    """All updates, with a line of figures now and then."""
    parts = [load_states(folder, name) for name, (share, _, _) in PARTS.items() if share]
    rows, hidden = (torch.cat(both) for both in zip(*parts, strict=True))
    held = {name: load_states(folder, name) for name in HELD_OUT}
    rng, steps, start = np.random.default_rng(arguments.seed), arguments.steps, time.monotonic()
    order = np.empty(0, dtype=np.int64)
    for done in range(steps):
        if len(order) < arguments.batch:
            order = np.concatenate((order, rng.permutation(len(rows))))
        at, order = torch.from_numpy(order[: arguments.batch]), order[arguments.batch :]
        rate = arguments.rate * min(1.0, (done + 1) / WARM_UP, 1.25 * (steps - done) / steps)
        chained = 1 if done < ALONE_UNTIL * steps else len(SHARES)
        loss = trainer.step(rows[at], hidden[at], chained, rate)
        if (done + 1) % 20 == 0 or done + 1 == steps:
            figures = {
                "step": done + 1,
                "loss": round(loss, 4),
                "seconds": round(time.monotonic() - start),
            }
            if (done + 1) % 100 == 0 or done + 1 == steps:
                figures |= {
                    name: trainer.agreement(one[:4], two[:4], len(SHARES))
                    for name, (one, two) in held.items()
                }
                trainer.write(arguments.out)
            print(json.dumps(figures), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="written by draft_states.py")
    parser.add_argument("--out", type=Path, required=True, help="the head, a safetensors file")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4, help="rows of 1,024 tokens in a step")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    network = from_checkpoint(arguments.checkpoint, torch.device("cpu"), torch.bfloat16).network
    trainer = DraftTrainer(network, torch.bfloat16, arguments.seed)
    train(trainer, arguments.data, arguments)


if __name__ == "__main__":
    main()
