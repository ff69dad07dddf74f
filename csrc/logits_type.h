// The logits that kernels take.
#pragma once

#include "common/host_device.h"

namespace graphed_sampling {

enum class LogitsType { kFloat32, kBFloat16, kFloat16 };

GS_HOST_DEVICE constexpr int bytes_of(LogitsType type) {
  return type == LogitsType::kFloat32 ? 4 : 2;
}

// Ranks that may have the shards of one row.
constexpr int kMostShards = 16;

}  // namespace graphed_sampling
