"""Sampling from an LM head that is sharded over ranks: every rank gets the same tokens.

    torchrun --nproc-per-node 2 examples/vocab_parallel.py

On GPUs the ranks are joined by NCCL, without any by gloo. Each rank has a part of the head's rows
and writes its part of the logits into the sampler's buffer. No rank has all of them, and nobody
sends tokens around: the next step's inputs are on every rank's device when the sampler is through.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from graphed_sampling import RequestTable, SamplingParams
from graphed_sampling.distributed import (
    VocabParallelSampler,
    even_vocab_ranges,
    vocab_parallel_prompt_logprobs,
)

VOCAB_SIZE, HIDDEN = 4099, 64  # not a multiple of anything: the last shard is padded


def generate(group: dist.ProcessGroup, device: torch.device, steps: int) -> list[list[int]]:
    """The tokens of three requests, the same on all ranks."""
    ranges = even_vocab_ranges(VOCAB_SIZE, group.size())
    start, end = ranges[group.rank()]
    generator = torch.Generator().manual_seed(0)  # stands for a checkpoint
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator).to(device)
    head = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)[start:end].to(device)

    # All ranks make the same table, with a seed, and tell it of the same requests.
    table = RequestTable(4, VOCAB_SIZE, device=device, seed=7)
    sampler = VocabParallelSampler(table, group, vocab_ranges=ranges)
    params = SamplingParams(temperature=0.8, top_k=40, logprobs=0)
    slots = torch.tensor([table.admit(params, [i]) for i in range(3)], dtype=torch.int32)
    table.upload()

    texts: list[list[int]] = [[] for _ in slots]
    for _ in range(steps):
        hidden = torch.tanh(embedding[table.last_token_ids[:3]])
        logits = sampler.logits_buffer(3)  # [3, tokens of this rank]
        torch.matmul(hidden, head.T, out=logits)
        output = sampler(logits, slots)
        for text, token in zip(texts, output.token_ids.tolist(), strict=True):
            text.append(token)

    # What the first request's tokens were worth, from sharded logits too.
    tokens = torch.tensor(texts[0], device=device)
    logits = torch.tanh(embedding[tokens[:-1]]) @ head.T
    scored = vocab_parallel_prompt_logprobs(logits, tokens[1:], group, vocab_ranges=ranges)
    if group.rank() == 0:
        print(f"{sampler.transport}: {texts}")
        print("logprobs of the first:", [round(x, 3) for x in scored.logprobs.tolist()])
    sampler.close()
    return texts


@torch.no_grad()
def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    generate(dist.group.WORLD, device, steps=8)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
