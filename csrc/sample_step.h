// One step of a table: from logits to tokens, logprobs and the next state.
#pragma once

#include <cstdint>

#include "common/device.h"
#include "common/layout.h"
#include "logits_type.h"

namespace graphed_sampling {

// Device memory, as `sample_step` in graphed_sampling/ops.py describes it; strides in elements.
// grammar_bitmask, words and given may be null.
struct StepArguments {
  const void* logits;
  int64_t logits_stride;
  LogitsType logits_type;
  int rows;
  int blocks_of_row;  // the launcher chooses it, and
  bool in_shared;     // whether the row's first block has its statistics in shared memory
  int late_cycles;    // blocks [late_blocks, 2 * late_blocks) begin later by so many, where a row
  int late_blocks;    // with a slot follows these
  const int32_t* slots;
  const int32_t* params;
  int32_t* state;
  int32_t* tables;
  int32_t* output;
  int32_t* scratch;
  const int32_t* grammar_bitmask;
  int64_t grammar_bitmask_stride;
  const int64_t* words;
  const int32_t* given;
  TableLayout layout;
};

// int32 words of scratch that a step of so many rows needs. It must be zeroed once, before its
// first step; a step leaves it as the next one needs it.
int64_t sample_step_scratch_words(const TableLayout& layout, int64_t rows);

// So many groups of 64 tokens a row of group_stats has: a multiple of 4, so that each row's maxima
// and sums are whole 16-byte vectors. What stands at groups without tokens is not looked at.
GS_HOST_DEVICE constexpr int groups_of_stats(int vocab_size) {
  return (vocab_size + 255) / 256 * 4;
}

// Enqueues one step of 1 to 2**24 rows. Returns the launch's error. Does not synchronise or
// allocate, so it can be captured. group_stats: null, or of each row the maxima of its groups, then
// their sums, aligned to 16 bytes; `given` then has a third word, which tells whether they count.
// programmatic: the step may begin while the kernel before it ends (programmatic dependent launch;
// compute capability 9.0).
cudaError_t launch_sample_step(const StepArguments& arguments, const float* group_stats,
                               bool programmatic, cudaStream_t stream);

}  // namespace graphed_sampling
