// One step of a table whose vocabulary is sharded: every rank of a group of devices has the logits
// of one range of ids, and draws the same tokens.
#pragma once

#include <cstdint>

#include "sample_step.h"

namespace graphed_sampling {

// What a launch does. The steps of several ranks can be run one after the other on one device, if
// each phase is launched for all of them before the next one is.
constexpr int kStreamPhase = 1;  // reads the rank's shard, sends all ranks what is to know of it
constexpr int kFinishPhase = 2;  // waits for what they send; from there to the next state
constexpr int kClosePhase = 4;   // waits until no rank reads this one's memory for this step
constexpr int kAllPhases = kStreamPhase | kFinishPhase | kClosePhase;

// By rank: addresses in memory that this device reaches. Rows of logits are
// StepArguments.logits_stride elements apart on all ranks.
struct ShardedArguments {
  int ranks, rank, phases;
  int starts[kMostShards + 1];    // ascending from 0 to vocab_size; shards may be empty
  uintptr_t logits[kMostShards];  // of the first row of the shard; of an empty one anything
  int32_t* exchange[kMostShards];
  int64_t limit_ns;  // of a wait
  // The launcher works them out, of sets of tokens, which are streamed at a time: those of which
  // the rank has all tokens, and those of which no rank has.
  int first_set, end_set;
  int split_sets[kMostShards], num_split_sets;
};

// int32 words of a rank's exchange buffer, for steps of up to so many rows. It is aligned to 16
// bytes, and zeroed once, on all ranks before the first step of any.
int64_t sharded_exchange_words(const TableLayout& layout, int64_t rows);

// Enqueues those phases of a step of 1 to 2**24 rows. But for addresses and rank, all ranks pass
// the same. Returns the launch's error. Does not synchronise or allocate, so it can be captured.
cudaError_t launch_sharded_step(const StepArguments& arguments, const ShardedArguments& sharded,
                                bool programmatic, cudaStream_t stream);

}  // namespace graphed_sampling
