// Any number of positions
//
// A block takes one row after the other: it reads the row once, as the step's first pass does, into
// statistics of groups in its shared memory, and works out from these what is asked. The sums are
// the step's own, so that a logprob has the bits of a step's.
//
// Two kernels. In the first, which does all that may be asked, a block reads a row and then works
// it out, while the other block of the multiprocessor reads. In the second, for what most ask for,
// no block ever stops reading: its warps go on to the next row, and one of them, each in its turn,
// works out the row before by itself.
#include <algorithm>
#include <cstdint>

#include "score_rows.h"
#include "step/repair.h"
#include "step/report.h"

namespace graphed_sampling {
namespace {

// Registers for two blocks a multiprocessor, which between them have 64 KB of logits on their way.
constexpr int kScoringBlocks = 2;
// By so much a block's place among the others changes from a round of rows to the next. Where every
// other row is asked for, or one of 3, 4 or 8, no block gets all of them.
constexpr int64_t kTurn = 97;
// Of a device of any size: what `scratch` is for.
constexpr int kMostScoringBlocks = 512;
// Statistics of a block outside shared memory: maxima and sums where they do not fit, and moments.
constexpr int kScoringStatistics = 3;
// In the flags of a record that is not written yet.
constexpr int32_t kLeft = -1;
// Groups of best tokens that a warp reads at a time, and parts of a sum that it works out at a
// time: as many as its registers take.
template <class Logits>
constexpr int kGroupsAtOnce = Logits::kVectors == 1 ? 8 : 4;
template <class Logits>
constexpr int kPartsAtOnce = Logits::kVectors == 1 ? 4 : 1;

__device__ inline void store_position(int32_t* out, float largest, double log, float logprob,
                                      int rank, float entropy, int flags, int num_kept = 0) {
  out[kPositionLargest] = __float_as_int(largest);
  out[kPositionLogNormaliser] = __float_as_int(static_cast<float>(log));
  out[kPositionLogprob] = __float_as_int(logprob);
  out[kPositionRank] = rank;
  out[kPositionNumKept] = num_kept;
  out[kPositionEntropy] = __float_as_int(entropy);
  out[kPositionFlags] = flags;
}

static_assert(kPositionLists == kOutputLists);

// The position's row: -1 for none.
__device__ inline int64_t row_of(const ScoreArguments& a, int index) {
  if (a.rows_kind == RowsKind::kAll) return index;
  if (a.rows_kind == RowsKind::kMask) {
    return static_cast<const uint8_t*>(a.rows)[index] != 0 ? index : -1;
  }
  const int64_t row = static_cast<const int64_t*>(a.rows)[index];
  const bool counts = a.num_rows == nullptr || index < *a.num_rows;
  return counts && row >= 0 && row < a.logits_rows ? row : -1;
}

// A token that is asked about: -1 for none.
__device__ inline int accepted(const ScoreArguments& a, int64_t id) {
  return id >= 0 && id < a.layout.vocab_size ? static_cast<int>(id) : -1;
}

__device__ inline int given_id(const ScoreArguments& a, int index, int i) {
  return accepted(a, a.given_ids[int64_t{index} * a.layout.max_logprob_ids + i]);
}

// What a row is divided by.
struct Temperature {
  bool processed, greedy;
  double scale;  // log2(e) / T
};

// The position's; values outside their range as the nearest accepted one, NaN as greedy.
__device__ inline Temperature temperature_of(const ScoreArguments& a, int index) {
  constexpr float kGreedyBelow = 1e-5f;
  constexpr double kWideLog2E = 1.4426950408889634;
  if (a.temperature == nullptr || (a.processed != nullptr && a.processed[index] == 0)) {
    return {false, false, kWideLog2E};
  }
  const float given = a.temperature[index];
  const float temperature = given != given ? 0.0f : fminf(fmaxf(given, 0.0f), kFltMax);
  if (temperature < kGreedyBelow) return {true, true, kWideLog2E};
  return {true, false, kWideLog2E / static_cast<double>(temperature)};
}

// What the first pass has to leave of a row.
__device__ inline Wishes wishes_for(const Temperature& at, bool entropy) {
  Wishes wishes = {};
  wishes.raw = !at.processed;
  wishes.total = at.processed && !at.greedy;
  wishes.mean = entropy && !at.greedy;
  wishes.own = wishes.total && static_cast<float>(at.scale) != kLog2E;
  return wishes;
}

// Of a processed row, whose largest logit is known: what its logprobs are worked out from. Lets the
// row know what is special about it, and the task of the mass.
template <class Logits>
__device__ __noinline__ Normaliser normaliser_of(Shared& shared, Block& block, const Temperature at,
                                                 float largest) {
  Task& task = shared.task;
  const bool special = !(fabsf(largest) < kInf);
  if (block.thread() == 0) task.largest = largest;
  __syncthreads();
  Normaliser normaliser = {
      true, largest, 0.0, {special ? 0.0f : largest, kNegInf, task.row.vocab}, at.scale};
  if (largest == kNegInf) {
    normaliser.kept = {0.0f, 0.0f, 0};  // the first token, as if it were all
  } else if (at.greedy) {
    const int token = first_maximum<Logits>(shared, block, task.at.maxima);
    normaliser.kept = {normaliser.kept.highest, normaliser.kept.highest, token};
  } else {
    const int64_t mass = mass_of_groups(shared, block, task.at.maxima, task.at.sums, largest,
                                        static_cast<float>(at.scale));
    if (block.thread() == 0) task.total = mass;
    normaliser.log = log_mass(mass);
  }
  __syncthreads();
  if (special && block.thread() == 0) {
    task.row.special = largest == kInf ? kPositiveInfinity : kEmptyRow;
    task.row.fallback = 0;
  }
  __syncthreads();
  return normaliser;
}

// From a row's statistics to its record.
template <class Logits>
__device__ __noinline__ void score_row(const ScoreArguments& a, int index, int token,
                                       int32_t* out) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const Temperature at = temperature_of(a, index);
  const TableLayout& layout = a.layout;
  Block block = {0};
  const int thread = block.thread();
  int flags = 0;
  float largest = largest_of(shared, block, task.at.maxima);
  if (largest == kInf) {
    if (repair_groups<Logits>(shared, block, false)) flags |= kRowNan;
    largest = largest_of(shared, block, task.at.maxima);
  }
  if (is_far(largest)) repair_groups<Logits>(shared, block, true);
  if (largest == kInf) flags |= kRowPosInf;
  if (largest == kNegInf) flags |= kRowEmpty;
  Normaliser normaliser = {false, largest, 0.0, {}, 0.0};
  if (at.processed) {
    normaliser = normaliser_of<Logits>(shared, block, at, largest);
  } else {
    normaliser.log = raw_log(shared, block, task.at.maxima, task.at.sums, largest);
  }
  const bool one_kept = at.processed && (at.greedy || largest == kNegInf);

  float entropy = nan_f32();
  if (a.entropy && largest == kInf) entropy = static_cast<float>(normaliser.log);
  if (a.entropy && one_kept) {
    entropy = 0.0f;
  } else if (a.entropy && fabsf(largest) < kInf) {
    if (!at.processed) {
      const int64_t total =
          mass_of_groups(shared, block, task.at.maxima, task.at.sums, largest, kLog2E);
      if (thread == 0) {
        task.largest = largest;
        task.total = total;
      }
      __syncthreads();
    }
    const double mean = mean_of_groups(shared, block);
    entropy = static_cast<float>(fmax(normaliser.log - mean * kLn2, 0.0));
  }

  const Row& row = task.row;  // special only where it is processed
  clear_lists(layout, out, 0, layout.max_logprobs, threads_of_block());
  for (int i = thread; i < layout.max_logprob_ids; i += kThreads) {
    const int given = given_id(a, index, i);
    if (given < 0) continue;
    const float x = load_logit<Logits>(row, given);
    const float logprob = normaliser.logprob(x, special_or(row, x, given), given);
    out[layout.given_logprobs() + i] = __float_as_int(logprob);
  }
  if (layout.max_logprobs > 0) {
    __syncthreads();  // the lists are cleared
    report_top<Logits>(shared, block, row, task.at.maxima, layout, out, layout.max_logprobs,
                       normaliser);
  }
  float logprob = nan_f32();
  int rank = 0;
  if (token >= 0) {
    const float x = load_logit<Logits>(row, token);
    const float y = special_or(row, x, token);
    logprob = normaliser.logprob(x, y, token);
    if (a.rank && at.processed && largest == kNegInf) {
      rank = token == 0 ? 1 : 2;
    } else if (a.rank) {
      rank = report_rank<Logits>(shared, block, row, task.at.maxima, y);
    }
  }
  if (thread == 0) {
    store_position(out, largest, largest == kNegInf ? 0.0 : normaliser.log, logprob, rank, entropy,
                   flags, one_kept ? 1 : 0);
  }
}

// Lists of a padding position, and its record.
__device__ inline void store_padding(const TableLayout& layout, int32_t* out, Threads threads) {
  clear_lists(layout, out, 0, 0, threads);
  if (threads.mine == 0) {
    store_position(out, kNegInf, 0.0, nan_f32(), 0, nan_f32(), kRowPadding);
  }
}

__device__ inline Source source_of(const ScoreArguments& a, int64_t row) {
  const char* logits =
      static_cast<const char*>(a.logits) + row * a.logits_stride * bytes_of(a.logits_type);
  return {logits, a.layout.vocab_size, reinterpret_cast<uintptr_t>(logits) % 16 == 0};
}

// Which position a block has in a round: -1 for none.
__device__ inline int position_in_round(const ScoreArguments& a, int64_t round) {
  const auto blocks = static_cast<int64_t>(gridDim.x);
  const int64_t place = round * blocks + (blockIdx.x + round * kTurn) % blocks;
  return place < a.positions ? static_cast<int>(place) : -1;
}

// The block's positions one after the other; only_left: those whose record says that it is left.
template <class Logits>
__device__ __noinline__ void score_by_block(const ScoreArguments& a, bool only_left) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int groups = groups_of(a.layout.vocab_size), tiles = groups / kGroupsOfTile;
  float* scratch = reinterpret_cast<float*>(a.scratch) +
                   static_cast<int64_t>(blockIdx.x) * kScoringStatistics * groups;
  float* statistics = a.in_shared ? the_statistics() : scratch;
  const Statistics at = {statistics, statistics + groups, nullptr, nullptr, scratch + 2 * groups};
  for (int64_t round = 0; round * gridDim.x < a.positions; ++round) {
    const int index = position_in_round(a, round);
    if (index < 0) continue;
    int32_t* out = a.output + int64_t{index} * a.layout.output_words();
    if (only_left && out[kPositionFlags] != kLeft) continue;
    const int64_t at_row = row_of(a, index);
    const int token = accepted(a, a.token_ids[index]);
    if (at_row < 0) {
      store_padding(a.layout, out, threads_of_block());
      continue;
    }
    const Source source = source_of(a, at_row);
    const Temperature temperature = temperature_of(a, index);
    const Wishes wishes = wishes_for(temperature, a.entropy);
    const auto scale = static_cast<float>(temperature.scale);
    const int whole = tiles_to_load<Logits>(source);
    Set<Logits> sets[kSets] = {};
    if (warp < min(tiles, whole)) load_tile(source, warp, lane, sets);
    if (threadIdx.x == 0) {
      task.row = {};
      static_cast<Source&>(task.row) = source;
      task.row.special = kNormal;
      task.row.scale = scale;
      task.wishes = wishes;
      task.at = at;
      task.groups = groups;
      task.in_shared = a.in_shared;
    }
    stream_tiles<true, Logits>(source, wishes, scale, warp, kWarps, tiles, whole, lane, sets, at);
    __syncthreads();
    score_row<Logits>(a, index, token, out);
    __syncthreads();  // before the next row's statistics take the place of these
  }
}

template <class Logits>
__global__ void __launch_bounds__(kThreads, kScoringBlocks)
    score_rows_kernel(const __grid_constant__ ScoreArguments a) {
  grid_dependency_wait();
  grid_dependency_launch();
  score_by_block<Logits>(a, false);
}

// A warp works a row out when it has read its share of so many others: whoever does so is late with
// the next row by that, and no other waits for it until then. Statistics of rows have so many
// places.
constexpr int kBehind = 1, kPlaces = kBehind + 2;
// The best tokens that a warp reports by itself, and what it lists to find them: groups, tokens.
constexpr int kTopOfWarp = 24, kListedGroupsOfWarp = 96, kListedOfWarp = 128;

// A position of the block with a row.
struct Turn {
  int index, row;
  int token;  // -1 for none
};
constexpr int kTurns = kThreads;

// What the warps of `score_read_rows_kernel` share, in front of the statistics. It takes the place
// of what a block needs to work out a row, since the less memory is shared, the more of it holds
// what is being loaded.
struct alignas(16) Relay {
  uint64_t read[kPlaces];    // gates: all warps have read the row whose statistics are here
  uint64_t scored[kPlaces];  // the row is worked out
  uint64_t orders[kWarps][kListedOfWarp];
  int32_t groups[kWarps][kListedGroupsOfWarp];
  Turn turns[kTurns];
  int turns_of_warp[kWarps];
  int count;  // of the turns
  int tiles;  // of a row
  int left;   // rows that are left to the block
};

__device__ inline Relay& the_relay() {
  DYNAMIC_SHARED(Relay, relay);
  return *relay;
}

// Statistics of kPlaces rows.
__device__ inline float* the_places() { return reinterpret_cast<float*>(&the_relay() + 1); }

// Behind these, where there may be temperatures: of each turn the scale of its weights' exponents.
__device__ inline float* the_scales(int groups) {
  return the_places() + kPlaces * kStatisticsInShared * groups;
}

// The best tokens of a row, by a warp: false, with nothing written, where they are not found among
// as many as its list holds. mine: the largest of the groups that a lane has looked at.
template <class Logits>
__device__ inline bool top_by_warp(const ScoreArguments& a, const Source& source, int32_t* out,
                                   const float* maxima, int groups, float mine,
                                   const Normaliser& normaliser, int warp, int lane) {
  Relay& relay = the_relay();
  const int n = a.layout.max_logprobs;
  // As many groups as lanes that are not below it, and so tokens, reach what the n-th of them has.
  int above = 0;
#pragma unroll
  for (int i = 1; i < kWarp; ++i) {
    const int other = (lane + i) % kWarp;
    const float of_other = __shfl_sync(kAllLanes, mine, other);
    above += of_other > mine || (of_other == mine && other < lane) ? 1 : 0;
  }
  const float bound = from_key(__reduce_min_sync(kAllLanes, key_of(above < n ? mine : kInf)));
  if (bound == kNegInf) return false;
  int32_t* group_list = relay.groups[warp];
  int listed = 0;
#pragma unroll 4
  for (int first = 0; first < groups; first += kWarp) {
    const bool reaches = load_now(maxima + first + lane) >= bound;
    const unsigned reaching = __ballot_sync(kAllLanes, reaches);
    const int place = listed + __popc(reaching & ((1u << lane) - 1));
    if (reaches && place < kListedGroupsOfWarp) group_list[place] = first + lane;
    listed += __popc(reaching);
  }
  if (listed > kListedGroupsOfWarp) return false;
  __syncwarp();
  uint64_t* orders = relay.orders[warp];
  int count = 0;
  constexpr int kAtATime = kGroupsAtOnce<Logits>;
#pragma unroll 1
  for (int i = 0; i < listed; i += kAtATime) {
    float x[kAtATime][2];
    int ids[kAtATime];
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      ids[j] = token_of_group(group_list[min(i + j, listed - 1)], 2 * lane);
      x[j][0] = x[j][1] = kNegInf;
      if (i + j < listed && ids[j] < source.vocab) {
        Logits::load_pair(source.logits, ids[j], x[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
#pragma unroll
      for (int of_pair = 0; of_pair < 2; ++of_pair) {
        const float value = sanitised(x[j][of_pair]);
        const bool reaches = value >= bound;
        const unsigned reaching = __ballot_sync(kAllLanes, reaches);
        const int place = count + __popc(reaching & ((1u << lane) - 1));
        if (reaches && place < kListedOfWarp) orders[place] = order_of(value, ids[j] + of_pair);
        count += __popc(reaching);
      }
    }
  }
  if (count > kListedOfWarp) return false;
  __syncwarp();
  for (int i = lane; i < count; i += kWarp) {
    const uint64_t order = orders[i];
    int place = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) place += orders[j] > order ? 1 : 0;
    if (place < n) {
      const float x = y_of_order(order);
      const int id = id_of_order(order);
      store_top(a.layout, out, place, id, normaliser.logprob(x, x, id));
    }
  }
  return true;
}

// From the statistics of the row of that turn to its record, by a warp; bit for bit as `score_row`
// does. Rows with infinities, those whose best tokens are too many, and of temperatures the least
// and the largest are left, and their record says so. kTempered: whether there may be a
// temperature.
template <class Logits, bool kTempered>
__device__ __noinline__ void score_by_warp(const ScoreArguments& a, int number, int warp,
                                           int lane) {
  Relay& relay = the_relay();
  const TableLayout& layout = a.layout;
  const Turn turn = relay.turns[number];
  const Source source = source_of(a, turn.row);
  int32_t* out = a.output + int64_t{turn.index} * layout.output_words();
  const int groups = groups_of(layout.vocab_size);
  const float* maxima = the_places() + number % kPlaces * kStatisticsInShared * groups;
  const float* sums = maxima + groups;
  const auto leave = [&] {
    if (lane == 0) {
      out[kPositionFlags] = kLeft;
      atomicAdd(&relay.left, 1);
    }
  };
  const float x =
      turn.token >= 0 ? sanitised(Logits::value(load_bits<Logits>(source, turn.token))) : 0.0f;
  float mine = kNegInf;
#pragma unroll 4
  for (int group = 4 * lane; group < groups; group += 4 * kWarp) {
    mine = fmaxf(mine, vector_now(maxima + group).largest());
  }
  const float largest = from_key(__reduce_max_sync(kAllLanes, key_of(mine)));
  if (!(fabsf(largest) < kInf) || is_far(largest)) {
    leave();
    return;
  }
  Normaliser normaliser = {false, largest, 0.0, {}, 0.0};
  if constexpr (kTempered) {
    const Temperature at = temperature_of(a, turn.index);
    const auto scale = static_cast<float>(at.scale);
    if (at.greedy || scale < kLeastScale) {
      leave();
      return;
    }
    if (at.processed) {
      const int64_t mass = mass_by_warp(groups, maxima, sums, largest, scale, lane);
      normaliser = {true, largest, log_mass(mass), {largest, kNegInf, source.vocab}, at.scale};
    }
  }
  if (!normaliser.processed) {
    normaliser.log = log_of_sum(
        weight_by_warp<kPartsAtOnce<Logits>>(groups, maxima, sums, {largest, kLog2E}, lane));
  }
  if (layout.max_logprobs > 0 &&
      !top_by_warp<Logits>(a, source, out, maxima, groups, mine, normaliser, warp, lane)) {
    leave();
    return;
  }
  for (int i = lane; i < layout.max_logprob_ids; i += kWarp) {
    const int given = given_id(a, turn.index, i);
    float logprob = nan_f32();
    if (given >= 0) {
      const float of_given = sanitised(Logits::value(load_bits<Logits>(source, given)));
      logprob = normaliser.logprob(of_given, of_given, given);
    }
    out[layout.given_logprobs() + i] = __float_as_int(logprob);
  }
  if (lane == 0) {
    const float logprob = turn.token >= 0 ? normaliser.logprob(x, x, turn.token) : nan_f32();
    store_position(out, largest, normaliser.log, logprob, 0, nan_f32(), 0);
  }
}

// So many rows a multiprocessor are many.
constexpr int kManyRounds = 4;

constexpr size_t relay_bytes(int groups, bool tempered) {
  size_t own = sizeof(Relay) +
               size_t{kPlaces} * kStatisticsInShared * sizeof(float) * static_cast<size_t>(groups);
  if (tempered) own += kTurns * sizeof(float);
  return std::max(own, shared_bytes(groups));
}
// Of so many groups a row, two blocks a multiprocessor fit: each may have 99 KB where capability
// 8.6 or 8.9 says what is least.
constexpr int kRelayedGroups = 3584, kTemperedGroups = 3520;
static_assert(relay_bytes(kRelayedGroups, false) <= 99 * 1024 &&
              relay_bytes(kTemperedGroups, true) <= 99 * 1024);

// The positions of a block in so many rounds that have a row, one after the other, into the relay's
// list; the others are padding, and get their record. How many have one.
template <bool kTempered>
__device__ __noinline__ void list_turns(const ScoreArguments& a, int64_t first_round) {
  Relay& relay = the_relay();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  static_assert(kTurns == kThreads);
  const int64_t round = first_round + thread;
  const int index = round * gridDim.x < a.positions ? position_in_round(a, round) : -1;
  Turn turn = {index, -1, -1};
  [[maybe_unused]] float scale = kLog2E;
  if (index >= 0) {
    turn.row = static_cast<int>(row_of(a, index));
    turn.token = accepted(a, a.token_ids[index]);
    if constexpr (kTempered) scale = static_cast<float>(temperature_of(a, index).scale);
    if (turn.row < 0) {
      store_padding(a.layout, a.output + int64_t{index} * a.layout.output_words(), {0, 1});
    }
  }
  const unsigned valid = __ballot_sync(kAllLanes, turn.row >= 0);
  if (lane == 0) relay.turns_of_warp[warp] = __popc(valid);
  __syncthreads();
  int place = __popc(valid & ((1u << lane) - 1)), count = 0;
  for (int i = 0; i < kWarps; ++i) {
    place += i < warp ? relay.turns_of_warp[i] : 0;
    count += relay.turns_of_warp[i];
  }
  if (turn.row >= 0) {
    relay.turns[place] = turn;
    if constexpr (kTempered) the_scales(groups_of(a.layout.vocab_size))[place] = scale;
  }
  if (thread == 0) relay.count = count;
}

// Rows that are aligned and end with a whole piece; neither ranks nor entropies.
template <class Logits, bool kTempered>
__global__ void __launch_bounds__(kThreads, kScoringBlocks)
    score_read_rows_kernel(const __grid_constant__ ScoreArguments a) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int groups = groups_of(a.layout.vocab_size);
  Relay& relay = the_relay();
  float* places = the_places();
  if (threadIdx.x == 0) {
    relay.left = 0;
    relay.tiles = groups / kGroupsOfTile;
  }
  // The first row, if it has logits, is asked for before the others are known.
  const int first_position = position_in_round(a, 0);
  const int early = first_position >= 0 ? static_cast<int>(row_of(a, first_position)) : -1;
  Set<Logits> sets[kSets] = {};
  if (early >= 0) load_tile(source_of(a, early), warp, lane, sets);
  // What a warp knows of rows lies in shared memory: its registers are for logits, and other memory
  // answers as late as these do.
  for (int first = 0; int64_t{first} * gridDim.x < a.positions; first += kTurns) {
    list_turns<kTempered>(a, first);
    if (threadIdx.x < kPlaces) {
      gate_init(&relay.read[threadIdx.x], kThreads);
      gate_init(&relay.scored[threadIdx.x], kWarp);
    }
    __syncthreads();
    Best unused;
    // The warps take tiles in turns, from one row to the next.
    int tile = warp;
    Source source = source_of(a, relay.count > 0 ? relay.turns[0].row : 0);
    if (relay.count > 0 && (first > 0 || relay.turns[0].row != early)) {
      load_tile(source, tile, lane, sets);
    }
#pragma unroll 1
    for (int number = 0; number < relay.count + kBehind; ++number) {
      if (number < relay.count) {
        const int place = number % kPlaces;
        if (number >= kPlaces) gate_wait(&relay.scored[place], (number / kPlaces - 1) & 1);
        float* maxima = places + place * kStatisticsInShared * groups;
        const Statistics at = {maxima, maxima + groups, nullptr, nullptr, nullptr};
        const float scale = kTempered ? load_now(the_scales(groups) + number) : kLog2E;
        const Wishes wishes = {false, false, true, false, kTempered && scale != kLog2E, false};
#pragma unroll 1
        for (bool last = false; !last;) {
          int following = tile + kWarps;
          const int tiles = load_now(&relay.tiles);
          last = following >= tiles;
          if (last) {
            following -= tiles;
            if (number + 1 < relay.count) source = source_of(a, relay.turns[number + 1].row);
          }
          const bool loads = !last || number + 1 < relay.count;
#pragma unroll
          for (int i = 0; i < kSets; ++i) {
            stream_set<false, false>(wishes, scale, tile, i, lane, sets[i], at, unused);
            if (loads) sets[i] = load_set<Logits>(source, following, i, lane);
          }
          tile = following;
        }
        gate_arrive(&relay.read[place]);
      }
      const int behind = number - kBehind;
      if (behind >= 0 && behind % kWarps == warp) {
        gate_wait(&relay.read[behind % kPlaces], behind / kPlaces & 1);
        score_by_warp<Logits, kTempered>(a, behind, warp, lane);
        gate_arrive(&relay.scored[behind % kPlaces]);
      }
    }
    __syncthreads();
    if (threadIdx.x < kPlaces) {
      gate_end(&relay.read[threadIdx.x]);
      gate_end(&relay.scored[threadIdx.x]);
    }
  }
  const bool any_left = relay.left > 0;
  __syncthreads();  // what was read here has its place taken
  if (any_left) score_by_block<Logits>(a, true);
}

}  // namespace

int64_t score_rows_scratch_words(const TableLayout& layout, bool entropy) {
  const int groups = groups_of(layout.vocab_size);
  if (!entropy && groups <= kSharedGroups) return 0;
  return int64_t{kMostScoringBlocks} * kScoringStatistics * groups;
}

cudaError_t launch_score_rows(const ScoreArguments& arguments, bool programmatic,
                              cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const TableLayout& layout = arguments.layout;
  const int groups = groups_of(layout.vocab_size);
  ScoreArguments chosen = arguments;
  chosen.in_shared = groups <= kSharedGroups;
  const bool tempered = arguments.temperature != nullptr;
  const auto launch = [&](auto logits) {
    using Logits = decltype(logits);
    const int64_t bytes_of_logit = sizeof(typename Logits::Bits);
    const bool aligned = reinterpret_cast<uintptr_t>(arguments.logits) % 16 == 0 &&
                         arguments.logits_stride * bytes_of_logit % 16 == 0 &&
                         layout.vocab_size % kPiece == 0;
    const bool numbered = arguments.logits_rows <= INT32_MAX;  // by what a turn holds
    // A row by itself is sooner worked out by all warps.
    const bool relayed =
        aligned && numbered && arguments.positions > kManyRounds * multiprocessors &&
        !arguments.rank && !arguments.entropy && layout.max_logprobs <= kTopOfWarp &&
        groups >= kWarps * kGroupsOfTile && groups <= (tempered ? kTemperedGroups : kRelayedGroups);
    void (*const kernel)(ScoreArguments) = !relayed   ? score_rows_kernel<Logits>
                                           : tempered ? score_read_rows_kernel<Logits, true>
                                                      : score_read_rows_kernel<Logits, false>;
    const size_t bytes = relayed ? relay_bytes(groups, tempered) : shared_bytes(groups);
    const cudaError_t allowed = allow_dynamic_shared(kernel, static_cast<int>(bytes));
    if (allowed != cudaSuccess) return allowed;
    // Blocks that all run from the start: each then takes its share of the rows.
    const int blocks =
        std::min({arguments.positions, kScoringBlocks * multiprocessors, kMostScoringBlocks});
    return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, bytes, stream,
                         programmatic, 1, chosen);
  };
  switch (arguments.logits_type) {
    case LogitsType::kFloat32:
      return launch(Float32());
    case LogitsType::kBFloat16:
      return launch(BFloat16());
    default:
      return launch(Float16());
  }
}

}  // namespace graphed_sampling
