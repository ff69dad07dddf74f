// Groups whose statistics the first pass cannot know: lists of tokens change their y, or they hold
// NaN or +inf.
#pragma once

#include "groups.h"

namespace graphed_sampling {

// Lists the ids that stop ids below min_tokens and bad words ban now, and lets the row know of
// them and of its biases.
__device__ inline __noinline__ void use_lists(Block& block) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const TableLayout& layout = shared.arguments.layout;
  auto* bans = const_cast<int32_t*>(task.row.bans);
  const int32_t* params = task.row.params;
  const int32_t* state = task.row.state;
  const int num_stop =
      state[kStateNumGenerated] < params[kParamMinTokens] ? params[kParamNumStop] : 0;
  for (int i = block.thread(); i < num_stop; i += kThreads) {
    bans[i] = params[layout.stop_ids() + i];
  }
  int count = num_stop;
  const int num_bad = params[kParamNumBadWords], length = layout.max_bad_word_length;
  for (int first = 0; first < num_bad; first += kThreads) {
    const int i = first + block.thread();
    const int32_t* word = params + layout.bad_words() + int64_t{i} * length;
    bool matches = i < num_bad;
    for (int j = 1; j < length && matches; ++j) {
      matches = word[j] == -1 || word[j] == state[kStateRecent + j - 1];
    }
    int number;
    const int place = count + block.sum_before(matches ? 1 : 0, &number);
    if (matches) bans[place] = word[0];
    count += number;
  }
  __syncthreads();
  if (block.thread() == 0) {
    task.row.num_bias = params[kParamNumBias];
    task.row.num_bans = count;
  }
  __syncthreads();
}

// A warp works out a group's statistics anew: lists change its y, or it holds what the first pass
// does not count with. Whether it holds NaN.
template <class Logits>
__device__ __noinline__ bool repair_group(Shared& shared, Block& block, int group) {
  Task& task = shared.task;
  const Row& row = task.row;
  const Wishes& wishes = task.wishes;
  float x[2], y[2];
  bool nan = false;
  const int first = token_of_group(group, 2 * block.lane());
  const uint32_t listed = listed_bits(row, first);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first + i;
    x[i] = y[i] = kNegInf;
    if (token < row.vocab) {
      const float logit = Logits::value(load_bits<Logits>(row, token));
      nan = nan || logit != logit;
      x[i] = sanitised(logit);
      y[i] = processed(row, x[i], token, (listed >> i & 1) != 0);
    }
  }
  float maximum = fmaxf(y[0], y[1]), raw_maximum = fmaxf(x[0], x[1]);
  for (int step = kWarp / 2; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, step));
    raw_maximum = fmaxf(raw_maximum, __shfl_xor_sync(kAllLanes, raw_maximum, step));
  }
  // Where the maximum is +inf the weights count its equals.
  const auto weight = [](float value, float largest, float scale) {
    if (value == kNegInf) return 0.0f;
    return value == largest ? 1.0f : ex2_approx(z_of(value, largest, scale));
  };
  float sum = weight(y[0], maximum, row.scale) + weight(y[1], maximum, row.scale);
  float raw_sum = weight(x[0], raw_maximum, kLog2E) + weight(x[1], raw_maximum, kLog2E);
  // Of a row that holds +inf nobody asks for moments.
  const float base = finite_or_zero(maximum);
  float moment = moment_of_one(y[0], base, row.scale) + moment_of_one(y[1], base, row.scale);
  for (int step = 1; step < kWarp; step *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, step);
    raw_sum += __shfl_xor_sync(kAllLanes, raw_sum, step);
    moment += __shfl_xor_sync(kAllLanes, moment, step);
  }
  __syncwarp();  // other lanes may have read what changes now
  if (block.lane() == 0) {
    task.at.maxima[group] = maximum;
    task.at.sums[group] = wishes.total ? sum : raw_sum;
    if (wishes.mean) task.at.moments[group] = moment;
    if (wishes.split) task.at.raw_maxima[group] = raw_maximum;
    if (wishes.split || wishes.both) task.at.raw_sums[group] = raw_sum;
  }
  return __any_sync(kAllLanes, nan) != 0;
}

// Whether the first pass's sums of raw weights are not to be used, by the largest of a row.
__device__ inline bool is_far(float largest) { return largest > kNegInf && largest < kFarLogit; }

// Repairs the groups that the first pass marked, or all. Whether there was NaN.
template <class Logits>
__device__ __noinline__ bool repair_groups(Shared& shared, Block& block, bool all) {
  Task& task = shared.task;
  bool nan = false;
  for (int first = block.warp() * kWarp; first < task.groups; first += kThreads) {
    const int group = first + block.lane();
    unsigned marked = __ballot_sync(
        kAllLanes, group < task.groups && (all || load_now(task.at.maxima + group) == kInf));
    for (; marked != 0; marked &= marked - 1) {
      nan = repair_group<Logits>(shared, block, first + __ffs(static_cast<int>(marked)) - 1) || nan;
    }
  }
  return __syncthreads_or(nan ? 1 : 0) != 0;
}

// Repairs the groups of the tokens that lists name.
template <class Logits>
__device__ __noinline__ void repair_listed(Shared& shared, Block& block) {
  Task& task = shared.task;
  const Row& row = task.row;
  const auto group_at = [&](int i) {
    return group_of(i < row.num_bias ? row.bias_ids[i] : row.bans[i - row.num_bias]);
  };
  const int named = row.num_bias + row.num_bans;
  for (int i = block.warp(); i < named; i += kWarps) {
    // A group that several tokens name is the first one's.
    const int group = group_at(i);
    bool before = false;
    for (int j = block.lane(); j < i; j += kWarp) before = before || group_at(j) == group;
    if (__any_sync(kAllLanes, before) == 0) repair_group<Logits>(shared, block, group);
  }
  __syncthreads();
}

}  // namespace graphed_sampling
