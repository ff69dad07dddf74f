"""A Llama decoder over a key-value cache with one slot per request.

One forward serves the prompt (one request, T tokens) and decoding (n requests, one token each).
Keys and values go to the cache first; then each token attends to its own slot, up to its own
position. So no token sees another request, nor what an earlier request left in the slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    ffn_down: Tensor

    @classmethod
    def of(cls, weights: dict[str, Tensor], index: int) -> _Layer:
        def get(*names: str) -> Tensor:
            return torch.cat([weights.pop(f"blk.{index}.{name}.weight") for name in names])

        return cls(
            attention_norm=get("attn_norm"),
            qkv=get("attn_q", "attn_k", "attn_v"),
            attention_out=get("attn_output"),
            ffn_norm=get("ffn_norm"),
            gate_up=get("ffn_gate", "ffn_up"),
            ffn_down=get("ffn_down"),
        )


class Llama:
    """The model, its weights and its cache, on one device.

    tensors: names and values as `Checkpoint.tensors` yields them; input and output embedding are
    the same. num_slots, capacity: the cache holds so many requests of at most so many tokens.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        num_slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if capacity > config.context_length:
            raise ValueError(
                f"prompt and answer need {capacity} tokens; the model has {config.context_length}"
            )
        weights = {name: value.to(device, dtype) for name, value in tensors}
        self.config = config
        self.device = device
        self.dtype = dtype
        self.capacity = capacity
        self._embedding = weights["token_embd.weight"]
        self._output_norm = weights["output_norm.weight"]
        self._layers = [_Layer.of(weights, i) for i in range(config.num_layers)]
        # Zeros: what is masked out has weight 0, and 0 times the NaN in fresh memory is NaN.
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, capacity, config.head_dim)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._cos, self._sin = _rotary_tables(config, capacity, device, dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, *, span: int) -> Tensor:
        """Hidden states [n, hidden_size] after the last of each row's tokens.

        token_ids, positions: int64 [n, t]. slots: int64 [n], all different. span: more than any
        of the positions; how much of the cache is looked at.
        """
        visible = torch.arange(span, device=self.device) <= positions.unsqueeze(-1)
        cos, sin = (table[positions].unsqueeze(1) for table in (self._cos, self._sin))
        hidden = self._embedding[token_ids]
        for layer, (keys, values) in zip(self._layers, self._cache, strict=True):
            qkv = F.linear(self._norm(hidden, layer.attention_norm), layer.qkv)
            query, key, value = self._split_heads(qkv)
            keys[slots.unsqueeze(1), :, positions] = _rotate(key, cos, sin).transpose(1, 2)
            values[slots.unsqueeze(1), :, positions] = value.transpose(1, 2)
            attended = _attend(
                _rotate(query, cos, sin), keys[slots, :, :span], values[slots, :, :span], visible
            )
            hidden = hidden + F.linear(attended, layer.attention_out)
            gate, up = F.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.ffn_down)
        return self._norm(hidden[:, -1], self._output_norm)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write the logits of hidden states [n, hidden_size] to out [n, vocab_size]."""
        torch.mm(hidden, self._embedding.T, out=out)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads: Tensor = qkv.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        kv = self.config.num_kv_heads
        query, key, value = heads.split([self.config.num_heads, kv, kv], dim=1)
        return query, key, value


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of query [n, heads, t, d] over keys and values [n, kv heads, span, d].

    Returns [n, t, heads * d]. visible: bool [n, t, span]. The query heads that share a key head are
    taken as so many further tokens: that spares a repetition of the keys, and on a CPU most of the
    time that `enable_gqa` takes.
    """
    t = query.shape[2]
    kv_heads = keys.shape[1]
    group = query.shape[1] // kv_heads
    rows: Tensor = query.unflatten(1, (kv_heads, group)).flatten(2, 3)
    mask = visible.repeat(1, group, 1).unsqueeze(1)
    attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    heads: Tensor = attended.unflatten(2, (group, t)).flatten(1, 2)
    return heads.transpose(1, 2).flatten(2)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _rotary_tables(
    config: LlamaConfig, capacity: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [capacity, head_dim / 2], made in float64 and rounded once."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(capacity).double(), config.rope_base**-exponents)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
