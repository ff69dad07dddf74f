"""Which rank holds which tokens' logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphed_sampling.params import as_int

VocabRanges = tuple[tuple[int, int], ...]
"""Of each rank the first token id, and the one behind the last."""


def even_vocab_ranges(
    vocab_size: int, num_ranks: int, padded_size: int | None = None
) -> VocabRanges:
    """The shards of an engine that pads the vocabulary and cuts it into equal parts.

    padded_size: the padded vocabulary, a multiple of num_ranks; by default vocab_size rounded up to
    one. Every rank's logits are padded_size / num_ranks wide, and the tokens past vocab_size, at
    the end of the last shards, are nobody's: a shard may have few, or none. ValueError for sizes
    that do not fit.
    """
    if num_ranks < 1 or vocab_size < 1:
        raise ValueError(
            f"vocab_size = {vocab_size}, num_ranks = {num_ranks}: both must be at least 1"
        )
    if padded_size is None:
        padded_size = -(-vocab_size // num_ranks) * num_ranks
    if padded_size % num_ranks or padded_size < vocab_size:
        raise ValueError(
            f"padded_size = {padded_size} is not accepted: it must be a multiple of "
            f"{num_ranks}, and at least {vocab_size}"
        )
    width = padded_size // num_ranks
    return tuple(
        (min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))
        for rank in range(num_ranks)
    )


def check_vocab_ranges(
    vocab_size: int | None,
    num_ranks: int,
    shard_sizes: Sequence[int] | None = None,
    vocab_ranges: Sequence[Sequence[int]] | None = None,
) -> VocabRanges:
    """The ranges that were asked for, by default even ones. ValueError unless there is one for each
    rank and they follow each other without gaps from 0 to vocab_size, or for None to anywhere."""
    if shard_sizes is not None and vocab_ranges is not None:
        raise ValueError("shard_sizes and vocab_ranges say the same: give one of them")
    for name, asked in (("shard_sizes", shard_sizes), ("vocab_ranges", vocab_ranges)):
        if asked is not None and not isinstance(asked, Iterable):
            raise ValueError(f"{name} = {asked!r} is not accepted: one for each rank")
    ranges: VocabRanges
    if shard_sizes is not None:
        name, given = "shard_sizes", str(list(shard_sizes))
        sizes = [as_int(name, size, "integers >= 0") for size in shard_sizes]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        ranges = tuple((end - size, end) for size, end in zip(sizes, ends, strict=True))
    elif vocab_ranges is not None:
        name, given = "vocab_ranges", str(list(vocab_ranges))
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in vocab_ranges):
            raise ValueError(f"vocab_ranges = {given} is not accepted: pairs of start and end")
        ranges = tuple(
            (as_int(name, start, "pairs of integers"), as_int(name, end, "pairs of integers"))
            for start, end in vocab_ranges
        )
    else:
        assert vocab_size is not None
        return even_vocab_ranges(vocab_size, num_ranks)
    if len(ranges) != num_ranks:
        raise ValueError(f"{name} = {given} is not accepted: one for each of {num_ranks} ranks")
    expected = 0
    for start, end in ranges:
        if start != expected or end < start:
            raise ValueError(
                f"{name} = {given} is not accepted: the ranges must follow each other without gaps"
            )
        expected = end
    if vocab_size is not None and expected != vocab_size:
        raise ValueError(
            f"{name} = {given} is not accepted: they end at {expected}, the vocabulary at "
            f"{vocab_size}"
        )
    return ranges
