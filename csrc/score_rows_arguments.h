// From the tensors of the op to the arguments of its launcher, on every device. The op's caller has
// checked shapes and ids; what could write to a stranger's memory is checked again.
#pragma once

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

inline ScoreArguments score_arguments(const Tensor& logits, const Tensor& rows,
                                      const Tensor& token_ids, const Tensor& given_ids,
                                      const Tensor& output, const Tensor& scratch,
                                      const std::vector<int64_t>& layout, bool rank, bool entropy) {
  ScoreArguments a = {};
  a.layout = table_layout(layout);
  a.logits_type = logits_type(logits, a.layout.vocab_size);
  a.logits = logits.const_data_ptr();
  a.logits_rows = logits.size(0);
  a.logits_stride = logits.size(0) > 1 ? logits.stride(0) : logits.size(1);
  const int64_t positions = rows.numel();
  STD_TORCH_CHECK(positions >= 1 && positions < int64_t{1} << 31, "cuda_score_rows: there are ",
                  positions, " positions; it takes 1 to 2**31 - 1");
  a.positions = static_cast<int>(positions);
  a.rows = int64_numbers(rows, "rows", positions, logits);
  a.token_ids = int64_numbers(token_ids, "token_ids", positions, logits);
  a.given_ids = int64_numbers(given_ids, "given_ids", positions * a.layout.max_logprob_ids, logits);
  a.output = const_cast<int32_t*>(
      int32_words(output, "output", positions * a.layout.output_words(), logits));
  a.scratch = const_cast<int32_t*>(
      int32_words(scratch, "scratch", score_rows_scratch_words(a.layout, entropy), logits));
  a.rank = rank;
  a.entropy = entropy;
  return a;
}

}  // namespace graphed_sampling
