// From the tensors of the op to the arguments of its launcher, on every device. The op's caller has
// checked shapes; what could write to a stranger's memory is checked again.
#pragma once

#include <optional>
#include <vector>

#include "sample_step_arguments.h"
#include "score_rows.h"
#include "torch_compat.h"

namespace graphed_sampling {

inline const int64_t* int64_numbers(const Tensor& tensor, const char* name, int64_t count,
                                    const Tensor& logits) {
  check_place(tensor, name, logits);
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.numel() == count,
      "cuda_score_rows: ", name, " must be contiguous int64 of ", count, " numbers");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

inline ScoreArguments score_arguments(const Tensor& logits, const std::optional<Tensor>& rows,
                                      const std::optional<Tensor>& num_rows,
                                      const Tensor& token_ids, const Tensor& given_ids,
                                      const std::optional<Tensor>& temperature,
                                      const std::optional<Tensor>& processed, const Tensor& output,
                                      const Tensor& scratch, const std::vector<int64_t>& layout,
                                      bool rank, bool entropy) {
  ScoreArguments a = {};
  a.layout = table_layout(layout);
  a.logits_type = logits_type(logits, a.layout.vocab_size);
  a.logits = logits.const_data_ptr();
  a.logits_rows = logits.size(0);
  a.logits_stride = logits.size(0) > 1 ? logits.stride(0) : logits.size(1);
  const int64_t positions = rows.has_value() ? rows->numel() : logits.size(0);
  STD_TORCH_CHECK(positions >= 1 && positions < int64_t{1} << 31, "cuda_score_rows: there are ",
                  positions, " positions; it takes 1 to 2**31 - 1");
  a.positions = static_cast<int>(positions);
  a.rows_kind = RowsKind::kAll;
  if (rows.has_value() && rows->scalar_type() == ScalarType::Bool) {
    check_place(*rows, "rows", logits);
    STD_TORCH_CHECK(rows->is_contiguous() && positions == logits.size(0),
                    "cuda_score_rows: a mask of rows must be contiguous, one of each");
    a.rows_kind = RowsKind::kMask;
    a.rows = rows->const_data_ptr();
  } else if (rows.has_value()) {
    a.rows_kind = RowsKind::kList;
    a.rows = int64_numbers(*rows, "rows", positions, logits);
  }
  if (num_rows.has_value()) {
    STD_TORCH_CHECK(a.rows_kind == RowsKind::kList, "cuda_score_rows: num_rows is of a list");
    a.num_rows = int32_words(*num_rows, "num_rows", 1, logits);
  }
  a.token_ids = int64_numbers(token_ids, "token_ids", positions, logits);
  a.given_ids = int64_numbers(given_ids, "given_ids", positions * a.layout.max_logprob_ids, logits);
  if (temperature.has_value()) {
    check_place(*temperature, "temperature", logits);
    STD_TORCH_CHECK(temperature->scalar_type() == ScalarType::Float &&
                        temperature->is_contiguous() && temperature->numel() == positions,
                    "cuda_score_rows: temperature must be contiguous float32 of ", positions,
                    " numbers");
    a.temperature = static_cast<const float*>(temperature->const_data_ptr());
  }
  if (processed.has_value()) {
    check_place(*processed, "processed", logits);
    STD_TORCH_CHECK(temperature.has_value() && processed->scalar_type() == ScalarType::Bool &&
                        processed->is_contiguous() && processed->numel() == positions,
                    "cuda_score_rows: processed must be contiguous bool of ", positions,
                    " numbers, beside temperature");
    a.processed = static_cast<const uint8_t*>(processed->const_data_ptr());
  }
  a.output = const_cast<int32_t*>(
      int32_words(output, "output", positions * a.layout.output_words(), logits));
  a.scratch = const_cast<int32_t*>(
      int32_words(scratch, "scratch", score_rows_scratch_words(a.layout, entropy), logits));
  a.rank = rank;
  a.entropy = entropy;
  return a;
}

}  // namespace graphed_sampling
