// The memory that a block shares, and what its threads know of the row that it finishes.
#pragma once

#include "block.h"
#include "stream.h"

namespace graphed_sampling {

constexpr int kListed = 2048;        // candidates that a list holds
constexpr int kListedGroups = 1024;  // groups that are read again for one
constexpr int kCachedGroups = 4096;  // whose maxima fit beside the rest: 262144 tokens
constexpr int kBins = kThreads;      // one a thread
constexpr int kMaxListedTopK = 1024;
constexpr int kBracketed = 16384;  // tokens around the cut of a flat row that its list holds

// What all threads of a block know of the row that it finishes. One of them writes it, before a
// barrier.
struct Task {
  Row row;
  Row raw_row;  // the same without all that processing does
  Wishes wishes;
  Statistics at;
  // For flat rows: masses of groups, and tokens around the cut with their y.
  int64_t* masses;
  float* bracket_y;
  int32_t* bracket_ids;
  int32_t* by_row;
  int groups;
  bool in_shared;  // whether the statistics but `moments` are in the block's shared memory
  int index, slot;
  float largest;                 // of y, once it is known
  float raw_largest;             // of the logits
  int64_t total;                 // mass of y at the row's temperature, where that is wanted
  int64_t raw_total;             // mass of the logits; -1 where it is still to be found out
  uint64_t word;                 // of the draw
  int32_t header[kHeaderWords];  // of the parameters
  int32_t state[kStateRecent];   // before the step, without the recent tokens
};

// A token with its y.
struct Drawn {
  int token;
  float y;
};

// The outcome of filters and draw. total: mass of what is kept.
struct Selection {
  bool complete;  // whether it holds: a list may turn out not to have all survivors
  Drawn drawn;
  Kept kept;
  int64_t total;
  int num_kept;
};

// A group in which the draw ends: the mass of what is kept before it and in it.
struct DrawnGroup {
  int group;
  int64_t before, mass;
};

struct Shared {
  Exchange exchange;
  Task task;
  int is_last;
  // What one thread found for all.
  int found;
  float found_y;
  int count;  // of a list that warps append to
  int64_t found_before, found_mass;
  DrawnGroup drawn_group;
  Selection selection;
  int64_t raw_masses[kWarps];  // what each warp adds to the raw mass
  alignas(16) uint32_t bins[kBins];
  int32_t group_list[kListedGroups];
  // Candidates in canonical order.
  float list_y[kListed];
  int32_t list_ids[kListed];
  // A list is sorted when its groups' maxima have done their work.
  union {
    float maxima[kCachedGroups];
    uint64_t keys[kListed];
    unsigned long long mass_bins[kBins];
    struct {
      int64_t list_masses[kThreads], sorted_masses[kThreads];
    };
  };
};

// Maxima of groups: in shared memory, maybe a copy, or where the first pass left them.
struct Maxima {
  const float* cached;
  const float* stored;

  __device__ float operator[](int group) const {
    return cached != nullptr ? cached[group] : load_now(stored + group);
  }
};

}  // namespace graphed_sampling
