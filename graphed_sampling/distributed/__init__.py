"""Several ranks, one outcome: sample once, agree everywhere, gather no logits.

    VocabParallelSampler            every rank has a part of the vocabulary's logits
    SingleRankSampler               one rank has the logits, all have the table
    vocab_parallel_prompt_logprobs  logprobs of given tokens from sharded logits
    even_vocab_ranges               the shards of engines that pad the vocabulary
    RankError                       a rank is late, gone, or of another opinion

All of it runs on `torch.distributed`: NCCL or symmetric memory between GPUs, gloo between CPUs.
"""

from graphed_sampling.distributed.logprobs import vocab_parallel_prompt_logprobs
from graphed_sampling.distributed.shards import even_vocab_ranges
from graphed_sampling.distributed.single_rank import SingleRankSampler
from graphed_sampling.distributed.vocab_parallel import VocabParallelSampler
from graphed_sampling.distributed.watchdog import RankError

__all__ = [
    "RankError",
    "SingleRankSampler",
    "VocabParallelSampler",
    "even_vocab_ranges",
    "vocab_parallel_prompt_logprobs",
]
