// From the tensors of the op to the arguments of its launcher, on every device. The op's caller has
// checked shapes; what could write to a stranger's memory is checked again.
#pragma once

#include <optional>
#include <vector>

#include "sample_step_arguments.h"
#include "sharded_step.h"

namespace graphed_sampling {

inline ShardedArguments sharded_arguments(const StepArguments& a, const Tensor& logits,
                                          const Tensor& exchange, int64_t rank,
                                          const std::vector<int64_t>& starts,
                                          const std::vector<int64_t>& logits_addresses,
                                          const std::vector<int64_t>& exchange_addresses,
                                          int64_t limit_ns, int64_t phases) {
  ShardedArguments s = {};
  const auto ranks = static_cast<int64_t>(logits_addresses.size());
  STD_TORCH_CHECK(ranks >= 1 && ranks <= kMostShards, "cuda_sharded_step: there are ", ranks,
                  " ranks; it takes 1 to ", kMostShards);
  STD_TORCH_CHECK(rank >= 0 && rank < ranks, "cuda_sharded_step: rank is ", rank, " of ", ranks);
  STD_TORCH_CHECK(static_cast<int64_t>(starts.size()) == ranks + 1 &&
                      static_cast<int64_t>(exchange_addresses.size()) == ranks,
                  "cuda_sharded_step: there are ", starts.size(), " starts and ",
                  exchange_addresses.size(), " exchange buffers of ", ranks, " ranks");
  STD_TORCH_CHECK(starts.front() == 0 && starts.back() == a.layout.vocab_size,
                  "cuda_sharded_step: starts must go from 0 to the vocabulary's size");
  STD_TORCH_CHECK(limit_ns > 0, "cuda_sharded_step: limit_ns is ", limit_ns);
  STD_TORCH_CHECK(phases > 0 && phases <= kAllPhases && phases != (kStreamPhase | kClosePhase),
                  "cuda_sharded_step: phases are ", phases);
  for (int64_t i = 0; i < ranks; ++i) {
    const auto at = static_cast<size_t>(i);
    STD_TORCH_CHECK(starts[at] <= starts[at + 1], "cuda_sharded_step: starts must ascend");
    STD_TORCH_CHECK(exchange_addresses[at] % 16 == 0,
                    "cuda_sharded_step: exchange buffers must be aligned to 16 bytes");
    s.starts[i] = static_cast<int>(starts[at]);
    s.logits[i] = static_cast<uintptr_t>(logits_addresses[at]);
    s.exchange[i] = reinterpret_cast<int32_t*>(exchange_addresses[at]);
  }
  s.starts[ranks] = a.layout.vocab_size;
  s.ranks = static_cast<int>(ranks);
  s.rank = static_cast<int>(rank);
  const int width = s.starts[rank + 1] - s.starts[rank];
  STD_TORCH_CHECK(logits.size(1) >= width, "cuda_sharded_step: logits have ", logits.size(1),
                  " columns; the shard has ", width, " tokens");
  STD_TORCH_CHECK(width == 0 || logits.const_data_ptr() == reinterpret_cast<void*>(s.logits[rank]),
                  "cuda_sharded_step: logits do not lie at the rank's address");
  STD_TORCH_CHECK(int32_words(exchange, "exchange", sharded_exchange_words(a.layout, a.rows),
                              logits) == s.exchange[rank],
                  "cuda_sharded_step: exchange does not lie at the rank's address");
  s.limit_ns = limit_ns;
  s.phases = static_cast<int>(phases);
  return s;
}

}  // namespace graphed_sampling
