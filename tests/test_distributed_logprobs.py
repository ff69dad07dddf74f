"""Logprobs of given tokens from sharded logits: processes on this machine, joined by gloo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import DTYPES, KINDS, random_row
from ranks import Ranks
from test_prompt_logprobs import assert_row

from graphed_sampling import PromptLogprobs, RowFlags, SamplingParams, backends, prompt_logprobs
from graphed_sampling.distributed import even_vocab_ranges, vocab_parallel_prompt_logprobs

V = 67
RANGES = {
    "even": even_vocab_ranges(V, 3),
    "uneven": ((0, 2), (2, 50), (50, V)),
    "empty": ((0, 0), (0, V), (V, V)),
    "padded": even_vocab_ranges(V, 3, 99),
}
BACKENDS = [
    name
    for name in ("cpu", "torch", "cuda")
    if not backends.module(name).unusable(torch.device("cpu"))
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    for dtype in DTYPES.values():
        # What this compiles, the ranks take from the cache.
        prompt_logprobs(make_logits(0, 1, dtype), torch.zeros(1, dtype=torch.int64), entropy=True)
    pool = Ranks(3)
    yield pool
    pool.close()


def make_logits(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, V, KINDS[i % len(KINDS)]) for i in range(count)]
    return torch.from_numpy(np.stack(rows)).to(dtype)


def shard(logits: torch.Tensor, group: dist.ProcessGroup, ranges: Sequence[Any]) -> torch.Tensor:
    """This rank's columns, and two that are padding and must not be read."""
    start, end = ranges[group.rank()]
    poison = torch.full((len(logits), 2), math.inf, dtype=logits.dtype)
    return torch.cat([logits[:, start:end], poison], 1)


def score(
    group: dist.ProcessGroup,
    backend: str,
    ranges: Sequence[Any],
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    wishes: dict[str, Any],
) -> list[torch.Tensor]:
    own = shard(logits, group, ranges)
    before = own.clone()
    scored = vocab_parallel_prompt_logprobs(
        own, token_ids, group, vocab_ranges=ranges, backend=backend, **wishes
    )
    assert torch.equal(own.nan_to_num(nan=1.0), before.nan_to_num(nan=1.0))
    return list(scored)


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [t.contiguous().numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", RANGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_have_the_references_values(
    ranks: Ranks, backend: str, shards: str, dtype: str
) -> None:
    count, top_n = 3 * len(KINDS), 4
    logits = make_logits(1, count, DTYPES[dtype])
    rng = np.random.default_rng(2)
    token_ids = torch.from_numpy(rng.integers(0, V, count))
    given_ids = torch.from_numpy(rng.integers(0, V, (count, 2)))
    wishes = {"given_ids": given_ids, "top_n": top_n, "rank": True, "entropy": True}
    found = ranks.run(score, backend, RANGES[shards], logits, token_ids, wishes)
    assert all(bits(parts) == bits(found[0]) for parts in found)
    scored = PromptLogprobs(*found[0])
    unsharded = prompt_logprobs(logits, token_ids, backend=backend, **wishes)
    for i in range(count):
        values = logits[i].float().numpy()
        given = given_ids[i].tolist()
        assert assert_row(scored, i, values, int(token_ids[i]), SamplingParams(), given, top_n)
    for name in ("top_token_ids", "ranks", "num_kept", "flags"):
        assert torch.equal(getattr(scored, name), getattr(unsharded, name)), name
    for name in ("logprobs", "given_logprobs", "top_logprobs", "entropies", "normalisers"):
        torch.testing.assert_close(
            getattr(scored, name), getattr(unsharded, name), rtol=1e-6, atol=2e-6, equal_nan=True
        )


@pytest.mark.parametrize("shards", ["even", "empty"])
def test_rows_that_are_not_asked_for(ranks: Ranks, shards: str) -> None:
    logits = make_logits(3, 6, torch.float32)
    token_ids = torch.tensor([1, 66, -1, 30, 22, 23])
    mask = torch.tensor([True, False, True, True, False, True])
    masked = {"rows": mask, "top_n": V + 3, "rank": True, "entropy": True}
    listed = {"rows": torch.tensor([5, -1, 0, 0, 2, 4]), "num_rows": torch.tensor([5]).int()}
    for wishes in (masked, listed | {"rank": True, "top_n": 1}, {}):
        found = ranks.run(score, "torch", RANGES[shards], logits, token_ids, wishes)
        expected = prompt_logprobs(logits, token_ids, backend="torch", **wishes)
        for name, got in zip(PromptLogprobs._fields, found[1], strict=True):
            torch.testing.assert_close(
                got, getattr(expected, name), rtol=1e-6, atol=2e-6, equal_nan=True, msg=name
            )
    assert int(expected.flags[1]) & RowFlags.PADDING == 0


def test_no_positions(ranks: Ranks) -> None:
    ids = torch.zeros(0, dtype=torch.int64)
    found = ranks.run(score, "torch", RANGES["even"], torch.zeros(0, V), ids, {"top_n": 2})
    assert [tuple(t.shape) for t in found[2]] == [
        (0,), (0, 0), (0, 2), (0,), (0, 2), (0,), (0,), (0,), (0, 2)
    ]  # fmt: skip


def differentiate(
    group: dist.ProcessGroup, ranges: Sequence[Any], logits: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    own = shard(logits, group, ranges).requires_grad_()
    loss(
        lambda **wishes: vocab_parallel_prompt_logprobs(
            own, group=group, vocab_ranges=ranges, rows=rows, **wishes
        ),
        len(logits) if rows is None else len(rows),
    ).backward()
    assert own.grad is not None
    start, end = ranges[group.rank()]
    assert own.grad[:, end - start :].eq(0).all()
    return own.grad[:, : end - start].clone()


def loss(scored_by: Any, count: int) -> torch.Tensor:
    """A loss in which every result that has a gradient takes part, with weights of its own."""
    generator = torch.Generator().manual_seed(4)
    token_ids = torch.randint(V, (count,), generator=generator)
    given_ids = torch.randint(-1, V, (count, 3), generator=generator)
    scored = scored_by(next_token_ids=token_ids, given_ids=given_ids, top_n=3, entropy=True)
    total = torch.zeros(())
    for part in scored[:4]:
        weights = torch.randn(part.shape, generator=generator)
        total = total + (part.masked_fill(~part.isfinite(), 0.0) * weights).sum()
    return total


@pytest.mark.parametrize("shards", RANGES)
@pytest.mark.parametrize("selection", ["all", "list", "mask"])
def test_gradients_are_those_of_whole_logits(ranks: Ranks, shards: str, selection: str) -> None:
    logits = make_logits(5, 20, torch.float32)
    rows = {
        "all": None,
        "list": torch.tensor([4, 4, -1, 0, 19, 1]),
        "mask": torch.arange(20) % 3 != 0,
    }[selection]
    found = ranks.run(differentiate, RANGES[shards], logits, rows)
    whole = logits.clone().requires_grad_()
    loss(
        lambda **wishes: prompt_logprobs(whole, rows=rows, backend="torch", **wishes),
        20 if rows is None else len(rows),
    ).backward()
    assert whole.grad is not None and whole.grad.abs().max() > 0.1
    torch.testing.assert_close(torch.cat(found, 1), whole.grad, rtol=1e-5, atol=2e-6)


def differentiate_in_float64(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    exact = logits.double().requires_grad_()
    logprobs = exact.log_softmax(1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).sum()
    entropy = -(logprobs.exp() * logprobs).sum()
    (chosen + 0.5 * entropy).backward()
    assert exact.grad is not None
    return exact.grad


def differentiate_simply(
    group: dist.ProcessGroup, logits: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    ranges = RANGES["even"]
    start, end = ranges[group.rank()]
    own = logits[:, start:end].clone().requires_grad_()
    scored = vocab_parallel_prompt_logprobs(
        own, token_ids, group, vocab_ranges=ranges, entropy=True
    )
    (scored.logprobs.sum() + 0.5 * scored.entropies.sum()).backward()
    assert own.grad is not None
    with pytest.raises(RuntimeError):
        torch.autograd.grad(
            vocab_parallel_prompt_logprobs(
                own, token_ids, group, vocab_ranges=ranges
            ).logprobs.sum(),
            own,
            create_graph=True,
        )[0].sum().backward()
    return own.grad


def test_gradients_are_those_of_float64(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(8, V, generator=generator) * 3
    token_ids = torch.randint(V, (8,), generator=generator)
    found = torch.cat(ranks.run(differentiate_simply, logits, token_ids), 1)
    expected = differentiate_in_float64(logits, token_ids)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def refuse(group: dist.ProcessGroup) -> None:
    logits, ids = torch.zeros(2, 23), torch.zeros(2, dtype=torch.int64)
    ranges = RANGES["even"]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("logits have shape", {"logits": torch.zeros(2, 3)}),
        ("next_token_ids", {"next_token_ids": ids[:1]}),
        ("next_token_ids holds 67", {"next_token_ids": ids + V}),
        ("given_ids holds 67", {"given_ids": torch.full((2, 1), V)}),
        ("top_n = -1", {"top_n": -1}),
        ("top_n = True", {"top_n": True}),
        ("vocab_ranges", {"vocab_ranges": ranges[:2]}),
        ("vocab_ranges", {"vocab_ranges": ((0, 23), (24, 46), (46, V))}),
        ("backend = 'pigeon'", {"backend": "pigeon"}),
    ]
    for message, changes in wrong:
        arguments = {"logits": logits, "next_token_ids": ids, "vocab_ranges": ranges} | changes
        with pytest.raises(ValueError, match=message):
            vocab_parallel_prompt_logprobs(group=group, **arguments)


def test_what_is_not_accepted(ranks: Ranks) -> None:
    ranks.run(refuse)


def score_on_gpus(group: dist.ProcessGroup) -> None:
    """Against one GPU, gradients too."""
    device = torch.device("cuda", group.rank())
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(50, 32001, device=device, generator=generator) * 4
    token_ids = torch.randint(32001, (50,), device=device, generator=generator)
    ranges = even_vocab_ranges(32001, group.size())
    start, end = ranges[group.rank()]
    own = logits[:, start:end].clone().requires_grad_()
    whole = logits.clone().requires_grad_()
    scored = vocab_parallel_prompt_logprobs(
        own, token_ids, group, vocab_ranges=ranges, top_n=5, rank=True, entropy=True
    )
    expected = prompt_logprobs(whole, token_ids, top_n=5, rank=True, entropy=True)
    for got, wanted in zip(scored, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=4e-6)
    (scored.logprobs.sum() + scored.entropies.sum()).backward()
    (expected.logprobs.sum() + expected.entropies.sum()).backward()
    assert own.grad is not None and whole.grad is not None
    torch.testing.assert_close(own.grad, whole.grad[:, start:end], rtol=1e-4, atol=1e-6)
    bits = torch.stack([part.double().nan_to_num().sum() for part in scored])
    both = [torch.empty_like(bits) for _ in range(group.size())]
    dist.all_gather(both, bits, group=group)
    assert torch.equal(both[0], both[1])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_gpus() -> None:
    pool = Ranks(2, "nccl")
    try:
        pool.run(score_on_gpus)
    finally:
        pool.close()
