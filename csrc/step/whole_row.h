// All filters and the draw by surveys of a whole row, for what no list of candidates holds.
#pragma once

#include "bracket.h"

namespace graphed_sampling {

// Calls use(y, token) for every token of the row, a thread a group at a time.
template <class Logits, class Use>
__device__ inline void for_each_token(Shared& shared, Block& block, Use use) {
  Task& task = shared.task;
  for (int group = block.thread(); group < task.groups; group += kThreads) {
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first = piece_first(group, piece);
      if (first >= task.row.vocab) break;
      float y[kPiece];
      piece_y<Logits>(task.row, first, y);
#pragma unroll 1
      for (int i = 0; i < kPiece; ++i) {
        if (y[i] > kNegInf) use(y[i], first + i);
      }
    }
  }
}

// Of tokens: number, mass, sum of mass * z, and between which y they lie. z is from the highest of
// what is kept.
struct RowSums {
  int64_t number, mass, moment;
  float lowest, highest;
};

// A block's part of a survey of what is kept of a row: every `step`th piece from `first` on, the
// lanes of a warp having neighbours. count: of the list that others are put into.
template <class Logits>
__device__ __noinline__ RowSums survey_tokens(int first, int step, int* count) {
  const Shared& shared = the_shared();
  const Task& task = shared.task;
  const Row& row = shared.request.row;
  const Kept kept = shared.request.kept;
  const Survey survey = shared.request.survey;
  const double scale = load_f64(row.params + kParamWideScale);
  const double highest = static_cast<double>(kept.highest);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int pieces = task.groups * kPieces;
  RowSums sums = {0, 0, 0, kInf, kNegInf};
  Pack<Logits> next = load_pack<Logits>(row, min(first, pieces - 1) * kPiece);
#pragma unroll 1
  for (int piece = first; piece < pieces; piece += step) {
    const int first_token = piece * kPiece;
    float y[kPiece];
    y_of_pack<Logits>(row, next, first_token, y);
    next = load_pack<Logits>(row, min(piece + step, pieces - 1) * kPiece);
    uint32_t counted = 0, listed = 0;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const bool holds = kept.holds(y[j], first_token + j);
      const bool counts = holds && y[j] >= survey.low && y[j] <= survey.high;
      counted |= (counts ? 1u : 0u) << j;
      listed |=
          (holds && !counts && y[j] >= survey.outer_low && y[j] <= survey.outer_high ? 1u : 0u)
          << j;
      if (counts) {
        sums.lowest = fminf(sums.lowest, y[j]);
        sums.highest = fmaxf(sums.highest, y[j]);
      }
    }
    sums.number += __popc(counted);
    if (survey.measure != Measure::kNothing) {
      int64_t mass = 0;
      // A loop, whose instructions come once, through which the tokens move on.
      float moving[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) moving[j] = y[j];
#pragma unroll 1
      for (uint32_t left = counted; left != 0; left >>= 1) {
        if ((left & 1) != 0) {
          const double from_highest = static_cast<double>(moving[0]) - highest;
          double z = from_highest * scale, weight;
          if (survey.measure == Measure::kWeights) {
            weight = exp2_wide(z);
          } else {
            weight = -from_highest / survey.spread - survey.mean;
            if (survey.measure == Measure::kSquares) weight *= weight;
          }
          const int64_t of_token = mass_of(weight);
          mass += of_token;
          if (survey.moments && of_token > 0) {
            sums.moment += __double2ll_rn(static_cast<double>(of_token) * z);
          }
        }
        move_on(moving);
      }
      sums.mass += mass;
      if (survey.by_group) {
#pragma unroll
        for (int part = kGroupsOfWindow; part < kWindow / kPiece; part *= 2) {
          mass += __shfl_xor_sync(kAllLanes, static_cast<long long>(mass), part);
        }
        if (lane % (kWindow / kPiece) < kGroupsOfWindow) task.masses[group_of(first_token)] = mass;
      }
    }
    if (__any_sync(kAllLanes, listed != 0) == 0) continue;
    // The order of the list decides nothing: every use of it sums, compares or sorts.
    const int number = __popc(listed), up_to = sum_up_to_lane(number, lane);
    int place = 0;
    if (lane == kWarp - 1) place = atomicAdd(count, up_to);
    place = __shfl_sync(kAllLanes, place, kWarp - 1) + up_to - number;
    if (place + number > kBracketed) continue;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      if ((listed >> j & 1) == 0) continue;
      task.bracket_y[place] = y[j];
      task.bracket_ids[place] = first_token + j;
      ++place;
    }
  }
  return sums;
}

// What another block of the cluster does of a survey.
template <class Logits>
__device__ inline void help_surveying(Shared& shared, Block& block, int rank, int blocks) {
  const RowSums sums = survey_tokens<Logits>(rank * kThreads + block.thread(), blocks * kThreads,
                                             of_block(&shared.count, 0u));
  add_to_asker(shared, block, 0, sums.number);
  if (shared.request.survey.measure != Measure::kNothing) {
    add_to_asker(shared, block, 1, sums.mass);
    if (shared.request.survey.moments) add_to_asker(shared, block, 2, sums.moment);
  }
  const Range range = block.range(sums.lowest, sums.highest);
  if (block.thread() == 0) {
    atomicMin(of_block(&shared.lowest_key, 0u), key_of(range.low));
    atomicMax(of_block(&shared.highest_key, 0u), key_of(range.high));
  }
}

// A survey of what is kept; shared.count: of the list, or would be if it were longer.
template <class Logits>
__device__ __noinline__ RowSums take_survey(Shared& shared, Block& block, const Kept kept,
                                            const Survey survey) {
  __syncthreads();  // the last one's outcome may still be in use
  if (block.thread() == 0) {
    shared.lowest_key = key_of(kInf);
    shared.highest_key = key_of(kNegInf);
  }
  const int blocks = ask_others(shared, block, Pass::kSurvey, kept,
                                [&](Request& request) { request.survey = survey; });
  RowSums sums = survey_tokens<Logits>(block.thread(), blocks * kThreads, &shared.count);
  join(blocks);
  sums.number = sum_of_all(shared, block, 0, sums.number);
  if (survey.measure != Measure::kNothing) {
    sums.mass = sum_of_all(shared, block, 1, sums.mass);
    if (survey.moments) sums.moment = sum_of_all(shared, block, 2, sums.moment);
  }
  const Range range = block.range(sums.lowest, sums.highest);
  sums.lowest = fminf(range.low, from_key(shared.lowest_key));
  sums.highest = fmaxf(range.high, from_key(shared.highest_key));
  return sums;
}

// Of all that is kept, from y `low` up to `high`.
__device__ inline Survey survey_of(Measure measure, float low = kNegInf, float high = kInf) {
  return {measure, false, false, low, high, kInf, kInf, 0.0, 1.0};
}

// A little below the z of y, which is from `highest`.
__device__ inline float below_z(float y, float highest, float scale) {
  return fmaxf(z_of(y, highest, scale), -1e30f) * 1.01f - 1e-6f;
}

// Keeps, of what is kept, the best that weigh `target`, or by_count are as many. sums: of all of
// it.
template <class Logits>
__device__ __noinline__ Kept row_cut(Shared& shared, Block& block, const Kept kept,
                                     const RowSums sums, int64_t target, bool by_count) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  const auto sums_from = [&](float low) {
    return take_survey<Logits>(shared, block, kept,
                               survey_of(by_count ? Measure::kNothing : Measure::kWeights, low));
  };
  const auto amount = [&](const RowSums& of) { return by_count ? of.number : of.mass; };
  const int64_t all = amount(sums);
  if (has_bracket(task.row) && target < all) {
    // In units of the largest weight, or of tokens.
    const double unit = by_count ? 1.0 : static_cast<double>(kOne);
    const auto budget = static_cast<float>(static_cast<double>(all - target) / unit);
    const float least = below_z(sums.lowest, kept.highest, task.row.scale);
    Weighing weighing = {task.groups, fmaxf(least, least_z(budget, task.row.vocab))};
    if (by_count) {
      weighing.low = fmaxf(least, -64.0f);  // most cuts lie above it
      weighing.least = least;
      weighing.by_count = true;
    }
    const Range keys = bracket_of<Logits>(shared, block, kept, budget, weighing);
    const Range y = y_of_keys(keys, kept.highest, task.row.scale);
    Survey survey = survey_of(by_count ? Measure::kNothing : Measure::kWeights, y.high);
    survey.outer_low = y.low;
    const int64_t left = target - amount(take_survey<Logits>(shared, block, kept, survey));
    const int count = shared.count;
    if (left > 0 && count > 0 && count <= kBracketed) {
      const ListCut cut =
          cut_of_list(shared, block, count, y.low, y.high, left, by_count, kept.highest, nullptr);
      if (cut.found) return {kept.highest, y_of_order(cut.order), id_of_order(cut.order)};
    }
  }
  // Equals by the thousand, say: bit by bit.
  if (block.thread() == 0) *task.way = kBitByBit;
  int64_t low = key_of(fmaxf(kept.lowest, -kFltMax));
  int64_t high = int64_t{key_of(kept.highest)} + 1;
  // What reaches `low` suffices, what reaches `high` does not.
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (amount(sums_from(from_key(static_cast<int32_t>(middle)))) >= target) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const float cut = from_key(static_cast<int32_t>(low));
  const int64_t above = amount(sums_from(from_key(static_cast<int32_t>(low) + 1)));
  int64_t each = 1;
  if (!by_count) {
    each = mass_of_y(cut, static_cast<double>(kept.highest), scale);
    each = each < 1 ? 1 : each;
  }
  const int64_t ties = (target - above + each - 1) / each;
  // Of the equals at the cut, those with the lowest ids.
  int below = -1, cut_id = task.row.vocab - 1;
  while (cut_id - below > 1) {
    const int middle = below + (cut_id - below) / 2;
    int64_t number = 0;
    for_each_token<Logits>(shared, block, [&](float y, int token) {
      if (y == cut && token <= middle && kept.holds(y, token)) ++number;
    });
    if (block.sum(number) >= ties) {
      cut_id = middle;
    } else {
      below = middle;
    }
  }
  return {kept.highest, cut, cut_id};
}

// y_max - n standard deviations of the unbanned y.
template <class Logits>
__device__ __noinline__ double sigma_bound(Shared& shared, Block& block, float n) {
  const float highest = shared.task.largest;
  const Kept all = {highest, kNegInf, shared.task.row.vocab};
  const RowSums sums = take_survey<Logits>(shared, block, all, survey_of(Measure::kNothing));
  const double largest = static_cast<double>(highest);
  Survey survey = survey_of(Measure::kDistances);
  survey.spread = fmax(largest - static_cast<double>(sums.lowest), 2.2250738585072014e-308);
  const double masses = static_cast<double>(sums.number) * kOne;
  survey.mean = static_cast<double>(take_survey<Logits>(shared, block, all, survey).mass) / masses;
  survey.measure = Measure::kSquares;
  const RowSums squares = take_survey<Logits>(shared, block, all, survey);
  const double deviation = sqrt(static_cast<double>(squares.mass) / masses) * survey.spread;
  return largest - static_cast<double>(n) * deviation;
}

// The lowest y up to `high` for which holds what holds for all above it up to there; +inf if there
// is none. By every warp.
template <class Holds>
__device__ inline float lowest_y(float high, Holds holds) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // Whatever is below `low` does not hold, and `end` does, or nothing does.
  int64_t low = key_of(-kFltMax), end = int64_t{key_of(high)} + 1;
#pragma unroll 1
  while (low < end) {
    const int64_t step = (end - low + kWarp - 1) / kWarp;
    const int tested = static_cast<int>((end - low + step - 1) / step);
    const int64_t key = low + lane * step;
    const bool is_held = lane < tested && holds(from_key(static_cast<int32_t>(key)));
    const unsigned held = __ballot_sync(kAllLanes, is_held);
    const int first = held != 0 ? __ffs(static_cast<int>(held)) - 1 : tested;
    if (first < tested) end = low + first * step;
    if (first > 0) low += (first - 1) * step + 1;
  }
  return end > key_of(high) ? kInf : from_key(static_cast<int32_t>(end));
}

// The least distance of z from `mean` within which kept tokens weigh `target`; sums: of all of
// them. Negative where this way does not tell.
template <class Logits>
__device__ __noinline__ double reach_in_row(Shared& shared, Block& block, const Kept kept,
                                            const RowSums sums, int64_t target, double mean) {
  Task& task = shared.task;
  constexpr double kUnknown = -1.0;
  if (!has_bracket(task.row) || target >= sums.mass) return kUnknown;
  const double scale = load_f64(task.row.params + kParamWideScale);
  const double highest = static_cast<double>(kept.highest);
  const auto distance_of = [&](float y) {
    return fabs(mean - (static_cast<double>(y) - highest) * scale);
  };
  const auto budget = static_cast<float>(static_cast<double>(sums.mass - target) / kOne);
  const auto narrow_mean = static_cast<float>(mean);
  // Farther than the highest, and than tokens of which all together do not weigh the budget, it
  // does not reach.
  const float lowest =
      fmaxf(least_z(budget, task.row.vocab), below_z(sums.lowest, kept.highest, task.row.scale));
  const float farthest = fmaxf(-narrow_mean, narrow_mean - lowest) * 1.01f + 1e-6f;
  Weighing weighing = {task.groups, -farthest};
  weighing.by_distance = true;
  weighing.mean = narrow_mean;
  const Range keys = bracket_of<Logits>(shared, block, kept, budget, weighing);
  const auto y_at = [&](double z) { return static_cast<float>(highest + z / scale); };
  const double near = static_cast<double>(-keys.high), far = static_cast<double>(-keys.low);
  Survey survey = survey_of(Measure::kWeights, kInf, kNegInf);
  double surely_within = 0.0;
  if (near > 0.0) {
    survey.low = from_key(key_of(y_at(mean - near)) + 1);
    survey.high = from_key(key_of(y_at(mean + near)) - 1);
    if (survey.low > survey.high) return kUnknown;
    surely_within = fmax(distance_of(survey.low), distance_of(survey.high));
  }
  survey.outer_low = from_key(key_of(fmaxf(y_at(mean - far), -kFltMax * 0.5f)) - 1);
  survey.outer_high = from_key(key_of(fminf(y_at(mean + far), kFltMax * 0.5f)) + 1);
  const double surely_beyond =
      fmin(distance_of(survey.outer_low),
           survey.outer_high > kept.highest ? 1e300 : distance_of(survey.outer_high));
  int64_t left = target - take_survey<Logits>(shared, block, kept, survey).mass;
  const int count = shared.count;
  if (left <= 0 || count == 0 || count > kBracketed) return kUnknown;
  const auto mass_at = [&](float y) { return mass_of_y(y, highest, scale); };
  const auto first = static_cast<float>(near);
  const float per_bin = static_cast<float>(kBins) / (static_cast<float>(far) - first);
  const auto bin_of = [&](float y) {
    const float place = (static_cast<float>(distance_of(y)) - first) * per_bin;
    return static_cast<int>(fmaxf(fminf(place, kBins - 1.0f), 0.0f));
  };
  const CutBin cut = cut_bin(shared, block, left, [&](auto add) {
    for_each_bracketed(shared.task, count, [&](float y, int) { add(bin_of(y), mass_at(y)); });
  });
  if (cut.bin < 0) return kUnknown;
  left -= cut.before;
  const int in_cut = list_bin(shared, count, cut.bin, bin_of, [](float, int) {});
  if (in_cut > kListed) return kUnknown;
  const Filters filters = {highest, scale, 0, mean, -1.0, 0.0, 0.0};
  const double reach = typical_reach(shared, block, in_cut, filters, left);
  return reach >= surely_within && reach < surely_beyond ? reach : kUnknown;
}

// What is kept from y `low` on.
__device__ inline Kept kept_from(const Task& task, const Kept& kept, float low) {
  if (low <= kept.lowest) return kept;
  return {kept.highest, low, task.row.vocab};
}

// typical_p over a row.
template <class Logits>
__device__ __noinline__ Kept row_typical(Shared& shared, Block& block, const Kept kept,
                                         float typical) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  const double highest = static_cast<double>(kept.highest);
  Survey survey = survey_of(Measure::kWeights);
  survey.moments = true;
  const RowSums sums = take_survey<Logits>(shared, block, kept, survey);
  const double mean = static_cast<double>(sums.moment) / static_cast<double>(sums.mass);
  const int64_t target = target_of(typical, sums.mass);
  const auto z_at = [&](float y) { return (static_cast<double>(y) - highest) * scale; };
  double reach = reach_in_row<Logits>(shared, block, kept, sums, target, mean);
  if (reach < 0.0) {
    if (block.thread() == 0) *task.way = kBitByBit;
    reach = smallest_reach(block, target, [&](double within) {
      int64_t mass = 0;
      for_each_token<Logits>(shared, block, [&](float y, int token) {
        const double z = z_at(y);
        if (kept.holds(y, token) && fabs(mean - z) <= within) mass += mass_of(exp2_wide(z));
      });
      return mass;
    });
  }
  const float low = lowest_y(kept.highest, [&](float y) { return mean - z_at(y) <= reach; });
  const float beyond = lowest_y(kept.highest, [&](float y) { return z_at(y) - mean > reach; });
  // Masses start again from the highest that is left.
  const float high = beyond < kInf ? from_key(key_of(beyond) - 1) : kInf;
  const RowSums left =
      take_survey<Logits>(shared, block, kept, survey_of(Measure::kNothing, low, high));
  Kept nearest = kept_from(task, kept, low);
  nearest.highest = left.highest;
  return nearest;
}

// Keeps what weighs at least `bound`, and the highest.
__device__ inline Kept row_reaching(const Task& task, const Kept kept, double bound) {
  const double scale = load_f64(task.row.params + kParamWideScale);
  const float low =
      fminf(lowest_y(kept.highest,
                     [&](float y) {
                       const double z =
                           (static_cast<double>(y) - static_cast<double>(kept.highest)) * scale;
                       return exp2_wide(z) >= bound;
                     }),
            kept.highest);
  return kept_from(task, kept, low);
}

// All filters over a row, and the draw.
template <class Logits>
__device__ __noinline__ Selection select_from_row(Shared& shared, Block& block) {
  Task& task = shared.task;
  const int32_t* params = task.row.params;
  Kept kept = {task.largest, kNegInf, task.row.vocab};
  const auto sums_of_kept = [&](Measure measure, bool moments = false, bool by_group = false) {
    Survey survey = survey_of(measure);
    survey.moments = moments;
    survey.by_group = by_group;
    return take_survey<Logits>(shared, block, kept, survey);
  };
  if (!task.row.has(kGreedy) && load_f32(params + kParamTopNSigma) > 0.0f &&
      task.row.special == kNormal) {
    kept.lowest = fmaxf(kept.lowest, task.sigma_bound);  // lists have been tried with it
  }
  if (!task.row.has(kGreedy) && load_f32(params + kParamMinP) > 0.0f) {
    const double offset = load_f64(params + kParamMinPOffset);
    kept.lowest = fmaxf(kept.lowest, round_down(static_cast<double>(task.largest) + offset));
  }
  const int top_k = task.row.has(kGreedy) ? 1 : params[kParamTopK];
  if (top_k > 0) {
    const RowSums sums = sums_of_kept(Measure::kNothing);
    if (sums.number > top_k) kept = row_cut<Logits>(shared, block, kept, sums, top_k, true);
  }
  const float top_p = load_f32(params + kParamTopP);
  if (top_p < 1.0f) {
    const RowSums sums = sums_of_kept(Measure::kWeights);
    kept = row_cut<Logits>(shared, block, kept, sums, target_of(top_p, sums.mass), false);
  }
  const float typical = load_f32(params + kParamTypicalP);
  if (typical < 1.0f) kept = row_typical<Logits>(shared, block, kept, typical);
  const float epsilon = load_f32(params + kParamEpsilonCutoff);
  if (epsilon > 0.0f) {
    const RowSums sums = sums_of_kept(Measure::kWeights);
    const double bound = static_cast<double>(epsilon) * (static_cast<double>(sums.mass) / kOne);
    kept = row_reaching(task, kept, bound);
  }
  const float eta = load_f32(params + kParamEtaCutoff);
  if (eta > 0.0f) {
    const RowSums sums = sums_of_kept(Measure::kWeights, true);
    const double mean = static_cast<double>(sums.moment) / static_cast<double>(sums.mass);
    const double wide = static_cast<double>(eta);
    const double bound =
        fmin(wide * (static_cast<double>(sums.mass) / kOne), sqrt(wide) * exp2_wide(mean));
    kept = row_reaching(task, kept, bound);
  }
  const RowSums sums = sums_of_kept(Measure::kWeights, false, true);
  const Drawn drawn = draw_from_groups<Logits>(
      shared, block, kept, sums.mass, [&](int group) { return mass_left(task, group); },
      [&](int) { return kept.highest; });
  return {true, drawn, kept, sums.mass, static_cast<int>(sums.number)};
}

}  // namespace graphed_sampling
