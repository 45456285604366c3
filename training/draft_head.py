"""The draft head in plain torch: one gated attention layer that predicts the token after next.

Knows the maths of the checkpoint's mtp.* tensors and how drafts are chained; knows nothing of data,
optimisers or files. At position t the head takes the model's hidden state of t (after the last
norm) and the token t + 1, and predicts token t + 2. Chained, it takes its own last state for the
hidden one:
  step 0  sees the true states; its keys and values are those that a served head has of the past
  step i  sees its own y of step i - 1 one position back, the keys of step 0 up to i positions back,
          and those of the steps 1 .. i since
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training.network import Layer, Matrix, Network, Norm, look_away, rotate
from training.shape import Shape


def back(x: Tensor, by: int) -> Tensor:
    """x [B, T, ..] as it was `by` positions before; zeros where there is nothing."""
    return torch.cat((torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]), 1) if by else x


class DraftHead(nn.Module):
    """The head; parameter names are those of the checkpoint, less `mtp.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Matrix(shape.hidden, 2 * shape.hidden, 0.1)
        self.pre_fc_norm_embedding = Norm(shape.hidden, shape.eps)
        self.pre_fc_norm_hidden = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([Layer(shape, shape.full_every - 1)])
        self.norm = Norm(shape.hidden, shape.eps)

    @torch.no_grad()
    def start_from(self, network: Network) -> None:
        """Begin as the model's last layer and norm over the sum of both inputs."""
        body = network.model.language_model
        self.layers[0].load_state_dict(body.layers[-1].state_dict())
        self.norm.load_state_dict(body.norm.state_dict())
        eye = torch.eye(self.shape.hidden)
        self.fc.weight += torch.cat((eye, eye), 1)

    def forward(self, embedded: Tensor, hidden: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
        """(y of each step, mean balance loss); all [B, T, H], by position. `embedded`: row t is of
        token t + 1. Step i is meant for positions from i on.
        """
        left = self.pre_fc_norm_embedding(embedded)
        layer = self.layers[0]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        balances = []
        for _ in range(steps):
            both = torch.cat((left, self.pre_fc_norm_hidden(hidden)), -1)
            x = F.linear(both, self.fc.weight.to(both.dtype))
            x = x + self.attend(layer.input_layernorm(x), keys, values)
            out, balance = layer.mlp(layer.post_attention_layernorm(x), "", look_away)
            states.append(self.norm(x + out))
            balances.append(balance)
            hidden = back(states[-1], 1)
        return states, torch.stack(balances).mean()

    def attend(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Gated attention of the next step; appends its keys and values [B, T, kv heads, D]."""
        shape, own, (b, t, _) = self.shape, self.layers[0].self_attn, x.shape
        q, gate = (
            F.linear(x, own.q_proj.weight.to(x.dtype))
            .view(b, t, shape.heads, 2 * shape.head_dim)
            .chunk(2, -1)
        )
        k, v = (
            F.linear(x, matrix.weight.to(x.dtype)).view(b, t, shape.kv_heads, shape.head_dim)
            for matrix in (own.k_proj, own.v_proj)
        )
        q, k = (
            rotate(norm(y).transpose(1, 2), shape.rotary_dim, shape.rope_theta).transpose(1, 2)
            for norm, y in ((own.q_norm, q), (own.k_norm, k))
        )
        keys.append(k)
        values.append(v)
        mixed = chained_attention(q, keys, values) * gate.sigmoid()
        return F.linear(mixed.reshape(b, t, -1), own.o_proj.weight.to(x.dtype))


def chained_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention [B, T, heads, D] of the last step: over the first step's keys up to as many
    positions back as there were steps since, and over one key of each of those steps.
    """
    late, group, scale = len(keys) - 1, q.shape[2] // keys[0].shape[2], q.shape[3] ** -0.5
    k, v = ([x.repeat_interleave(group, 2) for x in kept] for kept in (keys, values))
    past = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril(-late)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k[0]).float() * scale
    scores = scores.masked_fill(~past, -torch.inf)
    near = [
        ((q * back(k[j], late - j)).sum(-1).float() * scale).transpose(1, 2)[..., None]
        for j in range(1, late + 1)
    ]
    weights = torch.cat((scores, *near), -1).softmax(-1).to(q.dtype)
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., : q.shape[1]], v[0])
    for j in range(1, late + 1):
        share = weights[..., q.shape[1] + j - 1].transpose(1, 2)[..., None]
        mixed = mixed + share * back(v[j], late - j)
    return mixed
