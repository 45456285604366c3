"""The network in plain torch, for training and evaluation only: the maths of transformers'
Qwen3_5Moe.

Knows the forward pass; knows nothing of data, optimisers or files. Every matrix product of a
quantisable module goes through one callable, so that calibration and fake quantisation can
replace it. Experts are computed densely (all of them, weighted; zero for those not
chosen), which at this size is faster than sorting tokens. Parameter names are those of the
official checkpoint, experts fused: experts.gate_up_proj [E, 2I, H].
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training.shape import Shape

CHUNK = 64
# (module names, input [.., K], weights [N_i, K]) -> [.., sum N_i]
Linear = Callable[[Sequence[str], Tensor, Sequence[Tensor]], Tensor]
# (module name, its input): called with inputs of the experts, which do not go through Linear
Watch = Callable[[str, Tensor], None]


def look_away(name: str, x: Tensor) -> None:
    """The watcher that watches nothing."""


def plain_linear(names: Sequence[str], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x times the stacked weights, in the type of x."""
    stacked = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    return F.linear(x, stacked.to(x.dtype))


class Norm(nn.Module):
    """Zero-centred RMSNorm: x / rms(x) * (1 + w), in fp32, cast at the end."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1 + self.weight.float())).to(x.dtype)


class Matrix(nn.Module):
    """A weight [N, K] without bias; the product is done by the caller."""

    def __init__(self, rows: int, columns: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * gain / math.sqrt(columns))


def invert_unit_lower(strict: Tensor) -> Tensor:
    """Inverse of I + strict for strictly lower triangular [.., 64, 64]: series on 8x8 blocks, then
    joined in pairs.
    """
    size = strict.shape[-1]
    eye = torch.eye(size, device=strict.device, dtype=strict.dtype)
    at = torch.arange(size, device=strict.device)
    near = strict * (at[:, None] // 8 == at // 8)
    inverse, power = eye - near, near @ near
    for _ in range(2):
        inverse, power = inverse + inverse @ power, power @ power
    block = 8
    while block < size:
        pairs = (at[:, None] // (2 * block) == at // (2 * block)) & (
            at[:, None] // block != at // block
        )
        inverse = inverse - inverse @ (strict * pairs) @ inverse
        block *= 2
    return inverse


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule by chunks of 64 (exact). q, k, v [B, H, T, D]; g, beta [B, H, T]; T a
    multiple of 64.
    """
    b, h, t, d = q.shape
    q, k, v = (x.view(b, h, t // CHUNK, CHUNK, d) for x in (q, k, v))
    g, beta = (x.view(b, h, t // CHUNK, CHUNK) for x in (g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    weighted = k * beta[..., None]
    strict = (
        (weighted @ k.transpose(-1, -2))
        * decay
        * ~torch.eye(CHUNK, device=q.device, dtype=torch.bool)
    )
    solve = invert_unit_lower(strict)
    u = solve @ (v * beta[..., None])
    w = solve @ (weighted * total.exp()[..., None])
    end = total[..., -1:]
    late_k = (k * (end - total).exp()[..., None]).transpose(-1, -2)
    state = q.new_zeros(b, h, d, d)
    states, news = [], []
    for n in range(t // CHUNK):
        states.append(state)
        new = u[:, :, n] - w[:, :, n] @ state
        news.append(new)
        state = state * end[:, :, n, :, None].exp() + late_k[:, :, n] @ new
    inside = ((q @ k.transpose(-1, -2)) * decay) @ torch.stack(news, 2)
    across = (q * total.exp()[..., None]) @ torch.stack(states, 2)
    return (inside + across).view(b, h, t, d)


class DeltaNet(nn.Module):
    """Gated delta-net mixer."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        channels = 2 * shape.key_width + shape.value_width
        self.in_proj_qkv = Matrix(channels, shape.hidden)
        self.in_proj_z = Matrix(shape.value_width, shape.hidden)
        self.in_proj_b = Matrix(shape.value_heads, shape.hidden)
        self.in_proj_a = Matrix(shape.value_heads, shape.hidden, 0.3)
        self.out_proj = Matrix(shape.hidden, shape.value_width, gain)
        self.conv1d = nn.Module()
        taps = torch.randn(channels, 1, shape.conv) * 0.2
        taps[..., -1] += 0.8
        self.conv1d.weight = nn.Parameter(taps)
        self.A_log = nn.Parameter(torch.empty(shape.value_heads).uniform_(1, 8).log())
        step = torch.empty(shape.value_heads).uniform_(math.log(0.002), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(shape.linear_dim))

    def forward(self, x: Tensor, root: str, linear: Linear) -> Tensor:
        shape, (b, t, _) = self.shape, x.shape
        names = (f"{root}in_proj_qkv", f"{root}in_proj_z")
        qkv, z = linear(names, x, (self.in_proj_qkv.weight, self.in_proj_z.weight)).split(
            (2 * shape.key_width + shape.value_width, shape.value_width), -1
        )
        rates = F.linear(
            x, torch.cat((self.in_proj_b.weight, self.in_proj_a.weight)).to(x.dtype)
        ).float()
        beta, alpha = rates.transpose(1, 2).chunk(2, 1)  # [B, Hv, T] each
        g = -self.A_log.float().exp()[:, None] * F.softplus(alpha + self.dt_bias.float()[:, None])
        taps = self.conv1d.weight[:, 0].to(x.dtype).float()  # [channels, conv]
        padded = F.pad(qkv, (0, 0, shape.conv - 1, 0)).float()
        mixed = sum(padded[:, j : j + t] * taps[:, j] for j in range(shape.conv))
        mixed = F.silu(mixed).to(x.dtype).float()
        q, k, v = mixed.split((shape.key_width, shape.key_width, shape.value_width), -1)
        q, k = (y.view(b, t, shape.key_heads, -1).transpose(1, 2) for y in (q, k))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * shape.linear_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        repeat = shape.value_heads // shape.key_heads
        q, k = (y.repeat_interleave(repeat, 1) for y in (q, k))
        o = gated_delta(
            q, k, v.view(b, t, shape.value_heads, -1).transpose(1, 2), g, beta.sigmoid()
        )
        o = o.transpose(1, 2).to(x.dtype).float()
        o = (
            o
            * torch.rsqrt(o.square().mean(-1, keepdim=True) + shape.eps)
            * self.norm.weight.float()
        )
        o = (o * F.silu(z.view(b, t, shape.value_heads, -1).float())).to(x.dtype)
        return linear((f"{root}out_proj",), o.reshape(b, t, -1), (self.out_proj.weight,))


def rotate(x: Tensor, rotary: int, theta: float) -> Tensor:
    """Rotary embedding of the first `rotary` dims, halves paired; x [B, heads, T, D]."""
    half = rotary // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right, rest = x.split((half, half, x.shape[-1] - rotary), -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


class Attention(nn.Module):
    """Gated full attention."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Matrix(2 * shape.heads * shape.head_dim, shape.hidden)
        self.k_proj = Matrix(shape.kv_heads * shape.head_dim, shape.hidden)
        self.v_proj = Matrix(shape.kv_heads * shape.head_dim, shape.hidden)
        self.o_proj = Matrix(shape.hidden, shape.heads * shape.head_dim, gain)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, root: str, linear: Linear) -> Tensor:
        shape, (b, t, _) = self.shape, x.shape
        names = (f"{root}q_proj", f"{root}k_proj", f"{root}v_proj")
        width = shape.kv_heads * shape.head_dim
        qg, k, v = linear(
            names, x, (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        ).split((2 * shape.heads * shape.head_dim, width, width), -1)
        q, gate = qg.view(b, t, shape.heads, 2 * shape.head_dim).chunk(2, -1)
        k, v = (y.view(b, t, shape.kv_heads, shape.head_dim).transpose(1, 2) for y in (k, v))
        q = rotate(self.q_norm(q).transpose(1, 2), shape.rotary_dim, shape.rope_theta)
        k = rotate(self.k_norm(k), shape.rotary_dim, shape.rope_theta)
        group = shape.heads // shape.kv_heads
        k, v = (y.repeat_interleave(group, 1) for y in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.head_dim**-0.5)
        o = (o.transpose(1, 2) * gate.sigmoid()).reshape(b, t, -1)
        return linear((f"{root}o_proj",), o, (self.o_proj.weight,))


class Experts(nn.Module):
    """Router, experts and the shared expert."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Matrix(shape.experts, shape.hidden, 0.5)
        self.experts = nn.Module()
        wide, narrow = (
            (shape.experts, 2 * shape.expert_width, shape.hidden),
            (shape.experts, shape.hidden, shape.expert_width),
        )
        self.experts.gate_up_proj = nn.Parameter(torch.randn(wide) / math.sqrt(shape.hidden))
        self.experts.down_proj = nn.Parameter(
            torch.randn(narrow) * gain / math.sqrt(shape.expert_width)
        )
        self.shared_expert = nn.Module()
        self.shared_expert.gate_proj = Matrix(shape.shared_width, shape.hidden)
        self.shared_expert.up_proj = Matrix(shape.shared_width, shape.hidden)
        self.shared_expert.down_proj = Matrix(shape.hidden, shape.shared_width, gain)
        self.shared_expert_gate = Matrix(1, shape.hidden, 0.1)

    def forward(self, x: Tensor, root: str, watch: Watch) -> tuple[Tensor, Tensor]:
        """(output, balance loss); x [B, T, H]."""
        shape = self.shape
        p = F.linear(x, self.gate.weight.to(x.dtype)).float().softmax(-1)  # [B, T, E]
        at = torch.arange(shape.experts, device=x.device)
        ahead = (p[..., None, :] > p[..., :, None]) | (
            (p[..., None, :] == p[..., :, None]) & (at < at[:, None])
        )
        chosen = (ahead.sum(-1) < shape.top_k).float()
        weight = p * chosen
        weight = weight / weight.sum(-1, keepdim=True)
        balance = shape.experts / shape.top_k * (chosen.mean((0, 1)) * p.mean((0, 1))).sum()
        up = F.linear(x, self.experts.gate_up_proj.flatten(0, 1).to(x.dtype)).unflatten(
            -1, (shape.experts, 2, -1)
        )
        inner = F.silu(up[..., 0, :]) * up[..., 1, :]  # [B, T, E, I]
        watch(f"{root}experts.down_proj", inner * chosen[..., None].to(x.dtype))
        inner = inner * weight[..., None].to(x.dtype)
        down = self.experts.down_proj.transpose(0, 1).flatten(1)  # [H, E * I]
        routed = F.linear(inner.flatten(-2), down.to(x.dtype))
        shared = self.shared_expert
        both = F.linear(x, torch.cat((shared.gate_proj.weight, shared.up_proj.weight)).to(x.dtype))
        left, right = both.chunk(2, -1)
        watch(f"{root}gate_proj", x)
        watch(f"{root}shared_expert.down_proj", F.silu(left) * right)
        own = F.linear(F.silu(left) * right, shared.down_proj.weight.to(x.dtype))
        return routed + own * F.linear(
            x, self.shared_expert_gate.weight.to(x.dtype)
        ).sigmoid(), balance


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        gain = 0.5 / math.sqrt(2 * shape.layers)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.kind = "self_attn" if shape.is_full(index) else "linear_attn"
        mixer = Attention(shape, gain) if shape.is_full(index) else DeltaNet(shape, gain)
        setattr(self, self.kind, mixer)
        self.mlp = Experts(shape, gain)

    def forward(
        self, x: Tensor, root: str = "", linear: Linear = plain_linear, watch: Watch = look_away
    ) -> tuple[Tensor, Tensor]:
        x = x + getattr(self, self.kind)(self.input_layernorm(x), f"{root}{self.kind}.", linear)
        out, balance = self.mlp(self.post_attention_layernorm(x), f"{root}mlp.", watch)
        return x + out, balance


class Body(nn.Module):
    """Embedding, layers, last norm: what the checkpoint calls model.language_model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.1)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Network(nn.Module):
    """The language model: `forward` gives the last hidden states; `logits` and `loss` read them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.language_model = Body(shape)
        self.lm_head = Matrix(shape.vocab, shape.hidden, 0.3)

    def forward(
        self,
        ids: Tensor,
        dtype: torch.dtype,
        linear: Linear | None = None,
        watch: Watch = look_away,
    ) -> tuple[Tensor, Tensor]:
        """(hidden [B, T, H] after the last norm, mean balance loss). T must be a multiple of 64."""
        body = self.model.language_model
        x = F.embedding(ids, body.embed_tokens.weight).to(dtype)
        balances = []
        for index, layer in enumerate(body.layers):
            if (
                linear is None
            ):  # the same arguments for every layer, so that one compiled layer serves all
                x, balance = layer(x)
            else:
                x, balance = layer.forward(
                    x, f"model.language_model.layers.{index}.", linear, watch
                )
            balances.append(balance)
        hidden = body.norm(x)
        watch("lm_head", hidden)
        return hidden, torch.stack(balances).mean()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in the type of `hidden`."""
        return F.linear(hidden, self.lm_head.weight.to(hidden.dtype))


def next_token_loss(hidden: Tensor, head: Tensor, rows: Tensor) -> Tensor:
    """Mean cross-entropy over the trained targets. hidden [B, T, H]; rows [B, T + 1], bit 15 = not
    trained.
    """
    targets = rows[:, 1:]
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), (targets & 0x7FFF).flatten(), reduction="none")
    weight = (targets < 0x8000).flatten().float()
    return (losses * weight).sum() / weight.sum().clamp_min(1)
