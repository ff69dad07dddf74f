"""The built-in requests: together they use what a request may ask of the sampler."""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from graphed_sampling import SamplingParams
from graphed_sampling.demo.engine import Request


def builtin_requests(tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> list[Request]:
    return [
        make_request(tokenizer, title, prompt, params, max_tokens=max_tokens)
        for title, prompt, params in _builtin(tokenizer)
    ]


def make_request(
    tokenizer: PreTrainedTokenizerBase,
    title: str,
    prompt: str,
    params: SamplingParams,
    *,
    max_tokens: int,
) -> Request:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    least = min(params.min_tokens, max_tokens)
    # Every request asks for its tokens' logprobs: the closing table shows their mean.
    params = replace(params, min_tokens=least, max_tokens=max_tokens, logprobs=params.logprobs or 0)
    return Request(title=title, prompt=prompt, prompt_token_ids=ids, params=params)


def _builtin(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str, SamplingParams]]:
    """Title, prompt and parameters.

    The model is small: prompts whose greedy answer is fluent were preferred.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def forms(*words: str) -> tuple[tuple[int, ...], ...]:
        """The ids of each word: inside a sentence and at the start of a text, small and capital."""
        texts = (space + form for w in words for space in (" ", "") for form in (w, w.capitalize()))
        return tuple(tuple(encode(text)) for text in texts)

    def first_ids(*texts: str) -> tuple[int, ...]:
        return tuple(encode(text)[0] for text in texts)

    greedy = SamplingParams(temperature=0.0)
    twin = SamplingParams(temperature=0.7, top_p=0.9, seed=5)
    parent = SamplingParams(temperature=0.7, min_p=0.1, seed=5)
    france = "What is the capital of France?"
    robot = "Suggest a name for a friendly robot and describe it in one sentence."
    sea = "Write one sentence about the sea at night."
    articles = {ids[0]: -math.inf for ids in forms("the", "a", "an")}
    colours = (*first_ids("Red", "Green", "Blue"), tokenizer.eos_token_id)
    return [
        (
            "dragon",
            "Write the first sentence of a fairy tale about a dragon.",
            SamplingParams(temperature=0.6),
        ),
        ("Paris", france, greedy),
        ("Paris at length", france, replace(greedy, min_tokens=40)),
        (
            "computer",
            "Explain in one sentence what a computer does.",
            SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
        ),
        (
            "water",
            "Why should I drink water?",
            SamplingParams(temperature=0.8, min_p=0.1),
        ),
        ("robot twin 1", robot, twin),
        ("robot twin 2", robot, twin),
        ("sea 1 of 2", sea, parent.child(0)),
        ("sea 2 of 2", sea, parent.child(1)),
        (
            "poem",
            # Without them the greedy poem says its second line again and again.
            "Write a short poem about rain.",
            replace(greedy, repetition_penalty=1.05, frequency_penalty=0.2, presence_penalty=0.2),
        ),
        (
            "no articles",
            "Describe a sunny day in one sentence.",
            replace(greedy, logit_bias=articles),
        ),
        ("no apples", "List five fruits.", replace(greedy, bad_words_ids=forms("apple", "apples"))),
        (
            "stop at seven",
            "Write the numbers one, two, three and so on up to ten.",
            replace(greedy, stop_token_ids=first_ids(" seven")),
        ),
        (
            "one of three",
            "Which colour do you like best: red, green or blue?",
            SamplingParams(allowed_token_ids=colours),
        ),
        (
            "arithmetic",
            "What is 2 + 2?",
            SamplingParams(temperature=0.5, top_k=20, logprobs=5),
        ),
    ]
