"""Log-probabilities by transformers, over the numbers that a checkpoint's tensors encode.

Inputs of quantised modules are rounded before their products, and keys and values as they enter
an FP8 cache. Knows nothing of the package.
"""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.published.checkpoint import Written
from tests.published.networks import module_of
from tests.published.schemes import Round, fp8_static

F64 = NDArray[np.float64]


def log_probabilities(logits: NDArray[Any]) -> F64:
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


class Truth:
    """`written` as transformers computes it. `exact`: no input is rounded."""

    def __init__(self, written: Written, exact: bool = False) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = module_of(written.network.config, "cpu")
        state = {name: torch.from_numpy(w.copy()) for name, w in written.values.items()}
        embedding = next(w for name, w in state.items() if "embed_tokens" in name)
        self.model.load_state_dict({"lm_head.weight": embedding} | state)
        self.kv, self.rounds = ({}, {}) if exact else (written.kv, written.rounds)
        self.drafts = written.drafts
        self._open(self.model)

    def _open(self, model: Any) -> None:
        model.eval()
        for name, module in model.named_modules():
            if name in self.rounds:
                module.register_forward_pre_hook(_hook(self.rounds[name]))
            if name.endswith(".experts"):
                module.forward = MethodType(_experts(name, self.rounds), module)

    def of(self, ids: Sequence[int]) -> F64:
        """[T, V]"""
        import torch

        with torch.no_grad():
            cache = _cache(self.model.config, self.kv)
            out = self.model(torch.tensor([list(ids)]), cache=cache)
        return log_probabilities(out.logits[0].numpy())

    def draft(self, ids: Sequence[int]) -> F64:
        """[V] of the token behind `ids`, by the draft head: row t has the network's result at t,
        the embedding of token t + 1 and position t."""
        import torch
        from torch import nn

        network = getattr(self.model.model, "language_model", self.model.model)
        config, tree, mtp = network.config, nn.Module(), nn.Module()
        tree.mtp = mtp
        mtp.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(mtp, norm, type(network.norm)(config.hidden_size, config.rms_norm_eps))
        mtp.layers = nn.ModuleList([type(network.layers[1])(config, 1)])
        tree.load_state_dict({n: torch.from_numpy(w.copy()) for n, w in self.drafts.items()})
        self._open(tree)
        tokens, place = torch.tensor([list(ids)]), torch.arange(len(ids) - 1)[None]
        ahead = torch.full((len(ids) - 1,) * 2, -torch.inf).triu(1)
        with torch.no_grad():
            hidden = network(
                input_ids=tokens[:, :-1], cache=_cache(config, self.kv)
            ).last_hidden_state
            embedded = mtp.pre_fc_norm_embedding(network.embed_tokens(tokens[:, 1:]))
            x = mtp.fc(torch.cat([embedded, mtp.pre_fc_norm_hidden(hidden)], -1))
            turned = network.rotary_emb(x, place)
            cache = _cache(config, {1: (1.0, 1.0)} if self.kv else {})  # no file has scales of it
            mask = ahead[None, None]
            y = mtp.layers[0](x, position_embeddings=turned, attention_mask=mask, cache=cache)
            logits = self.model.lm_head(mtp.norm(y))
        return log_probabilities(logits[0, -1].numpy())


def _same(x: Any) -> Any:
    return x


def _hook(rounded: Round) -> Any:
    return lambda module, inputs: (rounded(inputs[0]), *inputs[1:])


def _experts(name: str, rounds: Mapping[str, Round]) -> Any:
    """The experts' forward, one by one, each with its own rounding of both inputs."""

    def forward(module: Any, x: Any, chosen: Any, weights: Any) -> Any:
        import torch
        from torch.nn.functional import linear

        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, place = torch.where(chosen == e)
            y = rounds.get(f"{name}.{e}.gate_proj", _same)(x[token])
            gate, up = linear(y, module.gate_up_proj[e]).chunk(2, dim=-1)
            inner = rounds.get(f"{name}.{e}.down_proj", _same)(module.act_fn(gate) * up)
            rows = linear(inner, module.down_proj[e]) * weights[token, place, None]
            out.index_add_(0, token, rows.to(out.dtype))
        return out

    return forward


def _cache(config: Any, scales: Mapping[int, tuple[float, float]]) -> Any:
    import transformers

    class Cache(transformers.DynamicCache):
        def update(self, keys: Any, values: Any, layer: int, *args: Any, **more: Any) -> Any:
            if layer in scales:
                k, v = map(fp8_static, scales[layer])
                keys, values = k(keys), v(values)
            return super().update(keys, values, layer, *args, **more)

    return Cache(config=config.get_text_config())
