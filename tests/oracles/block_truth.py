"""What a DFlash2 drafter drafts, in float64, from its published definition: see oracle.py.

Of each token that the target has read, the residual streams after the tapped layers give keys and
values of every layer of the drafter. The block [last token, mask, …] begins at the next position;
each of its tokens sees the context within the window and the whole block. Token i is drafted from
row i of the block, at its own position. It imports nothing of the package. The variants are the
known mistakes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.oracle import DTYPES, F64, _Net, safetensors


@dataclass
class Drafted:
    """Of one sequence: `tokens` [k] drafted behind it, the logits [k, V] of the block's rows, the
    target's own [T-1, V], and the context's keys and values [layers, T-1, kv_heads, D].

    `gap`: the least distance of the two best scores of a choice, and of a row's last candidate from
    the first that is none. `plain`: the largest logit of each row, which no selector chose.
    """

    tokens: list[int]
    logits: F64
    target: F64
    keys: F64
    values: F64
    gap: float
    plain: list[int]


class Drafter:
    """A drafter's folder and that of its target."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.block: dict[str, Any] = self.c["dflash_config"]
        self.w: dict[str, F64] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, info in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
                flat = np.frombuffer(info["data"], DTYPES[info["dtype"]])
                self.w[name] = flat.reshape(info["shape"]).astype(np.float64)

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        shortlist: Sequence[int] | None = None,
        off: int = 0,
        window: int | None = None,
        convolved: bool = True,
        empty: int = 0,
    ) -> Drafted:
        """`count` drafts behind `ids`, of which the last was sampled and not yet read.

        `off`: of so many layers later the taps are taken. `window` in place of the file's.
        `convolved`: False, without convolutions. `empty`: so many first positions are not there.
        """
        net = _Net(self.checkpoint)
        target = net.forward(np.asarray(ids[:-1]))
        taps = [target.layers[i + off] for i in self.block["target_layer_ids"]]
        context = self._norm(np.concatenate(taps, axis=1) @ self.w["fc.weight"].T, "hidden_norm")
        embedding = net.files.get(f"{net.files.prefix}embed_tokens.weight")
        x = embedding[[ids[-1], *[self.block["mask_token_id"]] * count]]
        read = len(ids) - 1
        kept = []
        for i in range(self.c["num_hidden_layers"]):
            p = f"layers.{i}"
            past = self._keys_values(context, p, np.arange(read))
            kept.append(past)
            h = self._norm(x, f"{p}.input_layernorm")
            x = x + self._around(
                h,
                f"{p}.attention_conv",
                lambda y, p=p, past=past: self._attend(y, p, past, window, empty),  # type: ignore[misc]
                convolved,
            )
            h = self._norm(x, f"{p}.post_attention_layernorm")
            x = x + self._around(h, f"{p}.mlp_conv", lambda y, p=p: self._mlp(y, p), convolved)  # type: ignore[misc]
        z = self._norm(x, "norm")[1:]
        logits = net.head(z)
        keys, values = (np.stack(part) for part in zip(*kept, strict=True))
        tokens, gap = self._walk(z, logits, ids[-1], shortlist)
        plain = [int(i) for i in logits.argmax(axis=1)]
        shown = logits if shortlist is None else logits[:, list(shortlist)]
        return Drafted(tokens, shown, target.logits, keys, values, gap, plain)

    def _keys_values(self, rows: F64, p: str, at: Any) -> tuple[F64, F64]:
        heads, d = self.c["num_key_value_heads"], self.c["head_dim"]
        k = (rows @ self.w[f"{p}.self_attn.k_proj.weight"].T).reshape(-1, heads, d)
        v = (rows @ self.w[f"{p}.self_attn.v_proj.weight"].T).reshape(-1, heads, d)
        return self._turn(self._norm(k, f"{p}.self_attn.k_norm"), at), v

    def _attend(self, h: F64, p: str, past: tuple[F64, F64], window: int | None, empty: int) -> F64:
        heads, d = self.c["num_attention_heads"], self.c["head_dim"]
        first, width = len(past[0]), window or self.c["sliding_window"]
        here = first + np.arange(len(h))
        q = (h @ self.w[f"{p}.self_attn.q_proj.weight"].T).reshape(-1, heads, d)
        q = self._turn(self._norm(q, f"{p}.self_attn.q_norm"), here)
        own = self._keys_values(h, p, here)
        keys, values = (np.concatenate(pair)[empty:] for pair in zip(past, own, strict=True))
        at = np.arange(first + len(h))[empty:]
        shared = heads // self.c["num_key_value_heads"]
        scores = np.einsum("qhd,khd->hqk", q, keys.repeat(shared, axis=1)) / np.sqrt(d)
        scores[:, np.abs(here[:, None] - at[None]) >= width] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        o = np.einsum("hqk,khd->qhd", weights, values.repeat(shared, axis=1))
        return np.asarray(o.reshape(len(h), -1) @ self.w[f"{p}.self_attn.o_proj.weight"].T)

    def _mlp(self, h: F64, p: str) -> F64:
        gate, up = (h @ self.w[f"{p}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        act = gate / (1 + np.exp(-gate)) * up
        return np.asarray(act @ self.w[f"{p}.mlp.down_proj.weight"].T)

    def _around(self, h: F64, name: str, sublayer: Any, convolved: bool) -> F64:
        """A sublayer between its two convolutions, of which both have the factors of h."""
        if not convolved:
            return np.asarray(sublayer(h))
        size = self.c["conv_group_size"]
        deltas = h @ self.w[f"{name}.kernel_projection.weight"].T
        each = deltas.reshape(len(h), 2, 2, -1).repeat(size, axis=3)  # token, side, tap, column
        factors = self.w[f"{name}.base_kernel"][None] + each

        def side(u: F64, which: int) -> F64:
            before = np.vstack([np.zeros((1, u.shape[1])), u[:-1]])
            return np.asarray(factors[:, which, 0] * u + factors[:, which, 1] * before)

        return side(sublayer(side(h, 0)), 1)

    def _walk(
        self, z: F64, logits: F64, before: int, shortlist: Sequence[int] | None
    ) -> tuple[list[int], float]:
        p, top = "candidate_selector", self.c["selector_top_k"]
        query = z @ self.w[f"{p}.hidden_projection.weight"].T
        prior, after = (self.w[f"{p}.{n}_codebook"] for n in ("predecessor", "successor"))
        allowed = np.arange(logits.shape[1]) if shortlist is None else np.asarray(shortlist)
        tokens, gap = [], np.inf
        for own, towards in zip(logits[:, allowed], query, strict=True):
            order = np.argsort(-own, kind="stable")
            if len(order) > top:
                gap = min(gap, own[order[top - 1]] - own[order[top]])
            ids = allowed[order[:top]]
            scores = own[order[:top]] + after[ids] @ (prior[before] * towards)
            ranked = np.sort(scores)
            gap = min(gap, ranked[-1] - ranked[-2]) if len(ranked) > 1 else gap
            before = int(ids[np.argmax(scores)])
            tokens.append(before)
        return tokens, float(gap)

    def _norm(self, x: F64, module: str) -> F64:
        """Its weight is the factor as it is stored, not a deviation from one."""
        root = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.c["rms_norm_eps"])
        return np.asarray(x / root * self.w[f"{module}.weight"])

    def _turn(self, x: F64, at: Any) -> F64:
        """The whole head of x [T, heads, D] turns by the positions `at` [T]."""
        half, theta = x.shape[2] // 2, self.c["rope_parameters"]["rope_theta"]
        angle = np.asarray(at)[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)
