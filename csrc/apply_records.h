// What a step's records say, done to the table of a rank that did not take the step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/layout.h"

namespace graphed_sampling {

struct ApplyArguments {
  TableLayout layout;
  int64_t rows;
  const int32_t* records;  // [rows, layout.output_words()]
  const int32_t* slots;    // [rows], each at most once; others than those of the table are padding
  int32_t* state;          // [layout.rows(), layout.state_words()]
  int32_t* tables;         // [layout.tables_words()]
};

// Advances the slot of a row as the step did that wrote the record. Rows in which nothing was
// drawn, of another generation than the slot's, or of a slot that has finished change nothing.
GS_HOST_DEVICE inline void apply_record(const ApplyArguments& a, int64_t row) {
  const TableLayout& layout = a.layout;
  const int32_t slot = a.slots[row];
  if (slot < 0 || slot >= layout.max_requests) return;
  const int32_t* record = a.records + row * layout.output_words();
  int32_t* state = a.state + static_cast<int64_t>(slot) * layout.state_words();
  const int32_t token = record[kOutputTokenId];
  // The high word tells -1 from a token.
  if (record[kOutputTokenId + 1] != 0 || token < 0 || token >= layout.vocab_size) return;
  if (record[kOutputGeneration] != state[kStateGeneration]) return;
  if (state[kStateFinishReason] != kFinishNone) return;

  const uint32_t position = static_cast<uint32_t>(state[kStatePosition]) + 1;
  state[kStatePosition] = static_cast<int32_t>(position);
  if (position == 0) ++state[kStatePosition + 1];
  state[kStateLastToken] = token;
  state[kStateLastToken + 1] = 0;
  ++state[kStateNumGenerated];
  state[kStateFinishReason] = record[kOutputFinishReason];
  int32_t* recent = state + kStateRecent;
  for (int i = layout.recent_tokens() - 1; i > 0; --i) recent[i] = recent[i - 1];
  if (layout.recent_tokens() > 0) recent[0] = token;
  if (!layout.penalties) return;
  int32_t* bits = a.tables + layout.output_bits() +
                  static_cast<int64_t>(slot) * layout.bitmap_words() + (token >> 5);
  int32_t* count =
      a.tables + layout.counts() + static_cast<int64_t>(slot) * layout.vocab_size + token;
  const auto bit = static_cast<int32_t>(uint32_t{1} << (token & 31));
  *count = ((*bits & bit) != 0 ? *count : 0) + 1;
  *bits |= bit;
}

// `apply_record` of all rows, on the device that is current; nothing is launched for none. Returns
// the launch's error. Does not synchronise or allocate, so it can be captured.
cudaError_t launch_apply_records(const ApplyArguments& arguments, cudaStream_t stream);

}  // namespace graphed_sampling
