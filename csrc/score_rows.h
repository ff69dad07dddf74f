// Logprobs of given tokens at many positions, raw or at a temperature: what a step reports of each
// row, without a draw.
#pragma once

#include <cstdint>

#include "common/device.h"
#include "common/layout.h"
#include "logits_type.h"

namespace graphed_sampling {

// Which rows of the logits positions are about.
enum class RowsKind { kAll, kMask, kList };

// Device memory, as `cuda_score_rows` in graphed_sampling/ops.py describes it; the logits' stride
// in elements. scratch may be null where `score_rows_scratch_words` is 0.
struct ScoreArguments {
  const void* logits;
  int64_t logits_rows, logits_stride;
  LogitsType logits_type;
  RowsKind rows_kind;
  const void* rows;         // of a mask uint8_t [positions], of a list int64_t [positions]
  const int32_t* num_rows;  // [1], how many of a list count; null for all
  int positions;
  const int64_t* token_ids;  // [positions]
  const int64_t* given_ids;  // [positions, layout.max_logprob_ids]
  const float* temperature;  // [positions], of processed rows, in any range; null if all are raw
  const uint8_t* processed;  // [positions], which they are; null for all where there is temperature
  int32_t* output;           // [positions, layout.output_words()], records of positions
  int32_t* scratch;
  bool rank, entropy;
  bool in_shared;  // the launcher chooses it: whether a row's statistics lie in shared memory
  TableLayout layout;
};

// int32 words of scratch, whatever is in them, for any number of positions.
int64_t score_rows_scratch_words(const TableLayout& layout, bool entropy);

// Enqueues 1 to 2**31 - 1 positions. Returns the launch's error. Does not synchronise or allocate,
// so it can be captured. programmatic: as for `launch_sample_step`.
cudaError_t launch_score_rows(const ScoreArguments& arguments, bool programmatic,
                              cudaStream_t stream);

}  // namespace graphed_sampling
