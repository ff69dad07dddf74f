// The kernels on the CPU, in a library of the tests: graphed_sampling/ops.py has the schemas, and
// tests/test_emulation.py loads this. The functions below are for ctypes.
#define GRAPHED_SAMPLING_EMULATION  // before any header of the kernels

#include <chrono>
#include <cstdio>
#include <exception>

#include "../sample_step.cu"
#include "../sample_step_arguments.h"
#include "../score_rows.cu"
#include "../score_rows_arguments.h"
#include "../sharded_step.cu"
#include "../sharded_step_arguments.h"
#include "selftest.h"
#ifdef GRAPHED_SAMPLING_RACES
#include "races_selftest.h"
#endif

namespace graphed_sampling {
namespace {

void cuda_step(const Tensor& logits, const Tensor& slots, const Tensor& params, const Tensor& state,
               const Tensor& tables, const Tensor& output, const Tensor& scratch,
               std::vector<int64_t> layout, std::optional<Tensor> grammar_bitmask,
               std::optional<Tensor> words, std::optional<Tensor> given,
               std::optional<Tensor> group_stats) {
  const StepArguments arguments = step_arguments(logits, slots, params, state, tables, output,
                                                 scratch, layout, grammar_bitmask, words, given);
  const cudaError_t error = launch_sample_step(
      arguments, group_stats_of(group_stats, given, logits, arguments), true, nullptr);
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
  const cudaError_t error = launch_sharded_step(arguments, sharded, true, nullptr);
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
  const cudaError_t error = launch_score_rows(arguments, true, nullptr);
  STD_TORCH_CHECK(error == cudaSuccess, "cuda_score_rows: ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace graphed_sampling

STABLE_TORCH_LIBRARY_IMPL(graphed_sampling, CPU, library) {
  library.impl("cuda_step", TORCH_BOX(&graphed_sampling::cuda_step));
  library.impl("cuda_sharded_step", TORCH_BOX(&graphed_sampling::cuda_sharded_step));
  library.impl("cuda_score_rows", TORCH_BOX(&graphed_sampling::cuda_score_rows));
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void graphed_sampling_emulation_set_order(uint64_t seed) { emulation::set_order(seed); }

EXPORTED int64_t graphed_sampling_emulation_count_gates() { return emulation::count_gates(); }

EXPORTED int64_t graphed_sampling_emulation_count_first_block_waits() {
  return emulation::count_first_block_waits();
}

// How many clusters the device shall hold at once, of any shape.
EXPORTED void graphed_sampling_emulation_set_most_clusters(int number) {
  emulation::set_most_clusters(number);
}

// 0, or 1 with what failed in `message`.
EXPORTED int graphed_sampling_emulation_selftest(char* message, int size) {
  try {
    graphed_sampling::selftest::check_everything();
#ifdef GRAPHED_SAMPLING_RACES
    graphed_sampling::selftest::check_races();
#endif
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, static_cast<size_t>(size), "%s", error.what());
    return 1;
  }
}

#ifdef GRAPHED_SAMPLING_RACES
// The number of races since the last call; in `report` a line each, as far as they fit.
EXPORTED int graphed_sampling_emulation_races(char* report, int size) {
  const std::vector<std::string> races = emulation::races::take();
  std::string text;
  for (const std::string& race : races) text += race + '\n';
  std::snprintf(report, static_cast<size_t>(size), "%s", text.c_str());
  return static_cast<int>(races.size());
}
#endif

// Seconds for a block of 256 threads with 1000 shuffles and 100 barriers.
EXPORTED double graphed_sampling_emulation_speed() {
  namespace selftest = graphed_sampling::selftest;
  unsigned result[256];
  const auto start = std::chrono::steady_clock::now();
  selftest::run(selftest::speed_kernel, 1, 256, result);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
