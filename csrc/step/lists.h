// Lists of candidates (y, id) in canonical order: all filters and the draw on one.
#pragma once

#include "groups.h"

namespace graphed_sampling {

// Lists the tokens of listed groups with y >= bound, ids ascending; how many there are, of which as
// many as fit are listed. row: whose y count, which may leave out what processing does.
// meanwhile(): what all threads do while the first tokens are on their way. kLowered: whether no y
// exceeds its logit, of which penalties alone make it: so only logits that reach the bound are
// looked at.
template <class Logits, bool kLowered, class Meanwhile>
__device__ inline int list_candidates(Shared& shared, Block& block, const Row& row, int num_groups,
                                      float bound, Meanwhile meanwhile) {
  constexpr int kEach = 2;  // pieces a thread reads at a time: of one group
  static_assert(kEach == 2 && kPieces % kEach == 0);
  const int pieces = num_groups * kPieces;
  const bool plain = row.plain();
  int count = 0;
#pragma unroll 1
  for (int begin = 0; begin < pieces && count <= kListed; begin += kThreads * kEach) {
    const int first = begin + block.thread() * kEach;
    uint32_t reaching = 0;
    int ids[kEach] = {};
    float y[kEach][kPiece] = {};
    Pack<Logits> packs[kEach] = {};
    [[maybe_unused]] uint32_t seen = 0;  // of its tokens, a bit each
    if (first < pieces) {
      const ListedGroup group = shared.group_list[first / kPieces];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        ids[i] = group.first_token(first % kPieces + i);
        packs[i] = load_pack<Logits>(row, ids[i]);
        if constexpr (kLowered) seen |= piece_bits(row, ids[i]).seen << (i * kPiece);
      }
    }
    if (begin == 0) meanwhile();
    // Of the lowest bit.
    const auto token_of = [&](uint32_t bits) {
      const int bit = __ffs(static_cast<int>(bits)) - 1;
      return (bit < kPiece ? ids[0] : ids[1]) + bit % kPiece;
    };
    if (first < pieces) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if constexpr (kLowered) {
          logits_of_pack(packs[i], y[i]);
        } else {
          y_of_pack<Logits>(row, packs[i], ids[i], y[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          reaching |= (y[i][j] >= bound ? 1u : 0u) << (i * kPiece + j);
        }
      }
      if constexpr (kLowered) {
#pragma unroll 1
        for (uint32_t left = reaching & seen; left != 0; left &= left - 1) {
          const int token = token_of(left);
          const float x = load_logit<Logits>(row, token);
          if (!(processed(row, x, token, false) >= bound)) reaching ^= left & (0 - left);
        }
      }
    }
    int listed;
    int place = count + block.sum_before(__popc(reaching), &listed);
    if (!kLowered && (Logits::kSharded || !plain)) {
      // To load them once more, as below, could be to fetch them from another device, or to wait
      // for what processing them takes.
#pragma unroll
      for (int i = 0; i < kEach * kPiece; ++i) {
        if ((reaching >> i & 1) == 0) continue;
        if (place < kListed) {
          shared.list_y[place] = y[i / kPiece][i % kPiece];
          shared.list_ids[place] = ids[i / kPiece] + i % kPiece;
        }
        ++place;
      }
    } else {
      for (; reaching != 0; reaching &= reaching - 1, ++place) {
        // Loaded once more: registers cannot be numbered.
        const int token = token_of(reaching);
        if (place < kListed) {
          float y = load_logit<Logits>(row, token);
          if (kLowered && (reaching & (0 - reaching) & seen) != 0) {
            y = processed(row, y, token, false);
          }
          shared.list_y[place] = y;
          shared.list_ids[place] = token;
        }
      }
    }
    count += listed;
  }
  // On to a multiple of 32.
  if (block.warp() == 0 && count < kListed) {
    const int end = count + block.lane();
    if (end < (count + kWarp - 1) / kWarp * kWarp) shared.list_y[end] = kNegInf;
  }
  __syncthreads();
  return count;
}

// The same of many groups, 256 at a time, of a row of whole pieces in which y is the logit; the
// list does not go on.
template <class Logits, class Meanwhile>
__device__ inline int list_many_candidates(Shared& shared, Block& block, const Row& row,
                                           int num_groups, float bound, Meanwhile meanwhile) {
  // Groups of which a lane reads a piece each: neighbours among them by 8 lanes.
  constexpr int kEach = 8, kOfWarp = kEach * kWarp / kPieces;
  const int lane = block.lane(), piece = lane % kPieces;
  int count = 0;
#pragma unroll 1
  for (int begin = 0; begin < num_groups && count <= kListed; begin += kOfWarp * kWarps) {
    const int first = begin + block.warp() * kOfWarp + lane / kPieces;
    Pack<Logits> packs[kEach];
    int ids[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = first + i * (kWarp / kPieces);
      ids[i] = at < num_groups ? shared.group_list[at].first_token(piece) : row.vocab;
      packs[i] = load_whole_pack<Logits>(row.logits, ids[i] < row.vocab ? ids[i] : 0);
    }
    if (begin == 0) meanwhile();
    // A bit each of what reaches the bound, and how many do: two numbers a word, whose sums fit.
    uint32_t reaching[kEach];
    int numbers[kEach / 2];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float y[kPiece];
      Logits::unpack(packs[i].words, y);
      reaching[i] = 0;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) reaching[i] |= (y[j] >= bound ? 1u : 0u) << j;
      if (ids[i] >= row.vocab) reaching[i] = 0;
      const int number = __popc(reaching[i]);
      numbers[i / 2] = i % 2 == 0 ? number : numbers[i / 2] | number << 16;
    }
    int places[kEach], of_warp = 0;
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const int up_to = sum_up_to_lane(numbers[i / 2], lane);
      const int before = up_to - numbers[i / 2], all = __shfl_sync(kAllLanes, up_to, kWarp - 1);
      places[i] = of_warp + (before & 0xFFFF);
      of_warp += all & 0xFFFF;
      places[i + 1] = of_warp + (before >> 16);
      of_warp += all >> 16;
    }
    int listed;
    const int start = count + block.sum_before_warp(of_warp, &listed);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float y[kPiece];
      Logits::unpack(packs[i].words, y);
      int place = start + places[i];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        const bool reaches = (reaching[i] >> j & 1) != 0;
        if (reaches && place < kListed) {
          shared.list_y[place] = y[j] + 0.0f;
          shared.list_ids[place] = ids[i] + j;
        }
        place += reaches ? 1 : 0;
      }
    }
    count += listed;
  }
  __syncthreads();
  return count;
}

template <class Logits>
__device__ inline int list_candidates(Shared& shared, Block& block, const Row& row, int num_groups,
                                      float bound) {
  return list_candidates<Logits, false>(shared, block, row, num_groups, bound, [] {});
}

// The orders of a list's tokens, descending, which take the place of the groups' maxima.
__device__ inline const uint64_t* sort_list(Shared& shared, Block& block, int count) {
  uint64_t* keys = shared.keys;
  const int thread = block.thread();
  __syncthreads();  // the maxima may still be in use
  if (count <= kThreads) {
    // Each by the number of those above it. Several threads share a short list's tokens.
    int size = kWarp;
    while (size < count) size *= 2;
    uint64_t* sorted = keys + kThreads;
    if (thread < count) {
      keys[thread] = order_of(shared.list_y[thread], shared.list_ids[thread]);
      shared.bins[thread] = 0;
    }
    __syncthreads();
    const int mine = thread % size, part = thread / size, parts = kThreads / size;
    if (mine < count) {
      const uint64_t order = keys[mine];
      uint32_t above = 0;
      for (int i = part; i < count; i += parts) above += keys[i] > order ? 1 : 0;
      if (parts == 1) {
        shared.bins[mine] = above;
      } else if (above > 0) {
        atomicAdd(&shared.bins[mine], above);
      }
    }
    __syncthreads();
    if (thread < count) sorted[shared.bins[thread]] = keys[thread];
    __syncthreads();
    return sorted;
  }
  int size = kThreads;
  while (size < count) size *= 2;
  for (int i = thread; i < size; i += kThreads) {
    keys[i] = i < count ? order_of(shared.list_y[i], shared.list_ids[i]) : 0;
  }
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int pair = thread; pair < size / 2; pair += kThreads) {
        const int low = pair / step * (2 * step) + pair % step, high = low + step;
        const uint64_t a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
  return keys;
}

// How many of sorted tokens it takes, from the first on, until they and what has `passed` before
// weigh the target; all of them where they do not. passed: what has by then, and some more.
template <class MassOf>
__device__ inline int number_within(Block& block, const uint64_t* sorted, int count, int64_t target,
                                    int64_t* passed, MassOf mass_of_y) {
  int within = 0;
  for (int first = 0; first < count && *passed < target; first += kThreads) {
    const int i = first + block.thread();
    int64_t inside;
    const int64_t mass = i < count ? mass_of_y(y_of_order(sorted[i])) : 0;
    const int64_t before = *passed + block.sum_before(mass, &inside);
    within += i < count && before < target ? 1 : 0;
    *passed += inside;
  }
  return static_cast<int>(block.sum(within));
}

// The smallest distance within which there is a mass that reaches the target. The bits of positive
// floats rise as they do.
template <class MassWithin>
__device__ inline double smallest_reach(Block& block, int64_t target, MassWithin mass_within) {
  uint64_t low = 0, high = static_cast<uint64_t>(__double_as_longlong(1e300));
  while (high > low) {
    const uint64_t middle = low + (high - low) / 2;
    if (block.sum(mass_within(__longlong_as_double(static_cast<int64_t>(middle)))) >= target) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return __longlong_as_double(static_cast<int64_t>(high));
}

// Which of a list's tokens the filters keep, as they come upon it one after the other.
struct Filters {
  double largest, scale;
  uint64_t cut;        // what top_k and top_p keep reaches this order
  double mean, reach;  // of z, for typical_p: kept within this distance
  double top_z;        // of what is kept: weights start from there
  double least;        // weight that epsilon and eta keep

  __device__ double z(float y) const { return (static_cast<double>(y) - largest) * scale; }
  __device__ double weight(float y) const { return exp2_wide(z(y) - top_z); }
  __device__ bool keeps(float y, int token) const {
    if (order_of(y, token) < cut) return false;
    if (reach >= 0.0 && !(fabs(mean - z(y)) <= reach)) return false;
    return least <= 0.0 || z(y) == top_z || weight(y) >= least;
  }
};

// The mass of what is kept; by z too, its moment.
__device__ inline int64_t kept_mass(Shared& shared, Block& block, int count,
                                    const Filters& filters) {
  int64_t mass = 0;
  for (int i = block.thread(); i < count; i += kThreads) {
    const float y = shared.list_y[i];
    if (filters.keeps(y, shared.list_ids[i])) mass += mass_of(filters.weight(y));
  }
  return block.sum(mass);
}

__device__ inline double kept_mean(Shared& shared, Block& block, int count, const Filters& filters,
                                   int64_t total) {
  int64_t moment = 0;
  for (int i = block.thread(); i < count; i += kThreads) {
    const float y = shared.list_y[i];
    if (filters.keeps(y, shared.list_ids[i])) {
      const double z = filters.z(y) - filters.top_z;
      moment += __double2ll_rn(static_cast<double>(mass_of(filters.weight(y))) * z);
    }
  }
  return static_cast<double>(block.sum(moment)) / static_cast<double>(total);
}

// The smallest distance from the mean within which what is kept weighs the target.
__device__ inline double typical_reach(Shared& shared, Block& block, int count,
                                       const Filters& filters, int64_t target) {
  const int thread = block.thread();
  const auto distance_of = [&](int i) { return fabs(filters.mean - filters.z(shared.list_y[i])); };
  const auto keeps = [&](int i) {
    return i < count && filters.keeps(shared.list_y[i], shared.list_ids[i]);
  };
  constexpr int kCompared = 512;
  if (count <= kCompared) {
    // Each is compared with all. The bits of distances rise as they do.
    constexpr uint64_t kOutside = ~uint64_t{0};
    uint64_t* distances = shared.keys;
    uint64_t* masses = shared.keys + kCompared;
    for (int i = thread; i < count; i += kThreads) {
      const bool kept = keeps(i);
      distances[i] = kept ? static_cast<uint64_t>(__double_as_longlong(distance_of(i))) : kOutside;
      masses[i] = kept ? static_cast<uint64_t>(mass_of(filters.weight(shared.list_y[i]))) : 0;
    }
    __syncthreads();
    uint64_t reach = kOutside;
    for (int i = thread; i < count; i += kThreads) {
      const uint64_t own = distances[i];
      if (own >= reach) continue;
      uint64_t mass = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) mass += distances[j] <= own ? masses[j] : 0;
      if (mass >= static_cast<uint64_t>(target)) reach = own;
    }
    return __longlong_as_double(static_cast<int64_t>(block.min_bits(reach)));
  }
  constexpr int kEach = kListed / kThreads;
  double distances[kEach];
  int64_t masses[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    distances[i] = 0.0;
    masses[i] = 0;
    if (keeps(at)) {
      distances[i] = distance_of(at);
      masses[i] = mass_of(filters.weight(shared.list_y[at]));
    }
  }
  return smallest_reach(block, target, [&](double reach) {
    int64_t mass = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mass += distances[i] <= reach ? masses[i] : 0;
    return mass;
  });
}

// typical_p, epsilon_cutoff and eta_cutoff. from_statistics: the list is the head of all tokens,
// which weigh task.total and have this mean; z_bound is where it ends. False if it lacks survivors.
__device__ inline __noinline__ bool filter_later(Shared& shared, Block& block, int count,
                                                 Filters& filters, bool from_statistics,
                                                 double mean, double z_bound) {
  Task& task = shared.task;
  const int32_t* params = task.row.params;
  const float typical = load_f32(params + kParamTypicalP);
  const float epsilon = load_f32(params + kParamEpsilonCutoff);
  const float eta = load_f32(params + kParamEtaCutoff);
  bool complete = true;
  if (typical < 1.0f) {
    const int64_t inside = kept_mass(shared, block, count, filters);
    const int64_t total = from_statistics ? task.total : inside;
    filters.mean = from_statistics ? mean : kept_mean(shared, block, count, filters, inside);
    const int64_t target = target_of(typical, total);
    if (inside < target) return false;
    filters.reach = typical_reach(shared, block, count, filters, target);
    if (from_statistics) complete = filters.mean - filters.reach >= z_bound;
    from_statistics = false;
    // The row's maximum may be gone: masses start again from the survivors' own.
    float top = kNegInf;
    for (int i = block.thread(); i < count; i += kThreads) {
      if (filters.keeps(shared.list_y[i], shared.list_ids[i])) top = fmaxf(top, shared.list_y[i]);
    }
    filters.top_z = filters.z(block.max(top));
  }
  if (epsilon > 0.0f) {
    const int64_t total = from_statistics ? task.total : kept_mass(shared, block, count, filters);
    filters.least = static_cast<double>(epsilon) * (static_cast<double>(total) / kOne);
    from_statistics = false;
  }
  if (eta > 0.0f) {
    const int64_t total = from_statistics ? task.total : kept_mass(shared, block, count, filters);
    if (!from_statistics) mean = kept_mean(shared, block, count, filters, total);
    const double wide = static_cast<double>(eta);
    const double least =
        fmin(wide * (static_cast<double>(total) / kOne), sqrt(wide) * exp2_wide(mean));
    filters.least = fmax(filters.least, least);
  }
  return complete;
}

// In which bin the cut of a filter is: behind what is `left` to be kept.
struct CutBin {
  int bin;         // -1 where all bins are less than what is left
  int64_t before;  // mass of the bins before it
};

// for_each(add) calls add(bin, mass) for a thread's tokens: bins of kBins, masses of kMassBits + 1
// bits.
template <class ForEach>
__device__ inline CutBin cut_bin(Shared& shared, Block& block, int64_t left, ForEach for_each) {
  static_assert(kLimbBits * kMassLimbs > kMassBits);
  const int thread = block.thread();
  for (int i = 0; i < kMassLimbs; ++i) shared.mass_limbs[i][thread] = 0;
  if (thread == 0) shared.found = -1;
  __syncthreads();
  for_each([&](int bin, int64_t mass) {
#pragma unroll
    for (int limb = 0; limb < kMassLimbs; ++limb, mass >>= kLimbBits) {
      const auto part = static_cast<uint32_t>(mass & ((1 << kLimbBits) - 1));
      if (part > 0) atomicAdd(&shared.mass_limbs[limb][bin], part);
    }
  });
  __syncthreads();
  int64_t inside, mine = 0;
  for (int i = kMassLimbs - 1; i >= 0; --i) {
    mine = (mine << kLimbBits) + shared.mass_limbs[i][thread];
  }
  const int64_t before = block.sum_before(mine, &inside);
  if (before < left && before + mine >= left) {
    shared.found = thread;
    shared.found_before = before;
  }
  if (thread == 0) shared.count = 0;
  __syncthreads();
  return {shared.found, shared.found_before};
}

// top_p, if any, and the draw on a long list, without sorting it: the cut's bin by mass, and the
// cut among its tokens by comparing each with all. of_total: top_p is of this total, or, 0, of the
// list's own. False, with nothing changed that counts, where more tokens than threads are in the
// cut's bin.
__device__ inline __noinline__ bool draw_from_long_list(Shared& shared, Block& block, int count,
                                                        float top_p, int64_t of_total,
                                                        Selection* selection) {
  const Task& task = shared.task;
  const int thread = block.thread();
  const double scale = load_f64(task.header + kParamWideScale);
  const double largest = static_cast<double>(task.largest);
  int64_t mine = 0;
  float lowest = kInf;
  __syncthreads();  // what has the masses' place may still be in use
#pragma unroll 2
  for (int i = thread; i < count; i += kThreads) {
    const float y = shared.list_y[i];
    const int64_t mass = mass_of_y(y, largest, scale);
    shared.masses[i] = mass;
    mine += mass;
    lowest = fminf(lowest, y);
  }
  lowest = block.min(lowest);  // Its barrier makes the masses known too.
  uint64_t cut = 0;
  if (top_p < 1.0f) {
    const int64_t target = target_of(top_p, of_total > 0 ? of_total : block.sum(mine));
    const Bins bins(lowest, task.largest);
    const CutBin found = cut_bin(shared, block, target, [&](auto add) {
#pragma unroll 1
      for (int i = thread; i < count; i += kThreads) {
        add(bins.bin(shared.list_y[i]), shared.masses[i]);
      }
    });
    selection->complete = found.bin >= 0;
    if (found.bin < 0) return true;
#pragma unroll 1
    for (int i = thread; i < count; i += kThreads) {
      if (bins.bin(shared.list_y[i]) != found.bin) continue;
      const int place = atomicAdd(&shared.count, 1);
      if (place < kThreads) shared.in_cut[place] = i;
    }
    __syncthreads();
    const int in_cut = shared.count;
    if (in_cut > kThreads) return false;
    const auto order_at = [&](int i) { return order_of(shared.list_y[i], shared.list_ids[i]); };
    if (thread < in_cut) {
      const int own = shared.in_cut[thread];
      const uint64_t order = order_at(own);
      int64_t before = found.before;
#pragma unroll 4
      for (int i = 0; i < in_cut; ++i) {
        const int other = shared.in_cut[i];
        if (order_at(other) > order) before += shared.masses[other];
      }
      if (before < target && before + shared.masses[own] >= target) shared.found_order = order;
    }
    __syncthreads();
    cut = shared.found_order;
  }
  // Neighbours, so that ids ascend as threads do.
  const int each = (count + kThreads - 1) / kThreads;
  const int first = thread * each, end = min(first + each, count);
  const auto mass_at = [&](int i) {
    return order_of(shared.list_y[i], shared.list_ids[i]) >= cut ? shared.masses[i] : int64_t{0};
  };
  int kept = 0;
  mine = 0;
  uint64_t least = ~uint64_t{0};
#pragma unroll 1
  for (int i = first; i < end; ++i) {
    const uint64_t order = order_of(shared.list_y[i], shared.list_ids[i]);
    if (order < cut) continue;
    mine += shared.masses[i];
    ++kept;
    least = order < least ? order : least;
  }
  // Where given statistics are wrong there may be none.
  if (thread == 0) shared.found = 0;
  int64_t before = block.sum_before(mine, &selection->total);
  const int64_t position = position_of(task.word, selection->total);
  if (before <= position && position < before + mine) {
    int i = first;
    for (before += mass_at(i); before <= position; before += mass_at(i)) ++i;
    shared.found = i;
  }
  // Its barrier makes what was found known too.
  selection->num_kept = static_cast<int>(block.sum(kept));
  selection->drawn = {shared.list_ids[shared.found], shared.list_y[shared.found]};
  selection->kept = {task.largest, task.largest, 0};
  if (task.row.has(kProcessed)) {
    least = block.min_bits(least);
    selection->kept = {task.largest, y_of_order(least), id_of_order(least)};
  }
  return true;
}

// All filters on a list, and the draw.
//
// from_statistics: the list is the head of all tokens, which weigh task.total; else it holds the
// survivors of the filters before top_k. mean, z_bound: see `filter_later`.
__device__ inline Selection filter_list(Shared& shared, Block& block, int count,
                                        bool from_statistics, double mean, double z_bound) {
  Task& task = shared.task;
  const int32_t* params = task.row.params;
  const int thread = block.thread();
  const int top_k = params[kParamTopK];
  const float top_p = load_f32(params + kParamTopP);
  Filters filters = {static_cast<double>(task.largest),
                     load_f64(params + kParamWideScale),
                     0,
                     0.0,
                     -1.0,
                     0.0,
                     0.0};
  Selection selection = {};
  selection.complete = true;
  const bool later = load_f32(params + kParamTypicalP) < 1.0f ||
                     load_f32(params + kParamEpsilonCutoff) > 0.0f ||
                     load_f32(params + kParamEtaCutoff) > 0.0f;
  if (top_k == 0 && !later && count > kThreads &&
      draw_from_long_list(shared, block, count, top_p, from_statistics ? task.total : 0,
                          &selection)) {
    return selection;
  }
  if (top_k > 0 || top_p < 1.0f) {
    const uint64_t* sorted = sort_list(shared, block, count);
    int kept = top_k > 0 && top_k < count ? top_k : count;
    if (top_p < 1.0f) {
      int64_t total = task.total;
      if (!from_statistics) {
        int64_t mass = 0;
        for (int i = thread; i < kept; i += kThreads) {
          mass += mass_of(filters.weight(y_of_order(sorted[i])));
        }
        total = block.sum(mass);
      }
      const int64_t target = target_of(top_p, total);
      int64_t passed = 0;
      kept = number_within(block, sorted, kept, target, &passed,
                           [&](float y) { return mass_of(filters.weight(y)); });
      selection.complete = passed >= target;
    }
    filters.cut = sorted[kept - 1];
    from_statistics = from_statistics && top_p >= 1.0f;
  }
  if (later) {
    selection.complete = selection.complete && filter_later(shared, block, count, filters,
                                                            from_statistics, mean, z_bound);
  }
  if (!selection.complete) return selection;

  // A list of up to kThreads is gone through once, a longer one twice.
  int64_t mine = 0;
  int kept = 0;
  uint64_t least_order = ~uint64_t{0}, greatest_order = 0;
  for (int i = thread; i < count; i += kThreads) {
    const float y = shared.list_y[i];
    if (filters.keeps(y, shared.list_ids[i])) {
      mine += mass_of(filters.weight(y));
      ++kept;
      const uint64_t order = order_of(y, shared.list_ids[i]);
      least_order = order < least_order ? order : least_order;
      greatest_order = order > greatest_order ? order : greatest_order;
    }
  }
  int64_t before = 0;
  if (count <= kThreads) {
    before = block.sum_before(mine, &selection.total);
  } else {
    selection.total = block.sum(mine);
  }
  const int64_t position = position_of(task.word, selection.total);
  if (count <= kThreads) {
    if (before <= position && position < before + mine) shared.found = thread;
  } else {
    int64_t passed = 0;
    for (int first = 0; first < count && passed <= position; first += kThreads) {
      const int i = first + thread;
      int64_t mass = 0, inside;
      if (i < count && filters.keeps(shared.list_y[i], shared.list_ids[i])) {
        mass = mass_of(filters.weight(shared.list_y[i]));
      }
      before = passed + block.sum_before(mass, &inside);
      if (before <= position && position < before + mass) shared.found = i;
      passed += inside;
    }
  }
  // Its barrier makes what was found known too.
  selection.num_kept = static_cast<int>(block.sum(kept));
  selection.drawn = {shared.list_ids[shared.found], shared.list_y[shared.found]};
  selection.kept = {task.largest, task.largest, 0};
  if (task.row.has(kProcessed)) {
    least_order = block.min_bits(least_order);
    greatest_order = block.max_bits(greatest_order);
    selection.kept = {y_of_order(greatest_order), y_of_order(least_order),
                      id_of_order(least_order)};
  }
  return selection;
}

}  // namespace graphed_sampling
