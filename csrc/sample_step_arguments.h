// From the tensors of the op to the arguments of its launcher, on every device. The op's caller has
// checked shapes; what could write to a stranger's memory is checked again.
#pragma once

#include <optional>
#include <vector>

#include "sample_step.h"
#include "torch_compat.h"

namespace graphed_sampling {

inline void check_place(const Tensor& tensor, const char* name, const Tensor& logits) {
  STD_TORCH_CHECK(tensor.is_cuda() == logits.is_cuda() && tensor.is_cpu() == logits.is_cpu() &&
                      tensor.get_device_index() == logits.get_device_index(),
                  name, " and logits are on different devices");
}

inline const int32_t* int32_words(const Tensor& tensor, const char* name, int64_t count,
                                  const Tensor& logits) {
  check_place(tensor, name, logits);
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous() && tensor.numel() >= count,
      name, " must be contiguous int32 of at least ", count, " words");
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

inline TableLayout table_layout(const std::vector<int64_t>& layout) {
  STD_TORCH_CHECK(layout.size() == TableLayout::kInts, "layout has ", layout.size(), " numbers");
  // With these bounds no offset into a record leaves 32 bits.
  constexpr int64_t kMostTokens = int64_t{1} << 22, kMostEntries = int64_t{1} << 20,
                    kMostRequests = int64_t{1} << 24;
  STD_TORCH_CHECK(layout[0] >= 1 && layout[0] <= kMostTokens, "layout has a vocabulary of ",
                  layout[0], " tokens");
  for (size_t i = 1; i < layout.size(); ++i) {
    STD_TORCH_CHECK(layout[i] >= 0 && layout[i] <= (i == 1 ? kMostRequests : kMostEntries),
                    "layout[", i, "] is ", layout[i]);
  }
  STD_TORCH_CHECK(layout[5] * layout[6] <= kMostEntries, "layout has ", layout[5], " bad words of ",
                  layout[6], " tokens");
  const auto size = [&](size_t i) { return static_cast<int>(layout[i]); };
  return {size(0), size(1), size(2), size(3), size(4), size(5), size(6), size(7), size(8)};
}

// Checks the logits' shape, and tells their type. width: columns at least.
inline LogitsType logits_type(const Tensor& logits, int64_t width) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) >= width &&
                      (logits.stride(1) == 1 || logits.size(1) <= 1),
                  "logits must be [n, >= ", width, "], the last dimension contiguous");
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return LogitsType::kFloat32;
    case ScalarType::BFloat16:
      return LogitsType::kBFloat16;
    default:
      STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Half,
                      "logits must be float32, bfloat16 or float16");
      return LogitsType::kFloat16;
  }
}

// sharded: whether the logits are those of a part of the vocabulary.
inline StepArguments step_arguments(const Tensor& logits, const Tensor& slots, const Tensor& params,
                                    const Tensor& state, const Tensor& tables, const Tensor& output,
                                    const Tensor& scratch, const std::vector<int64_t>& layout,
                                    const std::optional<Tensor>& grammar_bitmask,
                                    const std::optional<Tensor>& words,
                                    const std::optional<Tensor>& given, bool sharded = false) {
  StepArguments a = {};
  a.layout = table_layout(layout);
  const int64_t rows = logits.size(0);
  STD_TORCH_CHECK(rows >= 1 && rows <= int64_t{1} << 24, "cuda_step: there are ", rows,
                  " rows; it takes 1 to 2**24");
  a.logits_type = logits_type(logits, sharded ? 0 : a.layout.vocab_size);
  a.logits = logits.const_data_ptr();
  a.logits_stride = rows > 1 ? logits.stride(0) : logits.size(1);
  a.rows = static_cast<int>(rows);
  const int64_t table_rows = a.layout.rows();
  a.slots = int32_words(slots, "slots", rows, logits);
  a.params = int32_words(params, "params", table_rows * a.layout.params_words(), logits);
  a.state = const_cast<int32_t*>(
      int32_words(state, "state", table_rows * a.layout.state_words(), logits));
  a.tables = const_cast<int32_t*>(int32_words(tables, "tables", a.layout.tables_words(), logits));
  a.output =
      const_cast<int32_t*>(int32_words(output, "output", rows * a.layout.output_words(), logits));
  a.scratch = const_cast<int32_t*>(
      int32_words(scratch, "scratch", sample_step_scratch_words(a.layout, rows), logits));
  if (grammar_bitmask.has_value()) {
    check_place(*grammar_bitmask, "grammar_bitmask", logits);
    STD_TORCH_CHECK(grammar_bitmask->scalar_type() == ScalarType::Int &&
                        grammar_bitmask->dim() == 2 && grammar_bitmask->size(0) == rows &&
                        grammar_bitmask->size(1) >= a.layout.bitmap_words() &&
                        (grammar_bitmask->stride(1) == 1 || grammar_bitmask->size(1) == 1),
                    "cuda_step: grammar_bitmask must be int32 [n, >= ", a.layout.bitmap_words(),
                    "], the last dimension contiguous");
    a.grammar_bitmask = static_cast<const int32_t*>(grammar_bitmask->const_data_ptr());
    a.grammar_bitmask_stride = rows > 1 ? grammar_bitmask->stride(0) : 0;
  }
  if (words.has_value()) {
    check_place(*words, "words", logits);
    STD_TORCH_CHECK(words->scalar_type() == ScalarType::Long && words->is_contiguous() &&
                        words->numel() >= rows,
                    "cuda_step: words must be contiguous int64 [n]");
    a.words = static_cast<const int64_t*>(words->const_data_ptr());
  }
  if (given.has_value()) a.given = int32_words(*given, "given", 2, logits);
  return a;
}

// The op's optional group_stats, of a step with these arguments; null where there are none.
inline const float* group_stats_of(const std::optional<Tensor>& group_stats,
                                   const std::optional<Tensor>& given, const Tensor& logits,
                                   const StepArguments& a) {
  if (!group_stats.has_value()) return nullptr;
  check_place(*group_stats, "group_stats", logits);
  const int groups = groups_of_stats(a.layout.vocab_size);
  STD_TORCH_CHECK(group_stats->scalar_type() == ScalarType::Float && group_stats->dim() == 3 &&
                      group_stats->size(0) == a.rows && group_stats->size(1) == 2 &&
                      group_stats->size(2) == groups && group_stats->is_contiguous() &&
                      reinterpret_cast<uintptr_t>(group_stats->const_data_ptr()) % 16 == 0,
                  "cuda_step: group_stats must be contiguous float32 [n, 2, ", groups,
                  "], aligned to 16 bytes");
  if (given.has_value()) int32_words(*given, "given", 3, logits);
  return static_cast<const float*>(group_stats->const_data_ptr());
}

}  // namespace graphed_sampling
