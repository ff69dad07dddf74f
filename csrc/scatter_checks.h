// The checks that scatter_segments makes on every device.
#pragma once

#include <cstdint>

#include "scatter_segments.h"
#include "torch_compat.h"

namespace graphed_sampling {

inline void check_words(const Tensor& tensor, const char* name, int64_t dim, const Tensor& packet) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int, "scatter_segments: ", name,
                  " must be int32");
  STD_TORCH_CHECK(tensor.dim() == dim, "scatter_segments: ", name, " must have ", dim,
                  " dimension(s), it has ", tensor.dim());
  STD_TORCH_CHECK(tensor.is_contiguous(), "scatter_segments: ", name, " must be contiguous");
  STD_TORCH_CHECK(tensor.is_cuda() == packet.is_cuda() &&
                      tensor.get_device_index() == packet.get_device_index(),
                  "scatter_segments: ", name, " and packet are on different devices");
}

// Checks everything that can be seen without reading the packet, and returns the targets.
inline ScatterTargets check_scatter(const Tensor& params, const Tensor& state, const Tensor& tables,
                                    const Tensor& packet, int64_t num_segments, int64_t num_words) {
  check_words(params, "params", 2, packet);
  check_words(state, "state", 2, packet);
  check_words(tables, "tables", 1, packet);
  check_words(packet, "packet", 1, packet);
  STD_TORCH_CHECK(num_segments >= 0 && num_segments <= INT32_MAX,
                  "scatter_segments: num_segments must be in 0 .. 2**31 - 1, it is ", num_segments);
  // A descriptor has 30 bits for the payload's start; one is kept back.
  STD_TORCH_CHECK(num_words >= 0 && num_words < (int64_t{1} << 29),
                  "scatter_segments: num_words must be in 0 .. 2**29 - 1, it is ", num_words);
  STD_TORCH_CHECK(num_segments * kDescriptorWords + num_words <= packet.numel(),
                  "scatter_segments: ", num_segments, " segments of ", num_words,
                  " words do not fit into a packet of ", packet.numel(), " words");
  return {{static_cast<int32_t*>(params.mutable_data_ptr()),
           static_cast<int32_t*>(state.mutable_data_ptr()),
           static_cast<int32_t*>(tables.mutable_data_ptr())},
          {params.numel(), state.numel(), tables.numel()}};
}

}  // namespace graphed_sampling
