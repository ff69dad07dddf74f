// The checks that philox_words makes on every device, and its result's allocation.
#pragma once

#include <cstdint>

#include "torch_compat.h"

namespace graphed_sampling {

// Returns the tensor for the words, int64 as seed and on its device.
inline Tensor check_philox(const Tensor& seed, const Tensor& position) {
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.dim() == 1,
                  "philox_words: seed must be int64 of one dimension");
  STD_TORCH_CHECK(position.scalar_type() == ScalarType::Long && position.dim() == 1 &&
                      position.size(0) == seed.size(0),
                  "philox_words: position must be int64 of one dimension, as long as seed");
  STD_TORCH_CHECK(seed.is_cuda() == position.is_cuda() &&
                      seed.get_device_index() == position.get_device_index(),
                  "philox_words: seed and position are on different devices");
  return torch::stable::empty_like(seed);
}

}  // namespace graphed_sampling
