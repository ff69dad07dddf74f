// From a row's statistics to its token: what a block needs of a row before it streams it, and how
// it finishes it.
#pragma once

#include <algorithm>

#include "usual.h"

namespace graphed_sampling {

constexpr int kBlocksOfMultiprocessor = 2;
// So many rows leave the memory system idle: one that was read for nothing costs nobody anything.
constexpr int kFewRows = 8;

// Rows up to which a row is read by so many blocks of a cluster.
struct Step {
  int rows, blocks;
};
constexpr Step kClusters[] = {{16, 8}, {56, 4}, {128, 2}, {1 << 30, 1}};

inline int blocks_of_cluster(int rows, int most_blocks) {
  for (const Step& step : kClusters) {
    if (rows <= step.rows) return std::min(step.blocks, most_blocks);
  }
  return 1;
}

GS_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Of a row, in words of scratch: how many of its blocks are through, 0 between steps, and by which
// way it went in its last one; the statistics; for flat rows masses of groups, and
// tokens around the cut, which smaller vocabularies do not need; and the ids that are banned now.
struct ScratchLayout {
  static constexpr int kTicket = 0, kWay = 1, kHeader = 32;
  int groups, masses, bracket, bans, words;

  GS_HOST_DEVICE explicit ScratchLayout(const TableLayout& layout)
      : groups(groups_of(layout.vocab_size)),
        masses(kHeader + kStatistics * groups),
        bracket(masses + 2 * groups),
        bans(bracket + (layout.vocab_size > kListed ? 2 * kBracketed : 0)),
        words(ceil_div(bans + layout.max_stop_ids + layout.max_bad_words, 32) * 32) {}
};

// The lowest id that the grammar bitmask allows; 0 without one, or if it allows none.
__device__ inline __noinline__ int fallback_id(Shared& shared, Block& block) {
  Task& task = shared.task;
  uint64_t lowest = ~uint64_t{0};
  if ((task.row.checks & kCheckGrammar) != 0) {
    for (int token = block.thread(); token < task.row.vocab; token += kThreads) {
      if (bit_of(task.row.grammar, token)) {
        lowest = static_cast<uint64_t>(token);
        break;
      }
    }
  }
  lowest = block.min_bits(lowest);
  return lowest == ~uint64_t{0} ? 0 : static_cast<int>(lowest);
}

// A row's filters and draw from its groups' statistics. Not complete where that takes passes over
// the whole row.
template <class Logits>
__device__ inline Selection select_from_groups(Shared& shared, Block& block, const float* maxima,
                                               bool flat) {
  Task& task = shared.task;
  const Row& row = task.row;
  const int32_t* params = row.params;
  Selection selection = {};
  if (row.has(kGreedy)) {
    const int token = first_maximum<Logits>(shared, block, maxima);
    return {true,
            {token, task.largest},
            {task.largest, task.largest, token},
            int64_t{1} << kMassBits,
            1};
  }
  const float top_p = load_f32(params + kParamTopP);
  const float typical = load_f32(params + kParamTypicalP);
  const float epsilon = load_f32(params + kParamEpsilonCutoff);
  const float eta = load_f32(params + kParamEtaCutoff);
  const float sigma = load_f32(params + kParamTopNSigma);
  const int top_k = params[kParamTopK];
  const bool later = typical < 1.0f || epsilon > 0.0f || eta > 0.0f;
  const bool bracketed = has_bracket(row);
  float bound = -kFltMax;
  double mean = 0.0, z_bound = -1e300;
  if (task.wishes.total) {
    if (top_p >= 1.0f && !later) {
      const Kept all = {task.largest, kNegInf, row.vocab};
      const auto maximum_at = [&](int group) { return load_now(task.at.maxima + group); };
      const auto mass_at = [&](int group) {
        return group_mass(maximum_at(group), load_now(task.at.sums + group), task.largest,
                          row.scale);
      };
      const Drawn drawn =
          draw_from_groups<Logits>(shared, block, all, task.total, mass_at, maximum_at);
      return {true, drawn, all, task.total, 0};
    }
    if (task.wishes.mean) mean = mean_of_groups(shared, block);
    if (top_p < 1.0f) {
      if (flat) return selection;
      if (!nucleus_bound(shared, block, maxima, top_p, &bound)) {
        if (later || !bracketed) return selection;
        return select_from_bracket<Logits>(shared, block, top_p, task.total, -kFltMax);
      }
    } else {
      float z;
      if (typical < 1.0f) {
        z = mass_bound(shared, block, maxima, 1.0f - typical, static_cast<float>(mean));
      } else {
        const float cutoff = epsilon > 0.0f ? epsilon : eta;
        z = lg2_approx(cutoff) +
            lg2_approx(static_cast<float>(static_cast<double>(task.total) / kOne));
        if (epsilon <= 0.0f) z = fminf(z, 0.5f * lg2_approx(cutoff) + static_cast<float>(mean));
        z -= 0.001f;
      }
      z_bound = static_cast<double>(fminf(z, 0.0f));
      const double scale = load_f64(params + kParamWideScale);
      bound = fmaxf(bound, round_down(static_cast<double>(task.largest) + z_bound / scale));
    }
  } else {
    if (load_f32(params + kParamMinP) > 0.0f) {
      const double offset = load_f64(params + kParamMinPOffset);
      bound = fmaxf(bound, round_down(static_cast<double>(task.largest) + offset));
    }
    if (sigma > 0.0f) {
      const float least = fminf(round_up(sigma_bound<Logits>(shared, block, sigma)), task.largest);
      if (block.thread() == 0) task.sigma_bound = least;
      bound = fmaxf(bound, least);
    }
    if (top_k > 0 && top_k <= kMaxListedTopK) {
      bound = fmaxf(bound, top_bound(shared, block, maxima, task.largest, top_k));
    }
  }
  const int listed = list_groups(shared, block, maxima, bound);
  int count = kListed + 1;
  if (listed <= kListedGroups) count = list_candidates<Logits>(shared, block, row, listed, bound);
  if (count > kListed) {
    if (later || !bracketed || top_k > 0) return selection;
    if (task.wishes.total) {
      return select_from_bracket<Logits>(shared, block, top_p, task.total, -kFltMax);
    }
    if (top_p >= 1.0f) return select_above<Logits>(shared, block, bound);
    const int64_t total = collect<Logits>(shared, block, bound, bound).mass;
    return select_from_bracket<Logits>(shared, block, top_p, total, bound);
  }
  selection = filter_list(shared, block, count, task.wishes.total, mean, z_bound);
  if (!selection.complete && task.wishes.total && !later && bracketed) {
    return select_from_bracket<Logits>(shared, block, top_p, task.total, -kFltMax);
  }
  return selection;
}

// Finishes a row that `finish_usual` has found to be flat. False, with nothing changed that counts,
// where its bracket does not hold the cut.
template <class Logits>
__device__ __noinline__ bool finish_flat() {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const Wishes wishes = task.wishes;
  Block block = {0};
  __syncthreads();
  const Owned owned(task.groups, block.thread());
  const float* maxima = the_statistics();
  const float* sums = maxima + task.groups;
  // Of a row with lists the usual way has left them, before its statistics became those of y.
  if (wishes.raw && !task.row.has(kLists)) {
    leave_parts(shared, block, owned, wishes.split ? task.at.raw_maxima : maxima,
                wishes.split || wishes.both ? task.at.raw_sums : sums, task.raw_largest);
  }
  const int64_t total = block.sum(mass_of_owned(owned, maxima, sums, task.largest, task.row.scale));
  if (block.thread() == 0) {
    task.word = draw_word();
    task.total = total;
  }
  if (block.thread() == kWarp && wishes.raw) shared.raw_log = log_of_parts(shared);
  Selection selection = select_from_bracket<Logits>(
      shared, block, load_f32(task.header + kParamTopP), total, -kFltMax);
  if (!selection.complete) return false;
  keep_in_row<Logits>(task.row, &selection);
  Ending(shared).report<Logits>(shared, block, selection, 0);
  return true;
}

// Finishes any row. flat: its bracket has been tried.
template <class Logits>
__device__ __noinline__ void finish_other(bool flat) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  Block block = {0};
  const bool lists = task.row.has(kLists);
  const bool streams = is_lowered(task) || (lists && !task.wishes.split);
  __syncthreads();
  if (block.thread() == 0) {
    task.word = draw_word();
    task.row.num_bias = task.row.num_bans = 0;
    task.raw_known = false;
  }
  if (streams) {
    // Raw statistics are kept apart, for which the row is streamed once more.
    __syncthreads();
    if (block.thread() == 0) task.wishes = wishes_of(task.row.flags, true, task.row.scale);
    __syncthreads();
    const int tiles = task.groups / kGroupsOfTile;
    stream_checked_tiles<Logits>(task.row, task.wishes, block.warp(), kWarps, tiles,
                                 tiles_to_load<Logits>(task.row), block.lane(), task.at);
    __syncthreads();
  }
  if (lists) use_lists(block);
  Totals totals = total_statistics(shared, block);
  int row_flags = 0;
  const Wishes& wishes = task.wishes;
  bool all = wishes.split && is_far(largest_of(shared, block, task.at.raw_maxima));
  if (totals.largest == kInf || all) {
    if (repair_groups<Logits>(shared, block, all)) row_flags |= kRowNan;
    totals = total_statistics(shared, block);
  }
  // What the largest is may only be known now.
  const auto repair_far = [&] {
    if (all || !is_far(totals.largest)) return;
    all = true;
    repair_groups<Logits>(shared, block, true);
    totals = total_statistics(shared, block);
  };
  repair_far();
  if (lists) {
    if (!all) repair_listed<Logits>(shared, block);
    totals = total_statistics(shared, block);
    repair_far();
  }
  const float largest = totals.largest;
  const bool special = largest == kInf || largest == kNegInf;
  if (largest == kInf) row_flags |= kRowPosInf;
  if (largest == kNegInf) row_flags |= kRowEmpty;
  const int fallback = largest == kNegInf ? fallback_id(shared, block) : 0;
  if (block.thread() == 0) {
    task.row.special = largest == kInf      ? kPositiveInfinity
                       : largest == kNegInf ? kEmptyRow
                                            : kNormal;
    task.row.fallback = fallback;
    task.largest = special ? 0.0f : largest;
    task.total = totals.mass;
  }
  __syncthreads();
  Selection selection = {};
  if (!special) selection = select_from_groups<Logits>(shared, block, task.at.maxima, flat);
  if (block.thread() == 0) *task.way = selection.complete ? kByLists : kBySurveys;
  if (!selection.complete) selection = select_from_row<Logits>(shared, block);
  keep_in_row<Logits>(task.row, &selection);
  Ending(shared).report<Logits>(shared, block, selection, row_flags);
}

// Of a row whose logits bound its y: more groups where the first ones are not enough.
template <class Logits>
__device__ __noinline__ Outcome finish_lowered() {
  const Task& task = the_shared().task;
  const int most = most_reached(task.groups);
  int reached = first_reached(task.row.flags, task.header[kParamTopK]);
  for (;;) {
    const Outcome outcome = finish_usual<Logits, true>(reached);
    if (outcome != Outcome::kFew || reached == most) return outcome;
    reached = min(4 * reached, most);
  }
}

// From a row's statistics to its token and its next state. Functions of their own: what the rarer
// ones keep in registers costs the others none.
template <class Logits>
__device__ inline void finish_row() {
  const bool lowered = is_lowered(the_shared().task);
  const Outcome outcome = lowered ? finish_lowered<Logits>() : finish_usual<Logits, false>();
  if (outcome == Outcome::kFinished) return;
  if (outcome == Outcome::kFlat && finish_flat<Logits>()) return;
  finish_other<Logits>(outcome == Outcome::kFlat);
}

// Whether the step has a grammar bitmask: asked for early, and used by `has_grammar` when it is
// there.
__device__ inline int32_t ask_for_grammar(const StepArguments& a) {
  if (a.grammar_bitmask == nullptr) return 0;
  return a.given == nullptr ? 1 : a.given[0];
}

// By a whole warp. A shuffle: a comparison would be made, and waited for, before anything else is
// asked for.
__device__ inline bool has_grammar(int32_t asked) { return __shfl_sync(kAllLanes, asked, 0) != 0; }

// What the first pass over a row leaves. parameter(word): of the header, for a whole warp.
template <class Parameter>
__device__ inline Wishes first_wishes(const TableLayout& layout, bool grammar,
                                      Parameter parameter) {
  const int flags = parameter(kParamFlags);
  // Lists change few groups, whose statistics are worked out anew when the raw ones have done their
  // work; but not where those are needed again later.
  const bool raw_again = parameter(kParamTopLogprobs) > 0 || (flags & kRank) != 0;
  bool split =
      (flags & (kAllowed | kPenalties)) != 0 || grammar || ((flags & kLists) != 0 && raw_again);
  if ((flags & kLowered) != 0 && !grammar) {
    // The raw statistics are enough, see `finish_usual`.
    const int groups = groups_of(layout.vocab_size);
    split = groups > kSharedGroups ||
            first_reached(flags, parameter(kParamTopK)) > most_reached(groups);
  }
  return wishes_of(flags, split, __int_as_float(parameter(kParamScale)));
}

// What processing a row takes, but for what changes while it is finished.
__device__ inline Row make_row(const StepArguments& a, const Source& source, int index, int slot,
                               bool grammar, int flags, float scale) {
  Row row = {};
  static_cast<Source&>(row) = source;
  row.params = a.params + int64_t{slot} * a.layout.params_words();
  row.state = a.state + int64_t{slot} * a.layout.state_words();
  row.flags = flags;
  row.special = kNormal;
  row.scale = scale;
  const int64_t bitmap = int64_t{slot} * a.layout.bitmap_words();
  if (grammar) {
    row.checks |= kCheckGrammar;
    row.grammar =
        reinterpret_cast<const uint8_t*>(a.grammar_bitmask + index * a.grammar_bitmask_stride);
  }
  if (row.has(kAllowed)) {
    row.checks |= kCheckAllowed;
    row.allowed = reinterpret_cast<const uint8_t*>(a.tables + bitmap);
  }
  if (row.has(kPenalties)) {
    row.checks |= kCheckPenalties;
    row.prompt = reinterpret_cast<const uint8_t*>(a.tables + a.layout.prompt_bits() + bitmap);
    row.output = reinterpret_cast<const uint8_t*>(a.tables + a.layout.output_bits() + bitmap);
    row.counts = a.tables + a.layout.counts() + int64_t{slot} * a.layout.vocab_size;
  }
  row.bias_ids = row.params + a.layout.bias_ids();
  row.bias_values = row.params + a.layout.bias_values();
  return row;
}

// Lets the block know of the arguments: the last warp does.
__device__ inline void keep_arguments(const StepArguments& a) {
  if (threadIdx.x == kThreads - kWarp) the_shared().arguments = a;
}

// Lets the block know of its row. Behind it there is no barrier yet. A lane has a word each of the
// header of the parameters, and of the state. Warps share the work: whoever does some of it waits
// for one instruction after the other.
__device__ inline void begin_task(const StepArguments& a, const Source& source,
                                  const ScratchLayout& scratch, const Wishes& wishes,
                                  const Statistics& at, int32_t header, int32_t state_word,
                                  int index, int slot, bool grammar, bool in_shared, int blocks,
                                  int streamers) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int flags = __shfl_sync(kAllLanes, header, kParamFlags);
  const float scale = __int_as_float(__shfl_sync(kAllLanes, header, kParamScale));
  shared.bins[threadIdx.x] = 0;  // for `finish_usual`, in front of the barrier before it
  if (threadIdx.x / kWarp == 0) {
    task.header[lane] = header;
    if (lane < kStateRecent) task.state[lane] = state_word;
  }
  if (threadIdx.x == kWarp) {
    task.row = make_row(a, source, index, slot, grammar, flags, scale);
    task.row.bans = a.scratch + int64_t{index} * scratch.words + scratch.bans;
  }
  if (threadIdx.x == 2 * kWarp) {
    task.raw_row = make_row(a, source, index, slot, grammar, flags, scale);
    task.raw_row.bans = a.scratch + int64_t{index} * scratch.words + scratch.bans;
    task.raw_row.checks = 0;
  }
  if (threadIdx.x == 3 * kWarp) {
    int32_t* row_scratch = a.scratch + int64_t{index} * scratch.words;
    task.wishes = wishes;
    task.at = at;
    task.masses = reinterpret_cast<int64_t*>(row_scratch + scratch.masses);
    task.bracket_y = reinterpret_cast<float*>(row_scratch + scratch.bracket);
    task.way = row_scratch + ScratchLayout::kWay;
    task.bracket_ids = row_scratch + scratch.bracket + kBracketed;
    task.groups = scratch.groups;
    task.in_shared = in_shared;
    task.blocks = blocks;
    task.streamers = streamers;
    shared.request.pass = Pass::kNone;
    task.index = index;
    task.slot = slot;
  }
}

}  // namespace graphed_sampling
