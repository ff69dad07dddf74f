// The memory that a block shares, and what its threads know of the row that it finishes.
#pragma once

#include "../sample_step.h"
#include "block.h"
#include "stream.h"

namespace graphed_sampling {

constexpr int kListed = 2048;        // candidates that a list holds
constexpr int kListedGroups = 1024;  // groups that are read again for one
constexpr int kSharedGroups = 4096;  // whose statistics fit into shared memory: 262144 tokens
constexpr int kBins = kThreads;      // one a thread
constexpr int kMaxListedTopK = 1024;
// Masses are added up in limbs of so many bits, whose sums fit: additions of 32 bits take one
// instruction.
constexpr int kLimbBits = 14, kMassLimbs = 3;
constexpr int kBracketed = 16384;  // tokens around the cut of a flat row that its list holds
constexpr int kOfLane = 16;        // tokens for it that a lane has at a time
constexpr int kFineBins = 4 * kThreads;

// For who wants to know how a row was filtered and drawn from: by lists, or by a bracket; by
// surveys of all of it, a few for each filter; or by tens of them for one.
constexpr int kByLists = 0, kBySurveys = 1, kBitByBit = 2;

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
  int32_t* way;
  int groups;
  bool in_shared;  // whether maxima and sums are in the block's shared memory
  int index, slot;
  int blocks;                    // of the cluster that the row is finished by
  int streamers;                 // warps that have left Shared::best, 0 where it is not of y
  float largest;                 // of y, once it is known
  float raw_largest;             // of the logits
  int64_t total;                 // mass of y at the row's temperature, where that is wanted
  bool raw_known;                // whether raw_largest and Shared::raw_log are
  float sigma_bound;             // of top_n_sigma, where that is asked for
  uint64_t word;                 // of the draw
  int32_t header[kHeaderWords];  // of the parameters
  int32_t state[kStateRecent];   // before the step, without the recent tokens
};

// Whether a row has no statistics of y, but those of the logits, which y does not exceed.
__device__ inline bool is_lowered(const Task& task) {
  return task.row.checks != 0 && !task.wishes.split;
}

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

// A window in which the draw ends: the mass of what is kept before it and in it.
struct DrawnWindow {
  int window;
  int64_t before, mass;
};

// Tokens into bins, see bracket.h: of `sampled` groups, by what they weigh or by how many they are,
// from key `high` down to `low`. least: below it there is nothing, by count.
struct Weighing {
  int sampled;
  float low, high = 0.0f;
  bool by_count = false, by_distance = false;
  float least = 0.0f, mean = 0.0f;
};

// What a survey, see whole_row.h, adds up of a token besides how many there are: its mass; or, for
// top_n_sigma, of its distance from the largest y, in units of `spread`, or of the square of what
// that has beyond `mean`.
enum class Measure { kNothing, kWeights, kDistances, kSquares };
struct Survey {
  Measure measure;
  bool moments;                 // of the weights, too
  bool by_group;                // whether groups' masses are left
  float low, high;              // tokens between these are counted
  float outer_low, outer_high;  // and others between these are listed
  double mean, spread;
};

// What a row's first block asks the others of its cluster for: their part of a pass over the row.
enum class Pass { kNone, kWeigh, kCollect, kSurvey };
struct Request {
  Pass pass;
  Kept kept;  // which tokens count
  Row row;
  Weighing weighing;
  float high;  // of `collect`
  Survey survey;
};

// What each warp of a row that streamed it has left of the groups' maxima: the order of the largest
// with its group, and the key of the lowest of its lanes', of which half have groups that no other
// has.
constexpr int kMostStreamers = 8 * kWarps;
struct BestOfWarps {
  uint64_t orders[kMostStreamers];
  int32_t lowest[kMostStreamers];
};

__device__ inline void leave_best(const Best& best, BestOfWarps* of_row, int place, int lane) {
  const uint64_t order = max_of_lanes(order_of(best.maximum, best.group));
  const bool has_any = best.maximum > kNegInf;
  const int lowest = __reduce_min_sync(kAllLanes, key_of(has_any ? best.maximum : kInf));
  if (lane == 0) {
    of_row->orders[place] = order;
    of_row->lowest[place] = lowest;
  }
}

// A group of a list, beside which the other one of its window is listed too, or not: so its pieces
// and that one's can be gone through in the order of ids.
struct ListedGroup {
  static constexpr uint32_t kBoth = 1u << 31;
  uint32_t word;

  // groups: of 32, which ones are listed, a bit each; number: its own among them.
  __device__ static ListedGroup of(uint32_t groups, int number, int first) {
    const bool both = (groups >> (number ^ 1) & 1) != 0;
    return {static_cast<uint32_t>(first + number) | (both ? kBoth : 0u)};
  }
  // The first token of the piece that is number `piece` in what the group has of that order.
  __device__ int first_token(int piece) const {
    const int group = static_cast<int>(word & ~kBoth), second = group % kGroupsOfWindow;
    if ((word & kBoth) == 0) return piece_first(group, piece);
    return group / kGroupsOfWindow * kWindow + (second * kPieces + piece) * kPiece;
  }
};

struct Shared {
  StepArguments arguments;
  Task task;
  Request request;
  unsigned long long of_others[3];  // sums of the other blocks' tokens
  int lowest_key, highest_key;      // of tokens that were counted, by all blocks
  int helpers;                      // other blocks that stay until the row is finished
  int is_last;
  // What one thread found for all.
  int found;
  float found_y;
  uint64_t found_order;
  int count;  // of a list that warps append to
  int64_t found_before, found_mass;
  DrawnWindow drawn_window;
  Selection selection;
  float raw_parts[kWarps];  // what each warp has of the sum of raw weights
  double raw_log;           // its logarithm
  BestOfWarps best;
  alignas(16) uint32_t bins[kBins];
  // Groups that are read for a list, until there is one.
  union {
    ListedGroup group_list[kListedGroups];
    uint32_t mass_limbs[kMassLimbs][kBins];
    int32_t in_cut[kThreads];  // places in the list
  };
  // Candidates; in canonical order but around the cut of a flat row.
  float list_y[kListed];
  int32_t list_ids[kListed];
  union alignas(16) {
    uint64_t keys[kListed];
    int64_t masses[kListed];
    uint32_t fine_bins[2][kFineBins];
    CheckedWarp checked[kWarps];
    int32_t of_lanes[kWarps][kOfLane][kWarp];  // tokens that `collect` lists
    struct {
      int64_t list_masses[kThreads], sorted_masses[kThreads];
    };
  };
  Shards shards;  // of a row that has them
};

// Shared memory: the exchange, this, and one after the other the statistics that are there.
constexpr size_t kSharedBytes = sizeof(Exchange) + (sizeof(Shared) + 15) / 16 * 16;
constexpr int kStatisticsInShared = 2;
static_assert(sizeof(Exchange) % 16 == 0);

// With the statistics of so many groups, where they fit.
constexpr size_t shared_bytes(int groups) {
  if (groups > kSharedGroups) return kSharedBytes;
  return kSharedBytes + size_t{kStatisticsInShared} * sizeof(float) * static_cast<size_t>(groups);
}

__device__ inline Shared& the_shared() {
  DYNAMIC_SHARED(unsigned char, memory);
  return *reinterpret_cast<Shared*>(memory + sizeof(Exchange));
}

__device__ inline const Shards& the_shards() { return the_shared().shards; }

__device__ inline CheckedWarp& the_checked_warp() {
  return the_shared().checked[threadIdx.x / kWarp];
}

// maxima and sums of so many groups.
__device__ inline float* the_statistics() {
  DYNAMIC_SHARED(unsigned char, memory);
  return reinterpret_cast<float*>(memory + kSharedBytes);
}

}  // namespace graphed_sampling
