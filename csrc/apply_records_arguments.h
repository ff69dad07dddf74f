// From the tensors of the op `apply_records` to its arguments, on every device, with its checks.
#pragma once

#include <vector>

#include "apply_records.h"
#include "sample_step_arguments.h"

namespace graphed_sampling {

inline ApplyArguments apply_arguments(const Tensor& records, const Tensor& slots,
                                      const Tensor& state, const Tensor& tables,
                                      const std::vector<int64_t>& layout) {
  ApplyArguments a = {};
  a.layout = table_layout(layout);
  STD_TORCH_CHECK(slots.dim() == 1, "slots is not a vector");
  a.rows = slots.numel();
  STD_TORCH_CHECK(
      records.dim() == 2 && records.size(0) >= a.rows && records.size(1) == a.layout.output_words(),
      "records is not [>= ", a.rows, ", ", a.layout.output_words(), "]");
  STD_TORCH_CHECK(state.dim() == 2 && state.size(0) == a.layout.rows() &&
                      state.size(1) == a.layout.state_words(),
                  "state is not [", a.layout.rows(), ", ", a.layout.state_words(), "]");
  a.records = int32_words(records, "records", 0, state);
  a.slots = int32_words(slots, "slots", a.rows, state);
  a.state = const_cast<int32_t*>(int32_words(state, "state", 0, state));
  a.tables = const_cast<int32_t*>(int32_words(tables, "tables", a.layout.tables_words(), state));
  return a;
}

}  // namespace graphed_sampling
