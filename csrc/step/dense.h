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
  const float budget = static_cast<float>(static_cast<double>(total) / kOne) * (1.0f - top_p);
  // Below it not even all tokens weigh the budget.
  float low_z = fminf(lg2_approx(budget / static_cast<float>(task.row.vocab)), -1.0f),
        high_z = 0.0f;
  // Twice, the second time between the bounds of the first, which may be rough.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const int least_sample = round == 0 ? 32 : 128;
    const int sampled = min(max(least_sample, task.groups / 2048 * least_sample), task.groups);
    const float ratio = static_cast<float>(task.groups) / static_cast<float>(sampled);
    const Bins bins(low_z, high_z);
    // All weights that there can be fit into a bin.
    const float unit = 4294967040.0f / static_cast<float>(sampled * kGroup);
    __syncthreads();
    shared.bins[block.thread()] = 0;
    __syncthreads();
    int64_t below_all = 0;
    const int pieces = sampled * kPieces;
#pragma unroll 1
    for (int begin = block.thread(); begin < pieces; begin += kAtOnce * kThreads) {
      const auto first_of = [&](int i) {
        const auto place = static_cast<unsigned>(min(begin + i * kThreads, pieces - 1));
        const unsigned group =
            place / kPieces * static_cast<unsigned>(task.groups) / static_cast<unsigned>(sampled);
        return static_cast<int>(group * kGroup + place % kPieces * kPiece);
      };
      Pack<Logits> packs[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) packs[i] = load_pack<Logits>(task.row, first_of(i));
      // A loop, whose instructions come once, through which the packs move on.
#pragma unroll 1
      for (int i = 0; i < kAtOnce && begin + i * kThreads < pieces; ++i) {
        float y[kPiece];
        y_of_pack<Logits>(task.row, packs[0], first_of(i), y);
#pragma unroll
        for (int j = 0; j < kAtOnce - 1; ++j) packs[j] = packs[j + 1];
#pragma unroll
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

// A block's part of `collect`: every `step`th set of 1024 tokens from the warp's own one on.
// Returns a thread's part of how many there are from `high` on. count: of the list.
template <class Logits>
__device__ __noinline__ int collect_sets(int first_set, int step, int* count) {
  const Shared& shared = the_shared();
  const Task& task = shared.task;
  const Row& row = shared.request.row;
  const float low = shared.request.low, high = shared.request.high;
  const float largest = shared.request.largest, scale = row.scale;
  const float* maxima = task.at.maxima;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int sets = task.groups / kGroupsOfTile * kSets;
  const int whole = Logits::kSharded ? 0 : tiles_to_load(row);
  const bool plain = row.plain();
  int above = 0;
  Set<Logits> next = {};
  // One set is on its way while another is worked on.
#pragma unroll 1
  for (int set = first_set - step; set < sets; set += step) {
    const Set<Logits> loaded = next;
    if (set + step < sets) {
      const int tile = (set + step) / kSets, number = (set + step) % kSets;
      bool in_one_piece = false;
      if constexpr (!Logits::kSharded) in_one_piece = tile < whole;
      next = in_one_piece ? load_set<Logits>(row, tile, number, lane)
                          : load_any_set<Logits>(row, tile, number, lane);
    }
    if (set < 0) continue;
    const int tile = set / kSets, first_piece = set % kSets * kAtOnce;
    float sums[kAtOnce];
    uint32_t listed = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int first = tile_first(tile, first_piece + i, lane);
      const float base = finite_or_zero(load_now(maxima + first / kGroup));
      // NaN reaches no bound.
      float y[kPiece];
      Logits::unpack(loaded.packs[i].words, y);
      if (!plain) y_of_pack<Logits>(row, loaded.packs[i], first, y);
      float parts[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        const bool over = y[j] >= high;
        parts[j % 2] += over ? ex2_approx(z_of(y[j], base, scale)) : 0.0f;
        above += over ? 1 : 0;
        listed |= (y[j] >= low && !over ? 1u : 0u) << (i * kPiece + j);
      }
      sums[i] = parts[0] + parts[1];
    }
    const float sum = sum_of_groups(sums, lane);
    const int group = group_of_lane(tile, first_piece, lane);
    if (lane_writes(lane)) {
      task.masses[group] = group_mass(load_now(maxima + group), sum, largest, scale);
    }
    const int number = __popc(listed), up_to = sum_up_to_lane(number, lane);
    const int appended = __shfl_sync(kAllLanes, up_to, kWarp - 1);
    if (appended == 0) continue;
    // The order of the list decides nothing: every use of it sums, compares or sorts.
    int place = 0;
    if (lane == 0) place = atomicAdd(count, appended);
    place = __shfl_sync(kAllLanes, place, 0) + up_to - number;
    if (place + number > kBracketed) continue;
    if constexpr (Logits::kSharded) {
      // To load them once more, as below, could be to fetch them from another device.
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int first = tile_first(tile, first_piece + i, lane);
        float y[kPiece];
        y_of_pack<Logits>(row, loaded.packs[i], first, y);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          if ((listed >> (i * kPiece + j) & 1) == 0) continue;
          task.bracket_y[place] = y[j];
          task.bracket_ids[place] = first + j;
          ++place;
        }
      }
    } else {
#pragma unroll 1
      for (; listed != 0; listed &= listed - 1, ++place) {
        const int bit = __ffs(static_cast<int>(listed)) - 1;
        const int token = tile_first(tile, first_piece + bit / kPiece, lane) + bit % kPiece;
        float y = load_logit<Logits>(row, token);
        if (!plain) y = special_or(row, processed(row, y, token), token);
        task.bracket_y[place] = y;
        task.bracket_ids[place] = token;
      }
    }
  }
  return above;
}

// The second pass: the mass of what each group has from `high` on, and a list of what lies between
// `low` and `high`. Returns how many there are from `high` on; shared.count: in the list, or would
// be if it were longer. The other blocks of the row's cluster take their parts.
template <class Logits>
__device__ __noinline__ int64_t collect(Shared& shared, Block& block, float low, float high) {
  const Task& task = shared.task;
  // Where rows share a slot, which nobody may do, one of them may be gone.
  const int blocks = shared.helpers == task.blocks - 1 ? task.blocks : 1;
  if (block.thread() == 0) {
    shared.count = 0;
    shared.above = 0;
    shared.request = {true, low, high, task.largest, task.row};
  }
  __syncthreads();
  if (blocks > 1) {
    constexpr int kWords = static_cast<int>(sizeof(Request) / sizeof(int32_t));
    auto* words = reinterpret_cast<int32_t*>(&shared.request);
    for (int i = block.thread(); i < (blocks - 1) * kWords; i += kThreads) {
      of_block(words, static_cast<unsigned>(1 + i / kWords))[i % kWords] = words[i % kWords];
    }
    cluster_arrive();
  }
  const int above = collect_sets<Logits>(block.warp(), blocks * kWarps, &shared.count);
  if (blocks > 1) {
    cluster_wait();
    cluster_arrive();
    cluster_wait();
  }
  return block.sum(above) + shared.above;
}

// What the other blocks of a row's cluster do until its first one has finished the row: what that
// one asks for. When it has exited, nobody has to arrive at the barrier any more.
template <class Logits>
__device__ __noinline__ void help_finishing() {
  Shared& shared = the_shared();
  Block block = {0};
  for (;;) {
    cluster_arrive();
    cluster_wait();
    if (!shared.request.wanted) return;
    const int own = static_cast<int>(cluster_rank()) * kWarps + block.warp();
    const int above = collect_sets<Logits>(own, static_cast<int>(cluster_size()) * kWarps,
                                           of_block(&shared.count, 0u));
    const int64_t all = block.sum(above);
    if (block.thread() == 0) {
      atomicAdd(of_block(&shared.above, 0u), static_cast<int>(all));
      shared.request.wanted = false;
    }
    cluster_arrive();
    cluster_wait();
  }
}

// Calls use(y, token) for each token of the list around the cut, of which some are on their way at
// a time.
template <class Use>
__device__ inline void for_each_bracketed(const Task& task, int count, Use use) {
  constexpr int kAhead = 4;
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < count; begin += kAhead * kThreads) {
    int ids[kAhead];
    float y[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = min(begin + i * kThreads, count - 1);
      y[i] = __ldcg(task.bracket_y + at);
      ids[i] = __ldcg(task.bracket_ids + at);
    }
    // A loop, whose instructions come once, through which they move on.
#pragma unroll 1
    for (int i = 0; i < kAhead && begin + i * kThreads < count; ++i) {
      use(y[0], ids[0]);
#pragma unroll
      for (int j = 0; j < kAhead - 1; ++j) {
        y[j] = y[j + 1];
        ids[j] = ids[j + 1];
      }
    }
  }
}

__device__ inline int64_t sum_of_masses(Shared& shared, Block& block) {
  int64_t mass = 0;
#pragma unroll 4
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
  for_each_bracketed(task, count, [&](float y, int) {
    const int bin = bins.bin(y);
    int64_t mass = mass_at(y);
#pragma unroll
    for (int limb = 0; limb < kLimbs; ++limb, mass >>= kLimb) {
      const auto part = static_cast<uint32_t>(mass & ((1 << kLimb) - 1));
      if (part > 0) atomicAdd(&shared.mass_limbs[limb][bin], part);
    }
  });
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
  for_each_bracketed(task, count, [&](float y, int token) {
    const int bin = bins.bin(y);
    if (bin < cut_bin) ++kept;
    if (bin == cut_bin) {
      const int place = atomicAdd(&shared.count, 1);
      if (place < kListed) {
        shared.list_y[place] = y;
        shared.list_ids[place] = token;
      }
    }
  });
  __syncthreads();
  const int in_cut = shared.count;
  if (in_cut > kListed) return selection;
  const uint64_t* sorted = sort_list(shared, block, in_cut);
  int64_t passed = higher;
  const int within = number_within(block, sorted, in_cut, left, &passed, mass_at);
  const uint64_t cut = sorted[within - 1];
  selection.kept = {task.largest, y_of_order(cut), id_of_order(cut)};
  for_each_bracketed(task, count, [&](float y, int token) {
    if (order_of(y, token) >= cut) {
      // Integers: the order of the additions decides nothing.
      atomicAdd(reinterpret_cast<unsigned long long*>(task.masses) + token / kGroup,
                static_cast<unsigned long long>(mass_at(y)));
    }
  });
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
