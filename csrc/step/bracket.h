// Of many tokens, where the cut of a filter very probably is, and the cut among those around it.
// The blocks of a row's cluster share the passes over the row that this takes.
#pragma once

#include "lists.h"

namespace graphed_sampling {

// Asks the other blocks of the row's cluster for their part of a pass over what is kept; how many
// blocks work then, this one too. Until `join` they may write to this one's shared memory.
// complete(request) adds what the pass needs to know.
template <class Complete>
__device__ inline int ask_others(Shared& shared, Block& block, Pass pass, const Kept& kept,
                                 Complete complete) {
  const Task& task = shared.task;
  // Where rows share a slot, which nobody may do, one of them may be gone.
  const int blocks = shared.helpers == task.blocks - 1 ? task.blocks : 1;
  if (block.thread() == 0) {
    shared.request.pass = pass;
    shared.request.kept = kept;
    shared.request.row = task.row;
    complete(shared.request);
    for (unsigned long long& sum : shared.of_others) sum = 0;
    shared.count = 0;
  }
  __syncthreads();
  if (blocks > 1) {
    constexpr int kWords = static_cast<int>(sizeof(Request) / sizeof(int32_t));
    auto* words = reinterpret_cast<int32_t*>(&shared.request);
    for (int i = block.thread(); i < (blocks - 1) * kWords; i += kThreads) {
      of_block(words, static_cast<unsigned>(1 + i / kWords))[i % kWords] = words[i % kWords];
    }
    __syncwarp();
    cluster_arrive();
  }
  return blocks;
}

// Until the others are through, too.
__device__ inline void join(int blocks) {
  if (blocks == 1) return;
  __syncwarp();
  cluster_wait();
  cluster_arrive();
  cluster_wait();
}

// A thread's part of sums over the row, to those of the block that asked.
__device__ inline void add_to_asker(Shared& shared, Block& block, int i, int64_t value) {
  const int64_t sum = block.sum(value);
  if (block.thread() == 0) {
    atomicAdd(of_block(&shared.of_others[i], 0u), static_cast<unsigned long long>(sum));
  }
}

// What all blocks' threads have, the others' parts being there.
__device__ inline int64_t sum_of_all(Shared& shared, Block& block, int i, int64_t value) {
  return block.sum(value) + static_cast<int64_t>(shared.of_others[i]);
}

// Bins of tokens by a key that is 0 at most, from `high` down: by z, or by the distance from
// `mean`, less of which comes first. What lies below `low` has a bin of its own.
struct FineBins {
  float low, high, width, per_width, unit;

  // tokens: so many weights fit into a bin.
  __device__ FineBins(float low_, float high_, int tokens)
      : low(low_),
        high(high_),
        width((high_ - low_) / static_cast<float>(kFineBins)),
        per_width(static_cast<float>(kFineBins) / (high_ - low_)),
        unit(4.29e9f / static_cast<float>(tokens)) {}
  struct Place {
    int bin;
    float number;  // the bin, as a float
  };
  __device__ Place place(float key) const {
    // What is added leaves no bits for a fraction: neither conversion takes an instruction of its
    // own kind, of which there are few.
    constexpr float kWhole = 8388608.0f;
    const float place = fminf(fmaxf((high - key) * per_width, 0.0f), kFineBins - 1.0f);
    const float whole = __fadd_rz(place, kWhole);
    return {__float_as_int(whole) & 0x7FFFFF, whole - kWhole};
  }
  // The key with which a bin begins.
  __device__ float top(float number) const { return high - width * number; }
  __device__ float top(int bin) const { return top(static_cast<float>(bin)); }
};

// The largest z of a bin. Weights in it are counted in units of 2**that, so that those of low bins
// have as many digits. By distance the tokens above the mean and those below it have bins apart.
__device__ inline float largest_z(const Weighing& weighing, const FineBins& bins, float top,
                                  bool above_mean) {
  if (!weighing.by_distance) return top;
  return above_mean ? weighing.mean - top + bins.width : weighing.mean + top;
}

// A thread's tokens of `weigh_tokens`. kUsual: by weight, of all that lie between two values of y.
template <class Logits, bool kUsual>
__device__ __forceinline__ int64_t weigh_own(int first, int step) {
  Shared& shared = the_shared();
  const Row& row = shared.request.row;
  const Kept kept = shared.request.kept;
  const Weighing weighing = shared.request.weighing;
  const FineBins bins(weighing.low, weighing.high, weighing.sampled * kGroup);
  const float scale = row.scale, lowest = fmaxf(kept.lowest, -kFltMax);
  const void* logits = row.logits;
  const int vocab = row.vocab, lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr unsigned kPiecesOfWindow = kWindow / kPiece;
  const auto windows = static_cast<unsigned>(shared.task.groups / kGroupsOfWindow);
  const auto sampled = static_cast<unsigned>(weighing.sampled / kGroupsOfWindow);
  const int pieces = static_cast<int>(sampled * kPiecesOfWindow);
  // From one window to the next, in parts of a window: a division once, and not for each.
  constexpr int kPartBits = 12;
  const unsigned apart = (windows << kPartBits) / sampled;
  const auto first_of = [&](int piece) {
    const auto place = static_cast<unsigned>(min(piece, pieces - 1));
    const unsigned window = place / kPiecesOfWindow * apart >> kPartBits;
    return static_cast<int>(window * kWindow + place % kPiecesOfWindow * kPiece);
  };
  const bool whole = is_in_whole_pieces<Logits>(row);
  int next_tokens[kAtOnce];
  Pack<Logits> next[kAtOnce];
  const auto load_from = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) next_tokens[i] = first_of(begin + i * step);
    // Without a branch for each they are all on their way at once.
    if (whole) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        next[i] = load_whole_pack<Logits>(logits, min(next_tokens[i], vocab - kPiece));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) next[i] = load_pack<Logits>(row, next_tokens[i]);
    }
  };
  load_from(first);
  int64_t below = 0;
#pragma unroll 1
  for (int begin = first; begin < pieces; begin += kAtOnce * step) {
    int tokens[kAtOnce];
    Pack<Logits> packs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      tokens[i] = next_tokens[i];
      packs[i] = next[i];
    }
    if (begin + kAtOnce * step < pieces) load_from(begin + kAtOnce * step);
    // A loop, whose instructions come once, through which the packs move on.
#pragma unroll 1
    for (int i = 0; i < kAtOnce && begin + i * step < pieces; ++i) {
      const int token = tokens[0];
      float y[kPiece];
      y_of_pack<Logits>(row, packs[0], token, y);
      move_on(packs);
      move_on(tokens);
      if (token >= vocab) continue;
      uint32_t below_of_piece = 0;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if constexpr (kUsual) {
          // Without a branch: the tokens are worked out side by side. Those that have no bin add
          // nothing to one.
          const float z = z_of(y[j], kept.highest, scale);
          const bool counts = y[j] >= lowest && y[j] <= kept.highest && z <= bins.high;
          const bool inside = z >= bins.low;
          const FineBins::Place place = bins.place(z);
          const float base = inside ? bins.top(place.number) : bins.low;
          const auto weight = static_cast<uint32_t>(ex2_approx(z - base) * bins.unit + 0.5f);
          const bool binned = counts && inside;
          atomicAdd(&shared.fine_bins[0][binned ? place.bin : lane], binned ? weight : 0u);
          below_of_piece += counts && !inside ? weight : 0u;
        } else {
          if (!kept.holds(y[j], token + j)) continue;
          const float z = z_of(y[j], kept.highest, scale);
          const float key = weighing.by_distance ? -fabsf(weighing.mean - z) : z;
          if (key > bins.high) continue;
          const bool above_mean = weighing.by_distance && z > weighing.mean;
          const bool inside = key >= bins.low || above_mean;
          const FineBins::Place place = bins.place(key);
          uint32_t weight = 1;
          if (!weighing.by_count) {
            const float base =
                largest_z(weighing, bins, inside ? bins.top(place.number) : bins.low, above_mean);
            // Integers, so that the order of their sums decides nothing.
            weight = static_cast<uint32_t>(ex2_approx(z - base) * bins.unit + 0.5f);
          }
          if (inside) {
            atomicAdd(&shared.fine_bins[above_mean ? 1 : 0][place.bin], weight);
          } else {
            below += weight;
          }
        }
      }
      below += below_of_piece;
    }
  }
  return below;
}

// A block's part of weighing tokens, into its own bins: every `step`th piece from `first` on, of
// evenly spaced windows. Returns what a thread's weigh below all bins.
template <class Logits>
__device__ __noinline__ int64_t weigh_tokens(int first, int step) {
  const Request& request = the_shared().request;
  const bool usual = !request.weighing.by_count && !request.weighing.by_distance &&
                     request.kept.lowest_id >= request.row.vocab - 1;
  return usual ? weigh_own<Logits, true>(first, step) : weigh_own<Logits, false>(first, step);
}

__device__ inline void clear_fine_bins(Shared& shared) {
  static_assert(kFineBins == 4 * kThreads);
  for (auto& bins : shared.fine_bins) reinterpret_cast<uint4*>(bins)[threadIdx.x] = {0, 0, 0, 0};
}

// What another block of the cluster does of `bracket_of`.
template <class Logits>
__device__ inline void help_weighing(Shared& shared, Block& block, int rank, int blocks) {
  clear_fine_bins(shared);
  __syncthreads();
  add_to_asker(shared, block, 0,
               weigh_tokens<Logits>(rank * kThreads + block.thread(), blocks * kThreads));
  // Each block begins somewhere else, so that not all add to the same bins.
  const int number = (shared.request.weighing.by_distance ? 2 : 1) * kFineBins;
  for (int i = block.thread(); i < number; i += kThreads) {
    const int place = (i + rank * (number / blocks)) % number;
    uint32_t* bin = &shared.fine_bins[place / kFineBins][place % kFineBins];
    if (*bin > 0) atomicAdd(of_block(bin, 0u), *bin);
  }
}

// Between which keys the cut very probably is below which kept tokens weigh `budget`, in units of
// the largest weight, or are so many; the upper one is 0 where there is none. weighing: by what, of
// how many groups, and between which keys it must be.
//
// Of a sample, the mass below a bound is about `ratio` times what evenly spaced groups hold of it.
// Its standard deviation is at most the root of ratio * mass * (weight at the bound), since no
// token below the bound weighs more.
template <class Logits>
__device__ __noinline__ Range bracket_of(Shared& shared, Block& block, const Kept kept,
                                         float budget, Weighing weighing) {
  const Task& task = shared.task;
  const float ratio = static_cast<float>(task.groups) / static_cast<float>(weighing.sampled);
  const bool is_sample = weighing.sampled < task.groups;
  // Of all tokens only roundings are uncertain: a bin more at either end.
  const float margin = is_sample ? 0.0f : 1.0f;
  // Again, between the bounds of the last time, where many tokens lie between them and these are
  // hardly wider than a bin.
  constexpr float kEnoughBins = 8.0f, kFewTokens = kBracketed / 4;
  constexpr int kRounds = 2;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const FineBins bins(weighing.low, weighing.high, weighing.sampled * kGroup);
    __syncthreads();
    clear_fine_bins(shared);
    const int blocks = ask_others(shared, block, Pass::kWeigh, kept,
                                  [&](Request& request) { request.weighing = weighing; });
    const int64_t own = weigh_tokens<Logits>(block.thread(), blocks * kThreads);
    join(blocks);
    const auto below_all = static_cast<float>(sum_of_all(shared, block, 0, own));
    // From here on in units of 2**-36 of the largest weight, or of a token.
    constexpr float kFineOne = 68719476736.0f;
    const auto in_fine = [&](float number, float top, bool above_mean) {
      if (weighing.by_count) return static_cast<int64_t>(number * kFineOne);
      const float z = largest_z(weighing, bins, top, above_mean);
      return static_cast<int64_t>(number * ex2_approx(z) * (kFineOne / bins.unit));
    };
    const int first = 4 * block.thread();
    int64_t masses[4] = {};
    float tokens[4] = {};  // a token at the upper end of its bin weighs a unit
    for (int kind = 0; kind < (weighing.by_distance ? 2 : 1); ++kind) {
      const auto* vectors = reinterpret_cast<const uint4*>(shared.fine_bins[kind]);
      const uint4 vector = vectors[block.thread()];
      const uint32_t numbers[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        masses[i] += in_fine(static_cast<float>(numbers[i]), bins.top(first + i), kind == 1);
        tokens[i] += static_cast<float>(numbers[i]) / (weighing.by_count ? 1.0f : bins.unit);
      }
    }
    int64_t all;
    int64_t passed = block.sum_before(masses[0] + masses[1] + masses[2] + masses[3], &all);
    all += in_fine(below_all, bins.low, false);
    // Of bins, by their lower ends: the highest with surely less below it than the budget, the
    // lowest with surely more.
    float low_bin = kFineBins, high_bin = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      passed += masses[i];
      const float below = static_cast<float>(all - passed) * (ratio / kFineOne);
      float error = 4e-5f * (below + budget);
      if (is_sample) {
        const float weight = ex2_approx(bins.top(first + i + 1)) * ratio;
        error = 4.0f * sqrtf(weight * (below + weight));
      }
      if (below + error <= budget) low_bin = fminf(low_bin, static_cast<float>(first + i));
      if (below - error >= budget) high_bin = static_cast<float>(first + i + 1);
    }
    const Range found = block.range(low_bin, high_bin);
    if (weighing.by_count && found.high == static_cast<float>(kFineBins) &&
        weighing.low > weighing.least) {
      // It lies below all bins: on towards the least, of which there may be some far below the
      // rest.
      weighing.high = weighing.low;
      weighing.low = fmaxf(8.0f * weighing.low, weighing.least);
      --round;
      continue;
    }
    const float high = weighing.high;
    if (found.low < kFineBins) weighing.low = high - bins.width * (found.low + 1.0f + margin);
    weighing.high = high - bins.width * fmaxf(found.high - margin, 0.0f);
    if (round == kRounds - 1 || found.low + 1.0f - found.high >= kEnoughBins) break;
    float between = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto bin = static_cast<float>(first + i);
      between += bin >= found.high - margin && bin <= found.low + margin ? tokens[i] : 0.0f;
    }
    if (block.total(between) * ratio <= kFewTokens) break;
  }
  return {weighing.low, weighing.high};
}

static_assert((int64_t{kBracketed} << kLimbBits) < int64_t{1} << 32);

// Whether a row has a place for a list around its cut; smaller ones do without.
__device__ inline bool has_bracket(const Row& row) { return row.vocab > kListed; }

// How few groups tell enough of tokens that weigh no more than those above them.
__device__ inline int groups_of_sample(int groups) {
  constexpr int kSampled = 512, kMostSampled = 8192;
  return min(min(max(kSampled, groups / 2048 * kSampled), kMostSampled), groups);
}

// Below it not even all tokens weigh the budget.
__device__ inline float least_z(float budget, int vocab) {
  return fminf(lg2_approx(budget / static_cast<float>(vocab)), -1.0f);
}

// y of such keys of z. Where y are so large that few floats lie between the bounds, there is one.
__device__ inline Range y_of_keys(const Range& keys, float highest, float scale) {
  return {from_key(key_of(highest + keys.low / scale) - 1),
          keys.high >= 0.0f ? kInf : from_key(key_of(highest + keys.high / scale) + 1)};
}

// Calls use(y, token) for each token of the list around the cut, of which some are on their way at
// a time.
template <class Use>
__device__ inline void for_each_bracketed(const Task& task, int count, Use use) {
  constexpr int kAhead = 4;
  int next_ids[kAhead];
  float next_y[kAhead];
  const auto load_from = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = min(begin + i * kThreads, count - 1);
      next_y[i] = __ldcg(task.bracket_y + at);
      next_ids[i] = __ldcg(task.bracket_ids + at);
    }
  };
  load_from(static_cast<int>(threadIdx.x));
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < count; begin += kAhead * kThreads) {
    int ids[kAhead];
    float y[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ids[i] = next_ids[i];
      y[i] = next_y[i];
    }
    if (begin + kAhead * kThreads < count) load_from(begin + kAhead * kThreads);
    // A loop, whose instructions come once, through which they move on.
#pragma unroll 1
    for (int i = 0; i < kAhead && begin + i * kThreads < count; ++i) {
      use(y[0], ids[0]);
      move_on(y);
      move_on(ids);
    }
  }
}

// Lists the tokens of one bin, in no order, as many as fit; how many there are. use(y, token): what
// a thread does with those of the bins before it.
template <class BinOf, class Use>
__device__ inline int list_bin(Shared& shared, int count, int bin, BinOf bin_of, Use use) {
  for_each_bracketed(shared.task, count, [&](float y, int token) {
    const int of_token = bin_of(y);
    if (of_token < bin) use(y, token);
    if (of_token == bin) {
      const int place = atomicAdd(&shared.count, 1);
      if (place < kListed) {
        shared.list_y[place] = y;
        shared.list_ids[place] = token;
      }
    }
  });
  __syncthreads();
  return shared.count;
}

// The cut among the tokens around it.
struct ListCut {
  bool found;
  uint64_t order;  // what is kept reaches it
  int number;      // of tokens of the list that are kept
  int64_t mass;    // of these; by count, again their number
};

// left: what of the list, between the bounds, is to be kept: mass, relative to `highest`, or, by
// count, tokens. groups: null, or where the masses of what is kept are added to their groups';
// where no cut is found some may have been.
__device__ inline __noinline__ ListCut cut_of_list(Shared& shared, Block& block, int count,
                                                   float low, float high, int64_t left,
                                                   bool by_count, float highest, int64_t* groups) {
  const double scale = load_f64(shared.task.row.params + kParamWideScale);
  const auto mass_at = [&](float y) {
    if (by_count) return int64_t{1};
    return mass_of_y(y, static_cast<double>(highest), scale);
  };
  const Bins bins(low, fminf(high, highest));
  const auto bin_of = [&](float y) { return bins.bin(y); };
  // Integers: the order of the additions decides nothing.
  const auto add_to_group = [&](int token, int64_t mass) {
    atomicAdd(reinterpret_cast<unsigned long long*>(groups) + group_of(token),
              static_cast<unsigned long long>(mass));
  };
  ListCut result = {};
  const CutBin cut = cut_bin(shared, block, left, [&](auto add) {
    for_each_bracketed(shared.task, count, [&](float y, int) { add(bin_of(y), mass_at(y)); });
  });
  if (cut.bin < 0) return result;
  int kept = 0;
  const int in_cut = list_bin(shared, count, cut.bin, bin_of, [&](float y, int token) {
    ++kept;
    if (groups != nullptr) add_to_group(token, mass_at(y));
  });
  if (in_cut > kListed) return result;
  if (in_cut <= kWarp) {
    // A lane each, by every warp.
    const int lane = block.lane();
    const bool own = lane < in_cut;
    const uint64_t order = own ? order_of(shared.list_y[lane], shared.list_ids[lane]) : 0;
    const int64_t of_token = own ? mass_at(shared.list_y[lane]) : 0;
    int64_t before = cut.before;
    int better = 0;
    for (int i = 0; i < in_cut; ++i) {
      const bool above = __shfl_sync(kAllLanes, static_cast<unsigned long long>(order), i) > order;
      const int64_t other = of_lane(of_token, i);
      before += above ? other : 0;
      better += above ? 1 : 0;
    }
    const unsigned here =
        __ballot_sync(kAllLanes, own && before < left && before + of_token >= left);
    const int last = __ffs(static_cast<int>(here)) - 1;
    const int number = __shfl_sync(kAllLanes, better, last) + 1;
    if (groups != nullptr && block.warp() == 0 && own && better < number) {
      add_to_group(shared.list_ids[lane], of_token);
    }
    return {true, __shfl_sync(kAllLanes, static_cast<unsigned long long>(order), last),
            static_cast<int>(block.sum(kept)) + number, of_lane(before + of_token, last)};
  }
  // Its tokens, sorted, have the cut among them.
  const uint64_t* sorted = sort_list(shared, block, in_cut);
  int64_t passed = cut.before;
  const int within = number_within(block, sorted, in_cut, left, &passed, mass_at);
  int64_t mass = 0;
  for (int i = block.thread(); i < within; i += kThreads) {
    const int64_t of_token = mass_at(y_of_order(sorted[i]));
    mass += of_token;
    if (groups != nullptr) add_to_group(id_of_order(sorted[i]), of_token);
  }
  result = {true, sorted[within - 1], static_cast<int>(block.sum(kept)) + within,
            cut.before + block.sum(mass)};
  return result;
}

}  // namespace graphed_sampling
