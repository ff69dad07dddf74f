"""Text to token ids and back, with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from graphed_sampling.demo.checkpoint import Vocabulary


class ChatTokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = {token: i for i, token in enumerate(vocabulary.tokens)}
        left, right = zip(*(merge.split(" ", 1) for merge in vocabulary.merges), strict=True)
        self._tokenizer = Tokenizer(models.BPE(ids, list(zip(left, right, strict=True))))
        # The split that the model was trained with: digits one by one, then GPT-2's.
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [
                AddedToken(vocabulary.tokens[i], special=True, normalized=False)
                for i in vocabulary.special_ids
            ]
        )
        # Sandboxed: a template is a program that came with the weights.
        self._template = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        ).from_string(vocabulary.chat_template)
        self.eos_token_id = vocabulary.eos_token_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, prompt: str) -> list[int]:
        """The ids of a conversation that the model is to answer."""
        messages = [{"role": "user", "content": prompt}]
        return self.encode(self._template.render(messages=messages, add_generation_prompt=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text so far, without special tokens and without a last character's first bytes."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text.rstrip("\ufffd")
