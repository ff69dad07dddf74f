// Flat rows, whose survivors are too many for a list: a second pass over the row.
#pragma once

#include "whole_row.h"

namespace graphed_sampling {

// Between which y the cut of top_p very probably is, among the tokens that reach `least` and weigh
// `total`. The mass below a bound is about `ratio` times what evenly spaced groups hold of it. Its
// standard deviation is at most the root of ratio * mass * (weight at the bound), since no token
// below the bound weighs more.
template <class Logits>
__device__ __noinline__ Range bracket_cut(Shared& shared, Block& block, float top_p, int64_t total,
                                          float least) {
  const Task& task = shared.task;
  const float scale = task.row.scale;
  const int sampled = min(max(128, task.groups / 16), task.groups);
  const float ratio = static_cast<float>(task.groups) / static_cast<float>(sampled);
  const float budget = static_cast<float>(static_cast<double>(total) / kOne) * (1.0f - top_p);
  // Below it not even all tokens weigh the budget.
  float low_z = fminf(lg2_approx(budget / static_cast<float>(task.row.vocab)), -1.0f),
        high_z = 0.0f;
  // Twice, the second time between the bounds of the first.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const Bins bins(low_z, high_z);
    // All weights that there can be fit into a bin.
    const float unit = 4294967040.0f / static_cast<float>(sampled * kGroup);
    __syncthreads();
    shared.bins[block.thread()] = 0;
    __syncthreads();
    int64_t below_all = 0;
    for (int i = block.thread(); i < sampled * kPieces; i += kThreads) {
      const int group = static_cast<int>(int64_t{i / kPieces} * task.groups / sampled);
      float y[kPiece];
      piece_y<Logits>(task.row, group * kGroup + i % kPieces * kPiece, y);
#pragma unroll 1
      for (int j = 0; j < kPiece; ++j) {
        const float z = z_of(y[j], task.largest, scale);
        if (!(y[j] >= least) || z > high_z) continue;
        // Integers, so that the order of their sums decides nothing.
        const auto weight = static_cast<uint32_t>(ex2_approx(z - high_z) * unit + 0.5f);
        if (z >= low_z) {
          atomicAdd(&shared.bins[bins.bin(z)], weight);
        } else {
          below_all += weight;
        }
      }
    }
    below_all = block.sum(below_all);
    // Thread i: the lower end of bin i, counted from the top.
    int64_t all;
    const auto mine = static_cast<int64_t>(shared.bins[block.thread()]);
    const int64_t before = block.sum_before(mine, &all);
    const auto below =
        static_cast<float>(below_all + all - before - mine) * (ex2_approx(high_z) / unit) * ratio;
    const float width = (high_z - low_z) / static_cast<float>(kBins);
    const float weight =
        ex2_approx(high_z - width * static_cast<float>(block.thread() + 1)) * ratio;
    const float error = 4.0f * sqrtf(weight * (below + weight));
    // The highest end with surely less below it than the budget, the lowest with surely more.
    const uint64_t low_bin =
        block.min_bits(below + error <= budget ? static_cast<uint64_t>(block.thread()) : kBins);
    const uint64_t high_bin = block.max_bits(
        below - error >= budget ? static_cast<uint64_t>(block.thread()) + 1 : uint64_t{0});
    if (low_bin < kBins) low_z = high_z - width * static_cast<float>(low_bin + 1);
    if (high_bin > 0) high_z -= width * static_cast<float>(high_bin);
  }
  return {fmaxf(task.largest + low_z / scale, least),
          high_z >= 0.0f ? kInf : task.largest + high_z / scale};
}

// The second pass: the mass of what each group has from `high` on, and a list of what lies between
// `low` and `high`. Returns how many there are from `high` on; shared.count: in the list, or would
// be if it were longer.
template <class Logits>
__device__ __noinline__ int64_t collect(Shared& shared, Block& block, float low, float high) {
  Task& task = shared.task;
  const float scale = task.row.scale;
  if (block.thread() == 0) shared.count = 0;
  __syncthreads();
  int64_t above = 0;
  // A lane a piece, 4 groups a warp at a time, of which some are on their way.
  constexpr int kGroupsOfWarp = kWarp / kPieces, kAhead = 4;
  const int step = kWarps * kGroupsOfWarp;
  const int lane = block.lane();
  const auto piece_of = [&](int first) {
    return (first + lane / kPieces) * kGroup + lane % kPieces * kPiece;
  };
#pragma unroll 1
  for (int begin = block.warp() * kGroupsOfWarp; begin < task.groups; begin += kAhead * step) {
    Pack<Logits> packs[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      packs[k] = load_pack<Logits>(task.row, piece_of(begin + k * step));
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int first = begin + k * step;
      if (first >= task.groups) break;
      const int group = first + lane / kPieces;
      const int first_id = piece_of(first);
      const float maximum = load_now(task.at.maxima + group);
      const float base = finite_or_zero(maximum);
      float y[kPiece];
      y_of_pack<Logits>(task.row, packs[k], first_id, y);
      float sum = 0.0f;
      int number = 0;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const bool over = y[i] >= high;
        sum += over ? ex2_approx(z_of(y[i], base, scale)) : 0.0f;
        above += over ? 1 : 0;
        number += y[i] >= low && !over ? 1 : 0;
      }
      for (int apart = 1; apart < kPieces; apart *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, apart);
      }
      if (lane % kPieces == 0) task.masses[group] = group_mass(maximum, sum, task.largest, scale);
      const int up_to = sum_up_to_lane(number, lane);
      const int appended = __shfl_sync(kAllLanes, up_to, kWarp - 1);
      if (appended == 0) continue;
      // The order of the list decides nothing: every use of it sums, compares or sorts.
      int place = 0;
      if (lane == 0) place = atomicAdd(&shared.count, appended);
      place = __shfl_sync(kAllLanes, place, 0) + up_to - number;
      if (number == 0) continue;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (y[i] >= low && !(y[i] >= high)) {
          if (place < kBracketed) {
            task.bracket_y[place] = y[i];
            task.bracket_ids[place] = first_id + i;
          }
          ++place;
        }
      }
    }
  }
  return block.sum(above);
}

__device__ inline int64_t sum_of_masses(Shared& shared, Block& block) {
  int64_t mass = 0;
  for (int group = block.thread(); group < shared.task.groups; group += kThreads) {
    mass += __ldcg(reinterpret_cast<const long long*>(shared.task.masses) + group);
  }
  return block.sum(mass);
}

// The draw from what the groups' masses count, and its total.
template <class Logits>
__device__ inline void draw_from_masses(Shared& shared, Block& block, Selection* selection) {
  selection->total = sum_of_masses(shared, block);
  selection->drawn =
      draw_from_groups<Logits>(shared, block, selection->kept, selection->total, [&](int group) {
        return static_cast<int64_t>(
            __ldcg(reinterpret_cast<const long long*>(shared.task.masses) + group));
      });
  selection->complete = true;
}

// top_p, and the draw, of a flat row: of its tokens that reach `least` and weigh `total`. Not
// complete where the bracket turns out not to hold the cut, or more than its list does.
template <class Logits>
__device__ __noinline__ Selection select_from_bracket(Shared& shared, Block& block, float top_p,
                                                      int64_t total, float least) {
  Task& task = shared.task;
  const int thread = block.thread();
  const double largest = static_cast<double>(task.largest);
  const double scale = load_f64(task.row.params + kParamWideScale);
  const auto mass_at = [&](float y) {
    return mass_of(exp2_wide((static_cast<double>(y) - largest) * scale));
  };
  Selection selection = {};
  const Range bracket = bracket_cut<Logits>(shared, block, top_p, total, least);
  const float low = bracket.low, high = bracket.high;
  const int64_t above = collect<Logits>(shared, block, low, high);
  const int count = shared.count;
  if (count == 0 || count > kBracketed) return selection;
  const int64_t target = target_of(top_p, total);
  const int64_t left = target - sum_of_masses(shared, block);
  if (left <= 0) return selection;

  // In which of the bracket's bins the cut is.
  const Bins bins(low, fminf(high, task.largest));
  // In limbs, whose sums over a bracket fit: additions of 32 bits take one instruction.
  constexpr int kLimb = 14, kLimbs = 3;
  static_assert(kLimb * kLimbs > kMassBits && (int64_t{kBracketed} << kLimb) < int64_t{1} << 32);
  for (int i = 0; i < kLimbs; ++i) shared.mass_limbs[i][thread] = 0;
  __syncthreads();
  for (int i = thread; i < count; i += kThreads) {
    const float y = task.bracket_y[i];
    const int bin = bins.bin(y);
    int64_t mass = mass_at(y);
    for (int limb = 0; limb < kLimbs; ++limb, mass >>= kLimb) {
      const auto part = static_cast<uint32_t>(mass & ((1 << kLimb) - 1));
      if (part > 0) atomicAdd(&shared.mass_limbs[limb][bin], part);
    }
  }
  __syncthreads();
  int64_t inside, mine = 0;
  for (int i = kLimbs - 1; i >= 0; --i) mine = (mine << kLimb) + shared.mass_limbs[i][thread];
  const int64_t before = block.sum_before(mine, &inside);
  if (inside < left) return selection;
  if (before < left && before + mine >= left) {
    shared.found = thread;
    shared.found_before = before;
  }
  if (thread == 0) shared.count = 0;
  __syncthreads();
  const int cut_bin = shared.found;
  const int64_t higher = shared.found_before;

  // Its tokens, sorted, have the cut among them.
  int64_t kept = 0;
  for (int i = thread; i < count; i += kThreads) {
    const float y = task.bracket_y[i];
    const int bin = bins.bin(y);
    if (bin < cut_bin) ++kept;
    if (bin == cut_bin) {
      const int place = atomicAdd(&shared.count, 1);
      if (place < kListed) {
        shared.list_y[place] = y;
        shared.list_ids[place] = task.bracket_ids[i];
      }
    }
  }
  __syncthreads();
  const int in_cut = shared.count;
  if (in_cut > kListed) return selection;
  const uint64_t* sorted = sort_list(shared, block, in_cut);
  int64_t passed = higher;
  const int within = number_within(block, sorted, in_cut, left, &passed, mass_at);
  const uint64_t cut = sorted[within - 1];
  selection.kept = {task.largest, y_of_order(cut), id_of_order(cut)};
  for (int i = thread; i < count; i += kThreads) {
    const float y = task.bracket_y[i];
    const int token = task.bracket_ids[i];
    if (order_of(y, token) >= cut) {
      // Integers: the order of the additions decides nothing.
      atomicAdd(reinterpret_cast<unsigned long long*>(task.masses) + token / kGroup,
                static_cast<unsigned long long>(mass_at(y)));
    }
  }
  selection.num_kept = static_cast<int>(above + block.sum(kept) + within);
  draw_from_masses<Logits>(shared, block, &selection);
  return selection;
}

// The draw from all tokens that reach a bound.
template <class Logits>
__device__ __noinline__ Selection select_above(Shared& shared, Block& block, float bound) {
  const int64_t above = collect<Logits>(shared, block, bound, bound);
  Selection selection = {};
  selection.num_kept = static_cast<int>(above);
  selection.kept = {shared.task.largest, bound, shared.task.row.vocab};
  draw_from_masses<Logits>(shared, block, &selection);
  return selection;
}

}  // namespace graphed_sampling
