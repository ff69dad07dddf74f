// The logits that kernels take.
#pragma once

namespace graphed_sampling {

enum class LogitsType { kFloat32, kBFloat16, kFloat16 };

// Ranks that may have the shards of one row.
constexpr int kMostShards = 16;

}  // namespace graphed_sampling
