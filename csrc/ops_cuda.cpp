// CUDA implementations: check, take torch's current stream, launch. The schemas are in
// graphed_sampling/ops.py.
#include <cuda_runtime_api.h>

#include "scatter_checks.h"
#include "scatter_segments.h"
#include "torch_compat.h"

namespace graphed_sampling {
namespace {

void scatter_segments(const Tensor& params, const Tensor& state, const Tensor& tables,
                      const Tensor& packet, int64_t num_segments, int64_t num_words) {
  const ScatterTargets targets =
      check_scatter(params, state, tables, packet, num_segments, num_words);
  const DeviceGuard guard(packet.get_device_index());
  const auto stream = static_cast<cudaStream_t>(current_cuda_stream(packet.get_device_index()));
  const cudaError_t error =
      launch_scatter_segments(targets, static_cast<const int32_t*>(packet.const_data_ptr()),
                              num_segments, num_words, stream);
  STD_TORCH_CHECK(error == cudaSuccess, "scatter_segments: ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace graphed_sampling

STABLE_TORCH_LIBRARY_IMPL(graphed_sampling, CUDA, library) {
  library.impl("scatter_segments", TORCH_BOX(&graphed_sampling::scatter_segments));
}
