// All filters and the draw by going over a whole row: slow, for what nothing else can do.
#pragma once

#include "lists.h"

namespace graphed_sampling {

// Calls use(y, token) for every token of the row, a thread a group at a time.
template <class Logits, class Use>
__device__ inline void for_each_token(Shared& shared, Block& block, Use use) {
  Task& task = shared.task;
  for (int group = block.thread(); group < task.groups; group += kThreads) {
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first = group * kGroup + piece * kPiece;
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

struct RowSums {
  int64_t number, mass, moment;
};

// Of the kept tokens with a key >= key: number, mass, and sum of mass * z; z is from the highest.
template <class Logits>
__device__ __noinline__ RowSums row_sums(Shared& shared, Block& block, const Kept kept,
                                         int64_t key) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  const double highest = static_cast<double>(kept.highest);
  RowSums sums = {0, 0, 0};
  for_each_token<Logits>(shared, block, [&](float y, int token) {
    if (kept.holds(y, token) && key_of(y) >= key) {
      const double z = (static_cast<double>(y) - highest) * scale;
      const int64_t mass = mass_of(exp2_wide(z));
      sums.number += 1;
      sums.mass += mass;
      if (mass > 0) sums.moment += __double2ll_rn(static_cast<double>(mass) * z);
    }
  });
  return {block.sum(sums.number), block.sum(sums.mass), block.sum(sums.moment)};
}

constexpr int64_t kAllKeys = -0x80000000ll;

// Keeps, of what is kept, the best that weigh `target` or, by_count, are as many.
template <class Logits>
__device__ __noinline__ Kept row_cut(Shared& shared, Block& block, const Kept kept, int64_t target,
                                     bool by_count) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  int64_t low = key_of(fmaxf(kept.lowest, -kFltMax));
  int64_t high = int64_t{key_of(kept.highest)} + 1;
  // What reaches `low` suffices, what reaches `high` does not.
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const RowSums sums = row_sums<Logits>(shared, block, kept, middle);
    if ((by_count ? sums.number : sums.mass) >= target) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const RowSums above = row_sums<Logits>(shared, block, kept, low + 1);
  const float cut = from_key(static_cast<int32_t>(low));
  int64_t each = 1;
  if (!by_count) {
    const double z = (static_cast<double>(cut) - static_cast<double>(kept.highest)) * scale;
    each = mass_of(exp2_wide(z));
    each = each < 1 ? 1 : each;
  }
  const int64_t ties = (target - (by_count ? above.number : above.mass) + each - 1) / each;
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
  Task& task = shared.task;
  int64_t number = 0;
  float smallest = kInf;
  for_each_token<Logits>(shared, block, [&](float y, int) {
    ++number;
    smallest = fminf(smallest, y);
  });
  number = block.sum(number);
  smallest = block.min(smallest);
  const double largest = static_cast<double>(task.largest);
  const double spread = fmax(largest - static_cast<double>(smallest), 2.2250738585072014e-308);
  const double all = static_cast<double>(number) * kOne;
  int64_t moment = 0;
  for_each_token<Logits>(shared, block, [&](float y, int) {
    moment += mass_of((largest - static_cast<double>(y)) / spread);
  });
  const double mean = static_cast<double>(block.sum(moment)) / all;
  int64_t square = 0;
  for_each_token<Logits>(shared, block, [&](float y, int) {
    const double distance = (largest - static_cast<double>(y)) / spread - mean;
    square += mass_of(distance * distance);
  });
  square = block.sum(square);
  const double deviation = sqrt(static_cast<double>(square) / all) * spread;
  return largest - static_cast<double>(n) * deviation;
}

// typical_p over a row.
template <class Logits>
__device__ __noinline__ Kept row_typical(Shared& shared, Block& block, const Kept kept,
                                         float typical) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  const double highest = static_cast<double>(kept.highest);
  const RowSums sums = row_sums<Logits>(shared, block, kept, kAllKeys);
  const double mean = static_cast<double>(sums.moment) / static_cast<double>(sums.mass);
  const int64_t target = target_of(typical, sums.mass);
  const double reach = smallest_reach(block, target, [&](double within) {
    int64_t mass = 0;
    for_each_token<Logits>(shared, block, [&](float y, int token) {
      const double z = (static_cast<double>(y) - highest) * scale;
      if (kept.holds(y, token) && fabs(mean - z) <= within) mass += mass_of(exp2_wide(z));
    });
    return mass;
  });
  Kept nearest = {kNegInf, kInf, 0};
  for_each_token<Logits>(shared, block, [&](float y, int token) {
    const double z = (static_cast<double>(y) - highest) * scale;
    if (kept.holds(y, token) && fabs(mean - z) <= reach) {
      nearest.highest = fmaxf(nearest.highest, y);
      nearest.lowest = fminf(nearest.lowest, y);
    }
  });
  const Range range = block.range(nearest.lowest, nearest.highest);
  nearest.lowest = range.low;
  nearest.highest = range.high;
  nearest.lowest_id = nearest.lowest > kept.lowest ? task.row.vocab : kept.lowest_id;
  return nearest;
}

// Keeps what weighs at least `bound`, and the highest.
template <class Logits>
__device__ __noinline__ Kept row_reaching(Shared& shared, Block& block, const Kept kept,
                                          double bound) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  float lowest = kept.highest;
  for_each_token<Logits>(shared, block, [&](float y, int token) {
    const double z = (static_cast<double>(y) - static_cast<double>(kept.highest)) * scale;
    if (kept.holds(y, token) && exp2_wide(z) >= bound) lowest = fminf(lowest, y);
  });
  lowest = block.min(lowest);
  return {kept.highest, lowest, lowest > kept.lowest ? task.row.vocab : kept.lowest_id};
}

// The token at which the kept masses, in canonical order, exceed the word's position.
template <class Logits>
__device__ __noinline__ Drawn draw_from_row(Shared& shared, Block& block, const Kept kept,
                                            int64_t total) {
  Task& task = shared.task;
  const double scale = load_f64(task.row.params + kParamWideScale);
  const double highest = static_cast<double>(kept.highest);
  const int64_t position = position_of(task.word, total);
  int64_t passed = 0;
  for (int first = 0; first < task.groups && passed <= position; first += kThreads) {
    const int group = first + block.thread();
    int64_t mass = 0, inside;
    const auto mass_at = [&](float y, int token) {
      if (!kept.holds(y, token)) return int64_t{0};
      return mass_of(exp2_wide((static_cast<double>(y) - highest) * scale));
    };
    for (int piece = 0; piece < kPieces && group < task.groups; ++piece) {
      float y[kPiece];
      piece_y<Logits>(task.row, group * kGroup + piece * kPiece, y);
      for (int i = 0; i < kPiece; ++i) mass += mass_at(y[i], group * kGroup + piece * kPiece + i);
    }
    int64_t before = passed + block.sum_before(mass, &inside);
    if (before <= position && position < before + mass) {
      for (int place = 0; place < kGroup; ++place) {
        const int token = group * kGroup + place;
        float y[kPiece];
        piece_y<Logits>(task.row, group * kGroup + place / kPiece * kPiece, y);
        const int64_t of_token = mass_at(y[place % kPiece], token);
        if (before <= position && position < before + of_token) {
          shared.found = token;
          shared.found_y = y[place % kPiece];
        }
        before += of_token;
      }
    }
    passed += inside;
  }
  __syncthreads();
  return {shared.found, shared.found_y};
}

// All filters over a row, and the draw.
template <class Logits>
__device__ __noinline__ Selection select_from_row(Shared& shared, Block& block) {
  Task& task = shared.task;
  const int32_t* params = task.row.params;
  Kept kept = {task.largest, kNegInf, task.row.vocab};
  if (task.row.has(kGreedy)) kept = row_cut<Logits>(shared, block, kept, 1, true);
  const float sigma = load_f32(params + kParamTopNSigma);
  if (sigma > 0.0f && task.row.special == kNormal) {
    const float bound = round_up(sigma_bound<Logits>(shared, block, sigma));
    kept.lowest = fmaxf(kept.lowest, fminf(bound, task.largest));
  }
  if (load_f32(params + kParamMinP) > 0.0f) {
    const double offset = load_f64(params + kParamMinPOffset);
    kept.lowest = fmaxf(kept.lowest, round_down(static_cast<double>(task.largest) + offset));
  }
  const int top_k = params[kParamTopK];
  if (top_k > 0 && row_sums<Logits>(shared, block, kept, kAllKeys).number > top_k) {
    kept = row_cut<Logits>(shared, block, kept, top_k, true);
  }
  const float top_p = load_f32(params + kParamTopP);
  if (top_p < 1.0f) {
    const int64_t total = row_sums<Logits>(shared, block, kept, kAllKeys).mass;
    kept = row_cut<Logits>(shared, block, kept, target_of(top_p, total), false);
  }
  const float typical = load_f32(params + kParamTypicalP);
  if (typical < 1.0f) kept = row_typical<Logits>(shared, block, kept, typical);
  const float epsilon = load_f32(params + kParamEpsilonCutoff);
  if (epsilon > 0.0f) {
    const RowSums sums = row_sums<Logits>(shared, block, kept, kAllKeys);
    const double bound = static_cast<double>(epsilon) * (static_cast<double>(sums.mass) / kOne);
    kept = row_reaching<Logits>(shared, block, kept, bound);
  }
  const float eta = load_f32(params + kParamEtaCutoff);
  if (eta > 0.0f) {
    const RowSums sums = row_sums<Logits>(shared, block, kept, kAllKeys);
    const double mean = static_cast<double>(sums.moment) / static_cast<double>(sums.mass);
    const double wide = static_cast<double>(eta);
    const double bound =
        fmin(wide * (static_cast<double>(sums.mass) / kOne), sqrt(wide) * exp2_wide(mean));
    kept = row_reaching<Logits>(shared, block, kept, bound);
  }
  const RowSums sums = row_sums<Logits>(shared, block, kept, kAllKeys);
  const Drawn drawn = draw_from_row<Logits>(shared, block, kept, sums.mass);
  return {true, drawn, kept, sums.mass, static_cast<int>(sums.number)};
}

}  // namespace graphed_sampling
