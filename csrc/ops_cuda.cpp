// CUDA implementations: check, take torch's current stream, launch. The schemas are in
// graphed_sampling/ops.py.
#include <cuda_runtime_api.h>

#include "apply_records_arguments.h"
#include "philox_checks.h"
#include "philox_words.h"
#include "sample_step_arguments.h"
#include "scatter_checks.h"
#include "scatter_segments.h"
#include "score_rows_arguments.h"
#include "sharded_step_arguments.h"
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

void apply_records(const Tensor& records, const Tensor& slots, const Tensor& state,
                   const Tensor& tables, std::vector<int64_t> layout) {
  const ApplyArguments arguments = apply_arguments(records, slots, state, tables, layout);
  const DeviceGuard guard(state.get_device_index());
  const cudaError_t error = launch_apply_records(
      arguments, static_cast<cudaStream_t>(current_cuda_stream(state.get_device_index())));
  STD_TORCH_CHECK(error == cudaSuccess, "apply_records: ", cudaGetErrorString(error));
}

Tensor philox_words(const Tensor& seed, const Tensor& position, int64_t stream_number) {
  Tensor words = check_philox(seed, position);
  const DeviceGuard guard(seed.get_device_index());
  const auto stream = static_cast<cudaStream_t>(current_cuda_stream(seed.get_device_index()));
  const cudaError_t error = launch_philox_words(
      static_cast<const uint64_t*>(seed.const_data_ptr()), seed.stride(0),
      static_cast<const uint64_t*>(position.const_data_ptr()), position.stride(0),
      static_cast<uint32_t>(stream_number), static_cast<uint64_t*>(words.mutable_data_ptr()),
      words.stride(0), seed.size(0), stream);
  STD_TORCH_CHECK(error == cudaSuccess, "philox_words: ", cudaGetErrorString(error));
  return words;
}

void cuda_step(const Tensor& logits, const Tensor& slots, const Tensor& params, const Tensor& state,
               const Tensor& tables, const Tensor& output, const Tensor& scratch,
               std::vector<int64_t> layout, std::optional<Tensor> grammar_bitmask,
               std::optional<Tensor> words, std::optional<Tensor> given,
               std::optional<Tensor> group_stats) {
  const StepArguments arguments = step_arguments(logits, slots, params, state, tables, output,
                                                 scratch, layout, grammar_bitmask, words, given);
  const float* statistics = group_stats_of(group_stats, given, logits, arguments);
  const int32_t device = logits.get_device_index();
  const DeviceGuard guard(device);
  int major = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_step: ", cudaGetErrorString(error));
  error = launch_sample_step(arguments, statistics, major >= 9,
                             static_cast<cudaStream_t>(current_cuda_stream(device)));
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_step: ", cudaGetErrorString(error));
}

void cuda_sharded_step(const Tensor& logits, const Tensor& slots, const Tensor& params,
                       const Tensor& state, const Tensor& tables, const Tensor& output,
                       const Tensor& scratch, const Tensor& exchange, std::vector<int64_t> layout,
                       int64_t rank, std::vector<int64_t> starts,
                       std::vector<int64_t> logits_addresses,
                       std::vector<int64_t> exchange_addresses, int64_t limit_ns, int64_t phases,
                       std::optional<Tensor> grammar_bitmask, std::optional<Tensor> words,
                       std::optional<Tensor> given) {
  const StepArguments arguments =
      step_arguments(logits, slots, params, state, tables, output, scratch, layout, grammar_bitmask,
                     words, given, true);
  const ShardedArguments sharded =
      sharded_arguments(arguments, logits, exchange, rank, starts, logits_addresses,
                        exchange_addresses, limit_ns, phases);
  const int32_t device = logits.get_device_index();
  const DeviceGuard guard(device);
  int major = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_sharded_step: ", cudaGetErrorString(error));
  error = launch_sharded_step(arguments, sharded, major >= 9,
                              static_cast<cudaStream_t>(current_cuda_stream(device)));
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_sharded_step: ", cudaGetErrorString(error));
}

void cuda_score_rows(const Tensor& logits, std::optional<Tensor> rows,
                     std::optional<Tensor> num_rows, const Tensor& token_ids,
                     const Tensor& given_ids, std::optional<Tensor> temperature,
                     std::optional<Tensor> processed, const Tensor& output, const Tensor& scratch,
                     std::vector<int64_t> layout, bool rank, bool entropy) {
  const ScoreArguments arguments =
      score_arguments(logits, rows, num_rows, token_ids, given_ids, temperature, processed, output,
                      scratch, layout, rank, entropy);
  const int32_t device = logits.get_device_index();
  const DeviceGuard guard(device);
  int major = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_score_rows: ", cudaGetErrorString(error));
  error = launch_score_rows(arguments, major >= 9,
                            static_cast<cudaStream_t>(current_cuda_stream(device)));
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_score_rows: ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace graphed_sampling

STABLE_TORCH_LIBRARY_IMPL(graphed_sampling, CUDA, library) {
  library.impl("apply_records", TORCH_BOX(&graphed_sampling::apply_records));
  library.impl("scatter_segments", TORCH_BOX(&graphed_sampling::scatter_segments));
  library.impl("philox_words", TORCH_BOX(&graphed_sampling::philox_words));
  library.impl("cuda_step", TORCH_BOX(&graphed_sampling::cuda_step));
  library.impl("cuda_sharded_step", TORCH_BOX(&graphed_sampling::cuda_sharded_step));
  library.impl("cuda_score_rows", TORCH_BOX(&graphed_sampling::cuda_score_rows));
}
