// What the statistics of groups tell: masses, bounds, which groups to read again.
#pragma once

#include "shared.h"

namespace graphed_sampling {

__device__ inline int64_t group_mass(float maximum, float sum, float largest, float scale) {
  if (maximum == kNegInf) return 0;
  const float z = maximum == largest ? 0.0f : z_of(maximum, largest, scale);
  return static_cast<int64_t>(sum * ex2_approx(z) * static_cast<float>(kOne));
}

// A group's mass that a pass over the row has left.
__device__ inline int64_t mass_left(const Task& task, int group) {
  return static_cast<int64_t>(__ldcg(reinterpret_cast<const long long*>(task.masses) + group));
}

// The largest of groups' maxima.
__device__ inline float largest_of(Shared& shared, Block& block, const float* maxima) {
  float largest = kNegInf;
  for (int group = block.thread(); group < shared.task.groups; group += kThreads) {
    largest = fmaxf(largest, load_now(maxima + group));
  }
  return block.max(largest);
}

// The mass of all groups, relative to the largest.
__device__ inline int64_t mass_of_groups(Shared& shared, Block& block, const float* maxima,
                                         const float* sums, float largest, float scale) {
  int64_t mass = 0;
  for (int group = block.thread(); group < shared.task.groups; group += kThreads) {
    mass += group_mass(load_now(maxima + group), load_now(sums + group), largest, scale);
  }
  return block.sum(mass);
}

// The groups that are a thread's, 4 at a time: neighbours, so that ids ascend as threads do.
struct Owned {
  int first, vectors, groups;

  __device__ Owned(int groups_, int thread)
      : vectors((groups_ + 4 * kThreads - 1) / (4 * kThreads)), groups(groups_) {
    first = thread * 4 * vectors;
  }
  // Calls use(i, group) for the first group of each 4. Not unrolled: what a row waits for is
  // one instruction after the other, half of the time for its coming from memory.
  template <class Use>
  __device__ void each(Use use) const {
#pragma unroll 1
    for (int i = 0; i < vectors && first + 4 * i < groups; ++i) use(i, first + 4 * i);
  }
};

// Of a row whose logits bound its y: how many groups are read first for so many best tokens, since
// some y are lower; and how many groups at most, no more than there are threads with some.
__device__ inline int first_reached(int flags, int top_k) {
  const int tokens = (flags & kGreedy) != 0 ? 1 : top_k;
  return tokens + tokens / 8 + 4;
}
__device__ inline int most_reached(int groups) { return groups / (4 * Owned(groups, 0).vectors); }

struct Vector {
  float values[4];

  __device__ explicit Vector(const float4& vector) {
    values[0] = vector.x;
    values[1] = vector.y;
    values[2] = vector.z;
    values[3] = vector.w;
  }
  // In shared memory.
  __device__ explicit Vector(const float* place)
      : Vector(*reinterpret_cast<const float4*>(place)) {}
  __device__ float operator[](int i) const { return values[i]; }
  __device__ float largest() const {
    return fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3]));
  }
};

// Of statistics that may be in any memory.
__device__ inline Vector vector_now(const float* place) {
  return Vector(load_now(reinterpret_cast<const float4*>(place)));
}

// `weight` with the weights of 4 neighbouring groups relative to the largest, which is finite.
__device__ inline float with_weights(float weight, const float* maxima, const float* sums,
                                     const Exponents& exponents) {
  const Vector maximum = vector_now(maxima), sum = vector_now(sums);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    weight = __fmaf_rn(sum[j], ex2_approx(exponents.narrow_z(maximum[j])), weight);
  }
  return weight;
}

// A thread's part of the sum of groups' weights.
__device__ inline float weight_of_owned(const Owned& owned, const float* maxima, const float* sums,
                                        const Exponents& exponents) {
  float weight = 0.0f;
  owned.each([&](int, int group) {
    weight = with_weights(weight, maxima + group, sums + group, exponents);
  });
  return weight;
}

// The sum of groups' weights, by one warp, in the order in which a block adds its threads' parts:
// it works out those of so many warps at a time.
template <int kAtATime>
__device__ inline float weight_by_warp(int groups, const float* maxima, const float* sums,
                                       const Exponents& exponents, int lane) {
  const int vectors = Owned(groups, lane).vectors;
  float weight = 0.0f;
#pragma unroll 1
  for (int first = 0; first < kWarps; first += kAtATime) {
    float parts[kAtATime] = {};
#pragma unroll 1
    for (int i = 0; i < vectors; ++i) {
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const int group = Owned(groups, (first + k) * kWarp + lane).first + 4 * i;
        if (group < groups) {
          parts[k] = with_weights(parts[k], maxima + group, sums + group, exponents);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) parts[k] = sum_of_lanes(parts[k]);
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) weight += parts[k];
  }
  return weight;
}

// The mass of all groups, by one warp.
__device__ inline int64_t mass_by_warp(int groups, const float* maxima, const float* sums,
                                       float largest, float scale, int lane) {
  int64_t mass = 0;
#pragma unroll 4
  for (int group = lane; group < groups; group += kWarp) {
    mass += group_mass(load_now(maxima + group), load_now(sums + group), largest, scale);
  }
  return sum_of_lanes(mass);
}

// A thread's part of the mass of all groups, whose statistics are in shared memory.
__device__ inline int64_t mass_of_owned(const Owned& owned, const float* maxima, const float* sums,
                                        float largest, float scale) {
  int64_t mass = 0;
  owned.each([&](int, int group) {
    const Vector maximum(maxima + group), sum(sums + group);
#pragma unroll
    for (int j = 0; j < 4; ++j) mass += group_mass(maximum[j], sum[j], largest, scale);
  });
  return mass;
}

// Leaves each warp's part of the sum of the raw weights for `log_of_parts`, behind a barrier. A
// row's raw logprobs come from this sum wherever its largest is finite, so that they have the same
// bits whatever its request asks.
__device__ inline void leave_parts(Shared& shared, Block& block, const Owned& owned,
                                   const float* maxima, const float* sums, float largest) {
  const float part = sum_of_lanes(weight_of_owned(owned, maxima, sums, {largest, kLog2E}));
  if (block.lane() == 0) shared.raw_parts[block.warp()] = part;
}

__device__ inline double log_of_sum(float sum) {
  return static_cast<double>(lg2_approx(sum)) * kLn2;
}

// The natural logarithm of the sum of the raw weights, whose parts warps have left.
__device__ inline double log_of_parts(const Shared& shared) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared.raw_parts[i];
  return log_of_sum(sum);
}

// ln of the sum of a row's raw weights, relative to the largest, which need not be finite.
__device__ inline double raw_log(Shared& shared, Block& block, const float* maxima,
                                 const float* sums, float largest) {
  if (fabsf(largest) < kInf) {
    leave_parts(shared, block, Owned(shared.task.groups, block.thread()), maxima, sums, largest);
    __syncthreads();
    return log_of_parts(shared);
  }
  return log_mass(mass_of_groups(shared, block, maxima, sums, largest, kLog2E));
}

// What a row's statistics say of all of it. mass: -1 where the largest is not finite, or nobody
// asks.
struct Totals {
  float largest;
  int64_t mass;
};

__device__ inline Totals total_statistics(Shared& shared, Block& block) {
  const Task& task = shared.task;
  Totals totals = {largest_of(shared, block, task.at.maxima), -1};
  if (task.wishes.total && totals.largest > kNegInf && totals.largest < kInf) {
    totals.mass =
        mass_of_groups(shared, block, task.at.maxima, task.at.sums, totals.largest, task.row.scale);
  }
  return totals;
}

// The mean of z over all tokens.
__device__ inline __noinline__ double mean_of_groups(Shared& shared, Block& block) {
  Task& task = shared.task;
  int64_t moment = 0;
  for (int group = block.thread(); group < task.groups; group += kThreads) {
    const float z = z_of(load_now(task.at.maxima + group), task.largest, task.row.scale);
    if (z > -126.0f) {
      const float value = load_now(task.at.sums + group) * z + load_now(task.at.moments + group);
      moment += static_cast<int64_t>(static_cast<double>(value * ex2_approx(z)) * kOne);
    }
  }
  return static_cast<double>(block.sum(moment)) / static_cast<double>(task.total);
}

// Evenly spaced bins between two values, from the upper one down.
struct Bins {
  float high, factor;  // in halves, whose difference fp32 holds

  __device__ Bins(float low, float high_) : high(high_ * 0.5f) {
    const float reach = high - low * 0.5f;
    factor = reach > 0.0f ? static_cast<float>(kBins) / reach : 0.0f;
    if (!(factor < kInf)) factor = kFltMax;
  }
  // Never falls as the value falls. Of a value above the upper one, which only wrong statistics
  // have, the first bin.
  __device__ int bin(float value) const {
    return static_cast<int>(fmaxf(fminf((high - value * 0.5f) * factor, kBins - 1.0f), 0.0f));
  }
};

// The bin in which what lies in the bins before it and in it reaches `needed`; -1 if all of them do
// not. before: what lies in the bins before it.
__device__ inline int find_bin(Shared& shared, Block& block, int needed, int* before, int* inside) {
  __syncthreads();
  const int mine = static_cast<int>(shared.bins[block.thread()]);
  int total;
  const int mine_before = block.sum_before(mine, &total);
  if (mine_before < needed && mine_before + mine >= needed) {
    shared.found = block.thread();
    shared.found_before = mine_before;
    shared.found_mass = mine;
  }
  __syncthreads();
  if (total < needed) return -1;
  *before = static_cast<int>(shared.found_before);
  *inside = static_cast<int>(shared.found_mass);
  return shared.found;
}

// A bound that at least k of the groups' maxima reach, and so k tokens; few more do. -FLT_MAX where
// fewer than k groups hold a token. largest: of the maxima, finite.
__device__ inline float top_bound(Shared& shared, Block& block, const float* maxima, float largest,
                                  int k) {
  Task& task = shared.task;
  const int enough = k + k / 8 + 4;
  float low = kInf, high = largest;
  for (int group = block.thread(); group < task.groups; group += kThreads) {
    const float maximum = load_now(maxima + group);
    if (maximum > kNegInf) low = fminf(low, maximum);
  }
  low = block.min(low);
  int reached = 0;  // how many are above `high`
#pragma unroll 1
  for (int step = 0; step < 8; ++step) {
    const Bins bins(low, high);
    shared.bins[block.thread()] = 0;
    __syncthreads();
    for (int group = block.thread(); group < task.groups; group += kThreads) {
      const float maximum = load_now(maxima + group);
      if (maximum >= low && maximum <= high) atomicAdd(&shared.bins[bins.bin(maximum)], 1u);
    }
    int before, inside;
    const int bin = find_bin(shared, block, k - reached, &before, &inside);
    if (bin < 0) return -kFltMax;
    float smallest = kInf, greatest = kNegInf;
    for (int group = block.thread(); group < task.groups; group += kThreads) {
      const float maximum = load_now(maxima + group);
      if (maximum >= low && maximum <= high && bins.bin(maximum) == bin) {
        smallest = fminf(smallest, maximum);
        greatest = fmaxf(greatest, maximum);
      }
    }
    const Range of_bin = block.range(smallest, greatest);
    low = of_bin.low;
    high = of_bin.high;
    if (reached + before + inside <= enough || low == high) break;
    reached += before;
  }
  return low;
}

// A bound such that the largest tokens of the groups that reach it weigh top_p of the total by
// themselves; whoever uses it verifies that by the tokens. False for rows so flat that groups hold
// several tokens of the nucleus.
__device__ inline bool nucleus_bound(Shared& shared, Block& block, const float* maxima, float top_p,
                                     float* bound) {
  Task& task = shared.task;
  const float scale = task.row.scale;
  // Weights in units of 2**-30 of the total.
  const float of_largest = static_cast<float>(static_cast<double>(task.total) / kOne);
  const float unit = 1073741824.0f / of_largest;
  const float needed = fmaxf(fminf(top_p * 1.0001f, 1.0f) * 1073741824.0f, 1.0f);
  const float tokens = static_cast<float>(task.groups * kGroup);
  // Below it no token of the nucleus is found, were all of them as heavy.
  const float start =
      fminf(lg2_approx(of_largest * fmaxf(1.0f - top_p, 1e-6f) / tokens) - 1.0f, -1.0f);
  const Bins bins(start, 0.0f);
  shared.bins[block.thread()] = 0;
  __syncthreads();
  for (int group = block.thread(); group < task.groups; group += kThreads) {
    const float z = z_of(load_now(maxima + group), task.largest, scale);
    if (z >= start) {
      atomicAdd(&shared.bins[bins.bin(z)], static_cast<uint32_t>(ex2_approx(z) * unit));
    }
  }
  int before, inside;
  const int bin = find_bin(shared, block, static_cast<int>(needed), &before, &inside);
  if (bin < 0) return false;
  float smallest = kInf;
  for (int group = block.thread(); group < task.groups; group += kThreads) {
    const float maximum = load_now(maxima + group);
    const float z = z_of(maximum, task.largest, scale);
    if (z >= start && bins.bin(z) <= bin) smallest = fminf(smallest, maximum);
  }
  *bound = block.min(smallest);
  return true;
}

// z such that tokens below it, and above 2 * mean - z, weigh less than `share` of the total.
//
// What a group holds below z is at most what it holds beside its maximum, and at most 63 * 2**z.
__device__ inline __noinline__ float mass_bound(Shared& shared, Block& block, const float* maxima,
                                                float share, float mean) {
  Task& task = shared.task;
  const float scale = task.row.scale;
  const double unit = 1073741824.0 * kOne / static_cast<double>(task.total);
  // Less what rounding down to units may hide.
  const int64_t budget = static_cast<int64_t>(static_cast<double>(share) * 1073741824.0) -
                         static_cast<int64_t>(task.groups) * 2;
  float low = -60.0f, high = 0.0f;
  for (int step = 0; step < 10; ++step) {
    const float middle = 0.5f * (low + high);
    const double most = static_cast<double>(ex2_approx(middle)) * 63.0 * unit;
    int64_t outside = 0;
    for (int group = block.thread(); group < task.groups; group += kThreads) {
      const float z = z_of(load_now(maxima + group), task.largest, scale);
      if (z < -126.0f) continue;
      const double top = static_cast<double>(ex2_approx(z)) * unit;
      const double weight = static_cast<double>(load_now(task.at.sums + group)) * top;
      const bool wholly = z < middle || z > 2.0f * mean - middle;
      const double rest = fmax(weight - top, 0.0);
      outside += static_cast<int64_t>(wholly ? weight : fmin(rest, most)) + 1;
    }
    const bool fits = block.sum(outside) <= budget;
    low = fits ? middle : low;
    high = fits ? high : middle;
  }
  return low;
}

// Lists the groups whose maximum reaches the bound, ascending; their number, of which as many as
// fit are listed.
__device__ inline int list_groups(Shared& shared, Block& block, const float* maxima, float bound) {
  Task& task = shared.task;
  const int lane = block.lane(), warp = block.warp();
  int count = 0;
  for (int first = 0; first < task.groups; first += kBins * kWarp) {
    __syncthreads();
    // A warp a chunk of 32 groups: which of them do.
    const int chunks = min((task.groups - first + kWarp - 1) / kWarp, kBins);
    for (int chunk = warp; chunk < chunks; chunk += kWarps) {
      const int group = first + chunk * kWarp + lane;
      const unsigned reaching =
          __ballot_sync(kAllLanes, group < task.groups && load_now(maxima + group) >= bound);
      if (lane == 0) shared.bins[chunk] = reaching;
    }
    __syncthreads();
    const int chunk = block.thread();
    const unsigned all = chunk < chunks ? shared.bins[chunk] : 0;
    unsigned reaching = all;
    int number;
    int place = count + block.sum_before(__popc(reaching), &number);
    for (; reaching != 0 && place < kListedGroups; reaching &= reaching - 1, ++place) {
      shared.group_list[place] =
          ListedGroup::of(all, __ffs(static_cast<int>(reaching)) - 1, first + chunk * kWarp);
    }
    count += number;
  }
  __syncthreads();
  return count;
}

// The lowest id among a window's tokens with that y, which has some. Every lane of a warp has 4.
// meanwhile(): what the warp does while they are on their way.
template <class Logits, class Meanwhile>
__device__ inline int first_in_window(const Row& row, int window, float y, int lane,
                                      Meanwhile meanwhile) {
  constexpr int kEach = kWindow / kWarp;
  float of_token[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    of_token[i] = kNegInf;
    const int token = window * kWindow + i * kWarp + lane;
    if (token < row.vocab) of_token[i] = Logits::value(load_bits<Logits>(row, token));
  }
  meanwhile();
  int place = kWindow;
#pragma unroll
  for (int i = kEach - 1; i >= 0; --i) {
    const int token = window * kWindow + i * kWarp + lane;
    float of_it = sanitised(of_token[i]);
    if (!row.plain() && token < row.vocab) of_it = processed(row, of_it, token);
    const unsigned found = __ballot_sync(kAllLanes, token < row.vocab && of_it == y);
    if (found != 0) place = i * kWarp + __ffs(static_cast<int>(found)) - 1;
  }
  return window * kWindow + place;
}

// The lowest id among the largest y.
template <class Logits>
__device__ inline int first_maximum(Shared& shared, Block& block, const float* maxima) {
  const Task& task = shared.task;
  uint64_t first = ~uint64_t{0};
  for (int group = block.thread(); group < task.groups; group += kThreads) {
    if (load_now(maxima + group) == task.largest) {
      first = static_cast<uint64_t>(group);
      break;
    }
  }
  const int window = static_cast<int>(block.min_bits(first)) / kGroupsOfWindow;
  return first_in_window<Logits>(task.row, window, task.largest, block.lane(), [] {});
}

// The token of a window in which the draw from `total` ends: by a warp, whose lanes have 4
// neighbours each. Masses start from `base`.
template <class Logits>
__device__ inline Drawn draw_in_window(const Task& task, const Kept& kept, int64_t total,
                                       const DrawnWindow& drawn, float base, int lane) {
  constexpr int kEach = kWindow / kWarp;
  const Row& row = task.row;
  const int64_t position = position_of(task.word, total);
  const double highest = static_cast<double>(base);
  const double scale = load_f64(row.params + kParamWideScale);
  const int first = drawn.window * kWindow + kEach * lane;
  float y[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    y[i] = first + i < row.vocab ? load_logit<Logits>(row, first + i) : kNegInf;
  }
  if (!row.plain()) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = first + i;
      if (token < row.vocab) y[i] = special_or(row, processed(row, y[i], token), token);
    }
  }
  // Without branches: a token's is worked out beside the others'.
  int64_t masses[kEach], mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t mass = mass_of_y(y[i], highest, scale);
    masses[i] = kept.holds(y[i], first + i) ? mass : 0;
    mine += masses[i];
  }
  const int64_t up_to = sum_up_to_lane(mine, lane);
  const int64_t of_tokens = of_lane(up_to, kWarp - 1);
  // Where the tokens' masses add up to the window's, nothing is rounded.
  int64_t place = position - drawn.before;
  if (of_tokens != drawn.mass) {
    const double share = share_of(task.word, total, drawn.before, drawn.mass);
    place = static_cast<int64_t>(share * static_cast<double>(of_tokens));
    place = place < of_tokens ? place : of_tokens - 1;
  }
  // How many tokens end before it.
  int at = 0;
  int64_t end = up_to - mine;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    end += masses[i];
    at += __popc(__ballot_sync(kAllLanes, end <= place));
  }
  float of_drawn = y[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i) of_drawn = at % kEach == i ? y[i] : of_drawn;
  return {drawn.window * kWindow + at, __shfl_sync(kAllLanes, of_drawn, at / kEach)};
}

// A token drawn from what is kept: its window by mass, then inside the window. mass_at(group): of
// those of its tokens, `total` in all. base_at(group): where its tokens' masses may start.
template <class Logits, class MassAt, class BaseAt>
__device__ inline Drawn draw_from_groups(Shared& shared, Block& block, const Kept kept,
                                         int64_t total, MassAt mass_at, BaseAt base_at) {
  Task& task = shared.task;
  const int64_t position = position_of(task.word, total);
  const auto mass_of_window = [&](int window) {
    const int group = window * kGroupsOfWindow;
    return mass_at(group) + mass_at(group + 1);
  };
  // A thread's windows are neighbours.
  const int windows = task.groups / kGroupsOfWindow;
  const int each = (windows + kThreads - 1) / kThreads;
  const int first = block.thread() * each, end = min(first + each, windows);
  int64_t mine = 0;
#pragma unroll 4
  for (int window = first; window < end; ++window) mine += mass_of_window(window);
  int64_t all;
  const int64_t before = block.sum_before(mine, &all);
  if (before <= position && position < before + mine) shared.drawn_window = {first, before, mine};
  __syncthreads();
  // Every warp goes through that thread's windows.
  DrawnWindow drawn = shared.drawn_window;
  const int lane = block.lane(), last = min(drawn.window + each, windows);
#pragma unroll 1
  for (;; drawn.window += kWarp) {
    const int window = drawn.window + lane;
    const int64_t mass = window < last ? mass_of_window(window) : 0;
    const int64_t up_to = drawn.before + sum_up_to_lane(mass, lane);
    const unsigned beyond = __ballot_sync(kAllLanes, position < up_to);
    if (beyond == 0 && drawn.window + kWarp < last) {
      drawn.before = of_lane(up_to, kWarp - 1);
      continue;
    }
    // Where the given statistics are wrong there may be none: then it is anyone.
    const int in = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1 : 0;
    const int64_t inside = of_lane(mass, in);
    drawn = {drawn.window + in, of_lane(up_to - mass, in), inside > 0 ? inside : 1};
    break;
  }
  const int group = drawn.window * kGroupsOfWindow;
  const float base = fmaxf(base_at(group), base_at(group + 1));
  return draw_in_window<Logits>(task, kept, total, drawn, base, lane);
}

}  // namespace graphed_sampling
