// Flat rows, whose survivors are too many for a list: a second pass over the row.
#pragma once

#include "whole_row.h"

namespace graphed_sampling {

// What is collected: how many tokens there are from `high` on, and their mass.
struct Collected {
  int64_t number, mass;
};

// Puts a lane's tokens into the list, of which `count` have their place by then. The order of the
// list decides nothing: every use of it sums, compares or sorts.
template <class Logits, bool kPlain>
__device__ __noinline__ void list_own(int number, int* count) {
  const Shared& shared = the_shared();
  const Row& row = shared.request.row;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int32_t (&own)[kOfLane][kWarp] = shared.of_lanes[threadIdx.x / kWarp];
  float* list_y = shared.task.bracket_y;
  int32_t* list_ids = shared.task.bracket_ids;
  const int up_to = sum_up_to_lane(number, lane);
  int place = 0;
  if (lane == kWarp - 1 && up_to > 0) place = atomicAdd(count, up_to);
  place = __shfl_sync(kAllLanes, place, kWarp - 1) + up_to - number;
  // Loaded once more: y was in registers, which cannot be numbered.
  constexpr int kAtATime = 4;
#pragma unroll 1
  for (int begin = 0; begin < number; begin += kAtATime) {
    int ids[kAtATime];
    float y[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) ids[i] = own[min(begin + i, number - 1)][lane];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) y[i] = load_logit<Logits>(row, ids[i]);
#pragma unroll 1
    for (int i = 0; i < kAtATime && begin + i < number; ++i) {
      if constexpr (!kPlain) y[0] = special_or(row, processed(row, y[0], ids[0]), ids[0]);
      if (place + begin + i < kBracketed) {
        list_y[place + begin + i] = y[0];
        list_ids[place + begin + i] = ids[0];
      }
      move_on(y);
      move_on(ids);
    }
  }
}

// A block's part of `collect`: every `step`th set of 1024 tokens from the warp's own one on.
// Returns a thread's part of it. count: of the list. kPlain: whether y are the logits.
template <class Logits, bool kPlain>
__device__ __noinline__ Collected collect_own(int first_set, int step, int* count) {
  Shared& shared = the_shared();
  const Task& task = shared.task;
  const Row& row = shared.request.row;
  const float low = shared.request.kept.lowest, high = shared.request.high;
  const float largest = shared.request.kept.highest, scale = row.scale;
  const float* maxima = task.at.maxima;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  [[maybe_unused]] int32_t (&own)[kOfLane][kWarp] = shared.of_lanes[threadIdx.x / kWarp];
  [[maybe_unused]] int number_of_own = 0;
  const int sets = task.groups / kGroupsOfTile * kSets;
  const int whole = tiles_to_load<Logits>(row);
  Collected collected = {0, 0};
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
    const int tile = set / kSets, number = set % kSets;
    const int group = group_of_lane(tile, number, lane);
    const float maximum = load_now(maxima + group), base = finite_or_zero(maximum);
    float of_lane = 0.0f;
    uint32_t above = 0, reaching = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // NaN reaches no bound.
      float y[kPiece];
      Logits::unpack(loaded.packs[i].words, y);
      if constexpr (!kPlain) {
        y_of_pack<Logits>(row, loaded.packs[i], set_first(tile, number, i, lane), y);
      }
      float parts[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        const bool over = y[j] >= high;
        parts[j % 2] += over ? ex2_approx(z_of(y[j], base, scale)) : 0.0f;
        above |= (over ? 1u : 0u) << (i * kPiece + j);
        reaching |= (y[j] >= low ? 1u : 0u) << (i * kPiece + j);
      }
      of_lane += parts[0] + parts[1];
    }
    collected.number += __popc(above);
    // Only where given statistics are wrong it would be more.
    const float sum = fminf(sum_of_group(of_lane), static_cast<float>(kGroup));
    if (lane_writes(lane)) {
      const int64_t mass = group_mass(maximum, sum, largest, scale);
      task.masses[group] = mass;
      collected.mass += mass;
    }
    uint32_t listed = reaching & ~above;
    if constexpr (Logits::kSharded) {
      // To load them once more, as `list_own` does, could be to fetch them from another device.
      const int mine = __popc(listed), up_to = sum_up_to_lane(mine, lane);
      int place = 0;
      if (lane == kWarp - 1 && up_to > 0) place = atomicAdd(count, up_to);
      place = __shfl_sync(kAllLanes, place, kWarp - 1) + up_to - mine;
      if (place + mine > kBracketed) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int first = set_first(tile, number, i, lane);
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
      // Nothing is waited for here: lanes list theirs when one of them has no place left.
      for (;;) {
        for (; listed != 0 && number_of_own < kOfLane; listed &= listed - 1) {
          const int bit = __ffs(static_cast<int>(listed)) - 1;
          own[number_of_own++][lane] = set_first(tile, number, bit / kPiece, lane) + bit % kPiece;
        }
        if (__any_sync(kAllLanes, listed != 0) == 0) break;
        list_own<Logits, kPlain>(number_of_own, count);
        number_of_own = 0;
      }
    }
  }
  if constexpr (!Logits::kSharded) list_own<Logits, kPlain>(number_of_own, count);
  return collected;
}

template <class Logits>
__device__ inline Collected collect_sets(int first_set, int step, int* count) {
  return the_shared().request.row.plain() ? collect_own<Logits, true>(first_set, step, count)
                                          : collect_own<Logits, false>(first_set, step, count);
}

// The second pass: the mass of what each group has from `high` on, and a list of what lies between
// `low` and `high`. shared.count: in the list, or would be if it were longer. The other blocks of
// the row's cluster take their parts.
template <class Logits>
__device__ __noinline__ Collected collect(Shared& shared, Block& block, float low, float high) {
  const Task& task = shared.task;
  const Kept from_low = {task.largest, low, task.row.vocab};
  const int blocks = ask_others(shared, block, Pass::kCollect, from_low,
                                [&](Request& request) { request.high = high; });
  const Collected own = collect_sets<Logits>(block.warp(), blocks * kWarps, &shared.count);
  join(blocks);
  return {sum_of_all(shared, block, 0, own.number), sum_of_all(shared, block, 1, own.mass)};
}

// What the other blocks of a row's cluster do until its first one has finished the row: what that
// one asks for. When it has exited, nobody has to arrive at the barrier any more.
template <class Logits>
__device__ __noinline__ void help_finishing() {
  Shared& shared = the_shared();
  Block block = {0};
  for (;;) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    const Pass pass = shared.request.pass;
    if (pass == Pass::kNone) return;
    const int rank = static_cast<int>(cluster_rank()), size = static_cast<int>(cluster_size());
    if (pass == Pass::kWeigh) {
      help_weighing<Logits>(shared, block, rank, size);
    } else if (pass == Pass::kSurvey) {
      help_surveying<Logits>(shared, block, rank, size);
    } else {
      const Collected own = collect_sets<Logits>(rank * kWarps + block.warp(), size * kWarps,
                                                 of_block(&shared.count, 0u));
      add_to_asker(shared, block, 0, own.number);
      add_to_asker(shared, block, 1, own.mass);
    }
    // Every thread has looked at the request: the sums have a barrier.
    if (block.thread() == 0) shared.request.pass = Pass::kNone;
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// The draw from what the groups' masses count, which add up to `total`.
template <class Logits>
__device__ inline void draw_from_masses(Shared& shared, Block& block, int64_t total,
                                        Selection* selection) {
  selection->total = total;
  selection->drawn = draw_from_groups<Logits>(
      shared, block, selection->kept, total,
      [&](int group) { return mass_left(shared.task, group); },
      [&](int group) { return load_now(shared.task.at.maxima + group); });
  selection->complete = true;
}

// top_p, and the draw, of a flat row: of its tokens that reach `least` and weigh `total`. Not
// complete where the bracket turns out not to hold the cut, or more than its list does.
template <class Logits>
__device__ __noinline__ Selection select_from_bracket(Shared& shared, Block& block, float top_p,
                                                      int64_t total, float least) {
  Task& task = shared.task;
  Selection selection = {};
  const auto budget = static_cast<float>(static_cast<double>(total) / kOne) * (1.0f - top_p);
  const Kept reaching = {task.largest, least, task.row.vocab};
  const Range keys =
      bracket_of<Logits>(shared, block, reaching, budget,
                         {groups_of_sample(task.groups), least_z(budget, task.row.vocab)});
  const Range y = y_of_keys(keys, task.largest, task.row.scale);
  const float low = fmaxf(y.low, least), high = y.high;
  const Collected above = collect<Logits>(shared, block, low, high);
  const int count = shared.count;
  if (count == 0 || count > kBracketed) return selection;
  const int64_t left = target_of(top_p, total) - above.mass;
  if (left <= 0) return selection;
  const ListCut cut =
      cut_of_list(shared, block, count, low, high, left, false, task.largest, task.masses);
  if (!cut.found) return selection;
  __syncthreads();
  selection.kept = {task.largest, y_of_order(cut.order), id_of_order(cut.order)};
  selection.num_kept = static_cast<int>(above.number) + cut.number;
  draw_from_masses<Logits>(shared, block, above.mass + cut.mass, &selection);
  return selection;
}

// The draw from all tokens that reach a bound.
template <class Logits>
__device__ __noinline__ Selection select_above(Shared& shared, Block& block, float bound) {
  const Collected above = collect<Logits>(shared, block, bound, bound);
  Selection selection = {};
  selection.num_kept = static_cast<int>(above.number);
  selection.kept = {shared.task.largest, bound, shared.task.row.vocab};
  draw_from_masses<Logits>(shared, block, above.mass, &selection);
  return selection;
}

}  // namespace graphed_sampling
