// CPU implementations, for tables on the CPU. The schemas are in graphed_sampling/ops.py.
#include <cstring>

#include "apply_records_arguments.h"
#include "common/philox.h"
#include "philox_checks.h"
#include "scatter_checks.h"
#include "scatter_segments.h"
#include "torch_compat.h"

namespace graphed_sampling {
namespace {

void scatter_segments(const Tensor& params, const Tensor& state, const Tensor& tables,
                      const Tensor& packet, int64_t num_segments, int64_t num_words) {
  const ScatterTargets targets =
      check_scatter(params, state, tables, packet, num_segments, num_words);
  const auto* descriptor = static_cast<const uint32_t*>(packet.const_data_ptr());
  const uint32_t* payload = descriptor + num_segments * kDescriptorWords;
  for (int64_t i = 0; i < num_segments; ++i, descriptor += kDescriptorWords) {
    const uint32_t target = descriptor[0] & 3;
    const uint64_t start = descriptor[0] >> 2;
    const uint64_t length = descriptor[1];
    const uint64_t offset = uint64_t{descriptor[3]} << 32 | descriptor[2];
    STD_TORCH_CHECK(target < ScatterTargets::kCount && start + length <= uint64_t(num_words),
                    "scatter_segments: descriptor ", i, " is malformed");
    const auto size = static_cast<uint64_t>(targets.length[target]);
    STD_TORCH_CHECK(length <= size && offset <= size - length, "scatter_segments: descriptor ", i,
                    " points outside its target");
    if (length > 0) {  // memcpy must not see the null pointer of an empty target
      std::memcpy(targets.data[target] + offset, payload + start, length * sizeof(uint32_t));
    }
  }
}

void apply_records(const Tensor& records, const Tensor& slots, const Tensor& state,
                   const Tensor& tables, std::vector<int64_t> layout) {
  const ApplyArguments arguments = apply_arguments(records, slots, state, tables, layout);
  for (int64_t row = 0; row < arguments.rows; ++row) apply_record(arguments, row);
}

Tensor philox_words(const Tensor& seed, const Tensor& position, int64_t stream_number) {
  Tensor words = check_philox(seed, position);
  const auto* seeds = static_cast<const uint64_t*>(seed.const_data_ptr());
  const auto* positions = static_cast<const uint64_t*>(position.const_data_ptr());
  auto* result = static_cast<uint64_t*>(words.mutable_data_ptr());
  for (int64_t i = 0; i < seed.size(0); ++i) {
    result[i * words.stride(0)] =
        philox_word(seeds[i * seed.stride(0)], positions[i * position.stride(0)],
                    static_cast<uint32_t>(stream_number));
  }
  return words;
}

}  // namespace
}  // namespace graphed_sampling

STABLE_TORCH_LIBRARY_IMPL(graphed_sampling, CPU, library) {
  library.impl("apply_records", TORCH_BOX(&graphed_sampling::apply_records));
  library.impl("scatter_segments", TORCH_BOX(&graphed_sampling::scatter_segments));
  library.impl("philox_words", TORCH_BOX(&graphed_sampling::philox_words));
}
