"""Kernels of the native library under NVIDIA's compute-sanitizer: `bench/sanitize.sh` runs it.

    python bench/sanitized.py [--vocab 20000 151936] [--rows 1 17 33 200] [--positions 1100]

Steps of mixed requests, eager and captured, without statistics and with them, on rows of several
kinds, and logprobs of many positions. It checks that tokens lie in the vocabulary; what they are is
the tests' business.
"""

from __future__ import annotations

import argparse

import torch

from graphed_sampling import (
    GraphedSampler,
    RequestTable,
    Sampler,
    SamplingParams,
    group_stats,
    new_prompt_output,
)

MIXED = [
    SamplingParams(temperature=0.0, logprobs=5, rank=True),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, logprobs=0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.95, logprobs=20, seed=2),
    SamplingParams(seed=3),
    SamplingParams(min_p=0.05, top_n_sigma=2.0, seed=4, logprobs=0, logprobs_mode="processed"),
    SamplingParams(typical_p=0.9, epsilon_cutoff=1e-4, eta_cutoff=1e-3, seed=5),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, top_p=0.9, seed=6),
    SamplingParams(logit_bias={1: 2.0}, bad_words_ids=[[5]], min_tokens=3, stop_token_ids=[7]),
    SamplingParams(allowed_token_ids=[1, 5, 9], seed=8),
    SamplingParams(temperature=50.0, top_p=0.9, seed=9),  # any row is flat then
]


def logits_of(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows like a language model's, flat ones, equal ones, and ones with NaN and infinities."""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, vocab, device="cuda", generator=generator)
    ranks = torch.arange(1, vocab + 1, device="cuda")
    kinds = torch.arange(rows, device="cuda")[:, None] % 3
    x = torch.where(kinds == 0, x - 1.2 * ranks.log(), torch.where(kinds == 1, 2 * x, 8 * x))
    if rows > 9:
        x[3], x[4, 7], x[5, 9], x[6] = 1.0, torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def run_steps(vocab: int, rows: int, dtype: torch.dtype) -> None:
    table = RequestTable(rows, vocab, device="cuda", max_logprobs=20, eos_token_ids=[2])
    for i in range(rows):
        table.admit(MIXED[(i + rows) % len(MIXED)], [1, 2, 3], slot=i)
    logits, slots = logits_of(rows, vocab, dtype), torch.arange(rows, dtype=torch.int32)
    eager = Sampler(table, "cuda")
    graphed = GraphedSampler(table, row_buckets=[rows], logits_dtype=dtype, backend="cuda")
    informed = Sampler(table, "cuda", group_stats=True)
    statistics = group_stats(logits, vocab)
    for step in (
        lambda: eager(logits, slots),
        lambda: graphed(logits, slots),
        lambda: graphed(logits, slots),
        lambda: informed(logits, slots, group_stats=statistics),
    ):
        tokens = step().token_ids.cpu()
        if not ((tokens >= -1) & (tokens < vocab)).all():
            raise AssertionError(f"{rows} rows of {vocab}, {dtype}: a token that is none")


def run_positions(vocab: int, count: int, dtype: torch.dtype) -> None:
    logits = logits_of(count, vocab, dtype)
    tokens = torch.arange(count, device="cuda") % vocab
    for top_n, rank, entropy in ((0, False, False), (20, False, False), (3, True, True)):
        record = new_prompt_output(count, top_n, device="cuda")
        torch.ops.graphed_sampling.prompt_logprobs_out(
            logits, tokens, record, backend="cuda", top_n=top_n, rank=rank, entropy=entropy
        )
    record = new_prompt_output(count, device="cuda")
    temperature = torch.linspace(0.0, 2.0, count, device="cuda")
    chosen = torch.arange(count, device="cuda") % 3 == 0
    for rows in (None, chosen, chosen.nonzero()[:, 0]):
        of = slice(None) if rows is None or rows.dtype == torch.bool else rows
        for heated in (None, temperature[of]):
            torch.ops.graphed_sampling.prompt_logprobs_out(
                logits, tokens[of], record[of], backend="cuda", rows=rows, temperature=heated
            )
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[20_000, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 17, 33, 200])
    parser.add_argument("--positions", type=int, default=1100, help="0 leaves them out")
    arguments = parser.parse_args()
    for dtype in (torch.bfloat16, torch.float32):
        for vocab in arguments.vocab:
            for rows in arguments.rows:
                run_steps(vocab, rows, dtype)
        if arguments.positions:
            run_positions(34_824, arguments.positions, dtype)
    print("through")


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


if __name__ == "__main__":
    main()
