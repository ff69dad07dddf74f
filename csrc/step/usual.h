// How most rows end: one short list, and filters, draw and report by a single warp. What a row
// waits for here is one instruction after the other, half of the time for its coming from memory,
// so there are few, in loops, and few barriers.
#pragma once

#include "../common/philox.h"
#include "../sample_step.h"
#include "dense.h"
#include "repair.h"
#include "report.h"

namespace graphed_sampling {

constexpr int kShortList = kThreads;
constexpr int kFetchedAhead = 128;  // tokens of a list
constexpr int kManyGroups = 192;    // that a nucleus reaches
constexpr int kThreadBits = 8;
static_assert(kThreads == 1 << kThreadBits);

// Evenly spaced places from `high` down, the bins of a histogram.
struct Scale {
  float slope, offset;

  __device__ Scale(float low, float high)
      : slope(static_cast<float>(kBins) / (high - low)), offset(high * slope) {}
  // Never rises with the value.
  __device__ int bin(float value) const {
    return min(static_cast<int>(fmaxf(__fmaf_rn(-value, slope, offset), 0.0f)), kBins - 1);
  }
};

// The bin in which what lies in the bins before it and in it reaches `needed`; kBins if all of them
// do not. Every warp finds it by itself.
__device__ inline int reaching_bin(const uint32_t (&bins)[kBins], uint32_t needed, int lane) {
  constexpr int kEach = kBins / kWarp;
  static_assert(kEach == 8);
  const auto* of_lane = reinterpret_cast<const uint4*>(bins) + 2 * lane;
  const uint4 lower = of_lane[0], upper = of_lane[1];
  const uint32_t mine[kEach] = {lower.x, lower.y, lower.z, lower.w,
                                upper.x, upper.y, upper.z, upper.w};
  uint32_t number = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) number += mine[i];
  const auto up_to = static_cast<uint32_t>(sum_up_to_lane(static_cast<int>(number), lane));
  const unsigned reaching = __ballot_sync(kAllLanes, up_to >= needed);
  if (reaching == 0) return kBins;
  uint32_t before = up_to - number;
  int place = 0;
#pragma unroll
  for (int i = 0; i < kEach - 1; ++i) {
    before += mine[i];
    if (before < needed) place = i + 1;
  }
  const int of = __ffs(static_cast<int>(reaching)) - 1;
  return of * kEach + __shfl_sync(kAllLanes, place, of);
}

// How many of a short list's tokens come before each, by (y descending, id ascending), into
// shared.bins, which are 0 before. The list goes on with -inf to a multiple of 32.
__device__ inline void rank_short_list(Shared& shared, int count) {
  const int thread = static_cast<int>(threadIdx.x);
  // Several threads share a token; those of a warp compare with the same others, 4 at a time.
  int bits = 5;
  while (1 << bits < count) ++bits;
  const int size = 1 << bits, mine = thread & (size - 1), part = thread >> bits;
  const int each = size >> (kThreadBits - bits);
  if (mine >= count) return;
  const float y = shared.list_y[mine];
  // Of the tokens behind it in the list those above it count, of the ones before it the equals too.
  const float above_y = from_key(key_of(y) + 1);
  uint32_t above = 0;
#pragma unroll 1
  for (int i = part * each; i < min((part + 1) * each, count); i += 4) {
    const Vector others(shared.list_y + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) above += others[j] >= (i + j < mine ? y : above_y) ? 1 : 0;
  }
  if (bits == kThreadBits) {
    shared.bins[mine] = above;
  } else if (above > 0) {
    atomicAdd(&shared.bins[mine], above);
  }
}

// top_k, top_p and the draw on a short list, by one warp. ranked: whether shared.bins has ranks.
// of_total: top_p is of this total, or, 0, of the list's own.
template <int kEach>
__device__ __noinline__ Selection draw_from_short_list(int count, bool ranked, int top_k,
                                                       float top_p, int64_t of_total) {
  Shared& shared = the_shared();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t masses[kEach];
  int ranks[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = lane * kEach + i;
    masses[i] = at < count ? shared.list_masses[at] : 0;
    ranks[i] = ranked && at < count ? static_cast<int>(shared.bins[at]) : at;
  }
  Selection selection = {};
  selection.complete = true;
  selection.num_kept = top_k > 0 && top_k < count ? top_k : count;
  if (top_p < 1.0f) {
    // In their order.
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane * kEach + i < count) shared.sorted_masses[ranks[i]] = masses[i];
    }
    __syncwarp();
    int64_t sorted[kEach], mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane * kEach + i;
      sorted[i] = at < selection.num_kept ? shared.sorted_masses[at] : 0;
      mine += sorted[i];
    }
    const int64_t up_to = sum_up_to_lane(mine, lane);
    const int64_t inside = of_lane(up_to, kWarp - 1);
    const int64_t target = target_of(top_p, of_total > 0 ? of_total : inside);
    selection.complete = inside >= target;
    int64_t before = up_to - mine;
    int within = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      within += lane * kEach + i < selection.num_kept && before < target ? 1 : 0;
      before += sorted[i];
    }
    selection.num_kept = __reduce_add_sync(kAllLanes, within);
  }
  int64_t mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (ranks[i] >= selection.num_kept) masses[i] = 0;
    mine += masses[i];
  }
  const int64_t up_to = sum_up_to_lane(mine, lane);
  selection.total = of_lane(up_to, kWarp - 1);
  const int64_t position = position_of(shared.task.word, selection.total);
  const int of = __popc(__ballot_sync(kAllLanes, up_to <= position));
  int64_t before = up_to - mine;
  int place = 0;
#pragma unroll
  for (int i = 0; i < kEach - 1; ++i) {
    before += masses[i];
    if (before <= position) place = i + 1;
  }
  const int drawn = of * kEach + __shfl_sync(kAllLanes, place, of);
  selection.drawn = {shared.list_ids[drawn], shared.list_y[drawn]};
  selection.kept = {shared.task.largest, shared.task.largest, 0};
  if (shared.task.row.has(kProcessed)) {
    // The highest and the lowest of what is kept.
    uint64_t least = ~uint64_t{0}, greatest = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane * kEach + i;
      if (at < count && ranks[i] < selection.num_kept) {
        const uint64_t order = order_of(shared.list_y[at], shared.list_ids[at]);
        least = order < least ? order : least;
        greatest = order > greatest ? order : greatest;
      }
    }
    least = ~max_of_lanes(~least);
    selection.kept = {y_of_order(max_of_lanes(greatest)), y_of_order(least), id_of_order(least)};
  }
  return selection;
}

// The word of a row's draw.
__device__ inline __noinline__ uint64_t draw_word() {
  const Shared& shared = the_shared();
  const Task& task = shared.task;
  const StepArguments& a = shared.arguments;
  const bool given = a.words != nullptr && (a.given == nullptr || a.given[1] != 0);
  return given ? static_cast<uint64_t>(a.words[task.index])
               : philox_word(static_cast<uint64_t>(load_i64(task.header + kParamSeed)),
                             static_cast<uint64_t>(load_i64(task.state + kStatePosition)), 0);
}

// Of a row whose statistics are wrong, what is drawn may be no token; then it is another one.
template <class Logits>
__device__ inline void keep_in_row(const Row& row, Selection* selection) {
  if constexpr (Logits::kInformed) {
    int& token = selection->drawn.token;
    if (static_cast<unsigned>(token) >= static_cast<unsigned>(row.vocab)) token = 0;
  }
}

// What the end of a row is written to, and what is asked for ahead: the thread's one of its stop
// ids, and of its recent tokens the one before the lane's.
struct Ending {
  int32_t* out;
  SeenTables tables;
  int stop, before;

  __device__ explicit Ending(const Shared& shared) : tables() {
    const StepArguments& a = shared.arguments;
    const Task& task = shared.task;
    const int thread = static_cast<int>(threadIdx.x);
    out = a.output + int64_t{task.index} * a.layout.output_words();
    stop = thread < task.header[kParamNumStop] ? task.row.params[a.layout.stop_ids() + thread] : -1;
    before = thread < kWarp
                 ? ask_for_recent(task.row.state + kStateRecent, a.layout.recent_tokens(), thread)
                 : 0;
    if (a.layout.penalties) {
      tables.bits =
          a.tables + a.layout.output_bits() + int64_t{task.slot} * a.layout.bitmap_words();
      tables.counts = a.tables + a.layout.counts() + int64_t{task.slot} * a.layout.vocab_size;
    }
  }
  template <class Logits>
  __device__ void report(Shared& shared, Block& block, const Selection& selection,
                         int row_flags) const {
    graphed_sampling::report<Logits>(shared, block, shared.arguments.layout, out, tables, selection,
                                     row_flags, stop, before);
  }
};

// What has become of a row that might have been a usual one. kFlat: its nucleus is for a bracket.
// kFew: too few of its tokens reach the bound.
enum class Outcome { kFinished, kFlat, kFew, kOther };

// Finishes a row of whole pieces in which y is the logit and of which many groups are listed, none
// of whose filters is top_k. total: of all tokens, where that matters.
template <class Logits>
__device__ __noinline__ Outcome finish_many(int groups, float bound, float top_p, int64_t total) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const Row& row = task.row;
  const Wishes& wishes = task.wishes;
  Block block = {0};
  const Ending ending(shared);
  const int thread = block.thread();
  const auto meanwhile = [&] {
    if (thread == kThreads - 1) {
      task.word = draw_word();
      task.total = total;
    }
    // Of a row with lists, even empty ones, they have been left; of no other one is y split.
    if (wishes.raw && !row.has(kLists)) {
      leave_parts(shared, block, Owned(task.groups, thread), task.at.maxima,
                  wishes.both ? task.at.raw_sums : task.at.sums, task.raw_largest);
    }
  };
  const int listed = list_many_candidates<Logits>(shared, block, row, groups, bound, meanwhile);
  if (wishes.raw && thread == kThreads - 1) shared.raw_log = log_of_parts(shared);
  if (listed > kListed) return wishes.total ? Outcome::kFlat : Outcome::kOther;
  Selection selection = {};
  selection.complete = true;
  if (!draw_from_long_list(shared, block, listed, top_p, total, &selection)) return Outcome::kOther;
  if (!selection.complete) return Outcome::kOther;
  keep_in_row<Logits>(row, &selection);
  ending.report<Logits>(shared, block, selection, 0);
  return Outcome::kFinished;
}

// Finishes a row, if it turns out to be a usual one; else it has changed nothing that counts.
//
// kLowered: of a row with penalties that raise no y, and of which a few best tokens count. Its
// statistics are the raw ones: in groups that do not reach a bound no token does. So the best
// groups are read, `reached` of them and equals, and do if enough of their y reach what these do.
template <class Logits, bool kLowered>
__device__ __noinline__ Outcome finish_usual(int reached = 0) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const Row& row = task.row;
  Block block = {0};
  const Ending ending(shared);
  const Wishes wishes = task.wishes;
  const int32_t* header = task.header;
  const int thread = block.thread(), lane = block.lane();
  const bool greedy = row.has(kGreedy);
  const bool only_best = kLowered && greedy;
  const int top_k = only_best ? 1 : header[kParamTopK], top_n = header[kParamTopLogprobs];
  const float top_p = only_best ? 1.0f : load_f32(header + kParamTopP);
  const float min_p = kLowered ? 0.0f : load_f32(header + kParamMinP);
  const int most = kLowered ? reached : top_k > 0 ? max(top_k, top_n) : 0;
  if constexpr (!kLowered) {
    const bool other_filters =
        load_f32(header + kParamTypicalP) < 1.0f || load_f32(header + kParamEpsilonCutoff) > 0.0f ||
        load_f32(header + kParamEtaCutoff) > 0.0f || load_f32(header + kParamTopNSigma) > 0.0f;
    if (!task.in_shared || most > kShortList || (other_filters && !greedy)) {
      return Outcome::kOther;
    }
  }

  const Owned owned(task.groups, thread);
  const float* maxima = the_statistics();
  const float* sums = maxima + task.groups;
  float mine = kNegInf, mine_raw = kNegInf;
  const float* raw_maxima = wishes.split ? task.at.raw_maxima : maxima;
  const float* raw_sums = wishes.split || wishes.both ? task.at.raw_sums : sums;
  const bool unfiltered = wishes.total && top_p >= 1.0f;
  if (unfiltered && thread == kThreads - 1) task.word = draw_word();
  // Greedy rows want to know which group has the largest: the first one. For others, no fewer
  // maxima than a list is for are not below the lowest of some, if there are so many.
  Range range;
  int first_group = 0;
  const auto take_best = [&] {
    const BestOfWarps& of_row = shared.best;
    uint64_t best = 0;
    int lowest = key_of(kInf);
#pragma unroll
    for (int i = lane; i < kMostStreamers; i += kWarp) {
      if (i >= task.streamers) continue;
      const uint64_t other = of_row.orders[i];
      best = other > best ? other : best;
      lowest = min(lowest, of_row.lowest[i]);
    }
    best = max_of_lanes(best);
    range = {from_key(__reduce_min_sync(kAllLanes, lowest)), y_of_order(best)};
    first_group = id_of_order(best);
  };
  const auto find_largest = [&] {
    int at = 0;
    mine = kNegInf;
    owned.each([&](int, int group) {
      const float largest_of_four = Vector(maxima + group).largest();
      at = largest_of_four > mine ? group : at;
      mine = fmaxf(mine, largest_of_four);
    });
    if (greedy && !kLowered) {
      const Vector maximum(maxima + at);
#pragma unroll
      for (int j = 3; j >= 0; --j) first_group = maximum[j] == mine ? at + j : first_group;
      const uint64_t best = block.max_bits(order_of(mine, first_group));
      range.high = y_of_order(best);
      first_group = id_of_order(best);
    } else {
      range = block.range(mine > kNegInf ? mine : kInf, mine);
    }
  };
  const int streamers = min(task.streamers, task.groups / kGroupsOfTile);
  if (streamers == 0 || most > streamers * (kWarp / 2)) {
    find_largest();
  } else {
    take_best();
  }
  float raw_largest = range.high;
  if (wishes.raw && wishes.split) {
    owned.each([&](int, int group) {
      mine_raw = fmaxf(mine_raw, vector_now(raw_maxima + group).largest());
    });
    raw_largest = block.max(mine_raw);
  }
  // Not without tokens, and not with infinities.
  if (!(fabsf(range.high) < kInf)) return Outcome::kOther;

  // Each warp's part of the raw weights: they are added up when they are asked for. Where nothing
  // is read but tokens that may be drawn, that is done while these come.
  const bool raw_later = wishes.raw && !unfiltered && !row.has(kLists);
  if (wishes.raw && !raw_later) {
    leave_parts(shared, block, owned, raw_maxima, raw_sums, raw_largest);
  }
  if (row.has(kLists)) {
    // From here on the statistics are those of y.
    use_lists(block);
    repair_listed<Logits>(shared, block);
    find_largest();
  }
  const float largest = range.high;  // of y, or a bound of it
  const Exponents exponents = {largest, row.scale};
  const bool usual = fabsf(largest) < kInf && !is_far(fminf(largest, raw_largest));
  if (!usual || exponents.wide()) return Outcome::kOther;
  if (thread == 0) {
    task.largest = largest;
    task.raw_largest = raw_largest;
    task.raw_known = wishes.raw;
    *task.way = kByLists;
  }

  Selection selection = {};
  int listed = 0;
  if (greedy && !kLowered) {
    // All warps look for it, so that none waits for another when its tokens are on their way.
    const int window = first_group / kGroupsOfWindow;
    const int token = first_in_window<Logits>(row, window, largest, lane, [&] {
      if (raw_later) leave_parts(shared, block, owned, raw_maxima, raw_sums, raw_largest);
    });
    __syncthreads();
    if (thread == 0 && wishes.raw) shared.raw_log = log_of_parts(shared);
    __syncwarp();
    selection = {true, {token, largest}, {largest, largest, token}, int64_t{1} << kMassBits, 1};
  } else if (unfiltered) {
    const int64_t mass = mass_of_owned(owned, maxima, sums, largest, row.scale);
    int64_t total;
    int64_t before = block.sum_before(mass, &total);
    const int64_t position = position_of(task.word, total);
    if (before <= position && position < before + mass) {
      bool found = false;
      owned.each([&](int, int group) {
#pragma unroll 1
        for (int j = 0; j < 4; j += kGroupsOfWindow) {
          int64_t of_window = 0;
#pragma unroll
          for (int i = 0; i < kGroupsOfWindow; ++i) {
            of_window += group_mass(maxima[group + j + i], sums[group + j + i], largest, row.scale);
          }
          if (!found && position < before + of_window) {
            found = true;
            shared.drawn_window = {(group + j) / kGroupsOfWindow, before, of_window};
          }
          before += of_window;
        }
      });
    }
    // Beside the search for the window.
    if (thread == kThreads - 1 && wishes.raw) shared.raw_log = log_of_parts(shared);
    __syncthreads();
    const Kept all = {largest, kNegInf, row.vocab};
    if (block.warp() == 0) {
      const DrawnWindow& window = shared.drawn_window;
      const int group = window.window * kGroupsOfWindow;
      const float base = fmaxf(maxima[group], maxima[group + 1]);
      const Drawn drawn = draw_in_window<Logits>(task, all, total, window, base, lane);
      selection = {true, drawn, all, total, 0};
    }
  } else {
    float bound = -kFltMax;  // y of what the filters keep reaches it
    int64_t total = 0;       // where the mass of all tokens matters
    if (min_p > 0.0f) {
      const double offset = load_f64(header + kParamMinPOffset);
      bound = fmaxf(bound, round_down(static_cast<double>(largest) + offset));
    }
    float wider = bound;  // the same, of rows of which many groups reach that
    if (wishes.total || top_k > 0) {
      float low = range.low, unit = 0.0f;
      uint32_t needed = static_cast<uint32_t>(most), needed_wider = needed;
      if (wishes.total) {
        const float of_largest = block.total(weight_of_owned(owned, maxima, sums, exponents));
        total = static_cast<int64_t>(of_largest * static_cast<float>(kOne));
        // Weights of groups in units of 2**-30 of the total, none rounded up. Groups below the
        // bound may hold 13/16 of what top_p leaves out, and half of it where they are many; the
        // rest is for tokens below it in others.
        unit = 1073741824.0f / of_largest;
        const float left_out = (1.0f - top_p) * 1073741824.0f;
        needed = static_cast<uint32_t>(1073741824.0f - left_out * 0.8125f) + 1;
        needed_wider = static_cast<uint32_t>(1073741824.0f - left_out * 0.5f) + 1;
        const float tokens = static_cast<float>(task.groups * kGroup);
        const float start =
            fminf(lg2_approx(of_largest * fmaxf(1.0f - top_p, 1e-6f) / tokens) - 1.0f, -1.0f);
        low = largest + start / row.scale;
      }
      // Where all maxima are equal there is one bin.
      low = fminf(low, largest - fabsf(largest) * 1e-5f - 1e-30f);
      const Scale scale(low, largest);
      owned.each([&](int, int group) {
        const Vector maximum(maxima + group);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!(maximum[j] >= low)) continue;
          uint32_t weight = 1;
          if (wishes.total) {
            weight = static_cast<uint32_t>(sums[group + j] *
                                           ex2_approx(exponents.narrow_z(maximum[j])) * unit);
          }
          atomicAdd(&shared.bins[scale.bin(maximum[j])], weight);
        }
      });
      __syncthreads();
      // A little below a bin's end, so that all that it counted reaches it.
      const auto end_of = [&](int bin) {
        const float end = largest - static_cast<float>(bin + 1) / scale.slope;
        return end - (largest - low + fabsf(largest)) * 1e-6f;
      };
      const int last = reaching_bin(shared.bins, needed, lane);
      if (last == kBins) return Outcome::kOther;
      bound = fmaxf(bound, end_of(last));
      wider = bound;
      if (wishes.total) {
        const int wider_last = reaching_bin(shared.bins, needed_wider, lane);
        wider = wider_last < kBins ? end_of(wider_last) : bound;
      }
    }
    uint32_t reaching = 0;
    int groups, place;
    const auto find_reaching = [&] {
      reaching = 0;
      owned.each([&](int i, int group) {
        const Vector maximum(maxima + group);
#pragma unroll
        for (int j = 0; j < 4; ++j) reaching |= (maximum[j] >= bound ? 1u : 0u) << (4 * i + j);
      });
      place = block.sum_before(__popc(reaching), &groups);
    };
    find_reaching();
    if (groups > kManyGroups && wider < bound) {
      bound = wider;
      find_reaching();
    }
    shared.bins[thread] = 0;
    const bool in_list = groups <= kListedGroups;
    const bool many = !kLowered && top_k == 0 && groups > kManyGroups && row.plain() &&
                      is_in_whole_pieces<Logits>(row);
    if (in_list) {
      const uint32_t all = reaching;
      for (; reaching != 0; reaching &= reaching - 1, ++place) {
        const int number = __ffs(static_cast<int>(reaching)) - 1;
        shared.group_list[place] = ListedGroup::of(all, number, owned.first);
      }
      __syncthreads();
      if (many) return finish_many<Logits>(groups, bound, top_p, total);
      // Beside the loading of tokens, of which the last threads have none as a rule.
      listed = list_candidates<Logits, kLowered>(shared, block, row, groups, bound, [&] {
        if (thread == kThreads - 1) {
          task.word = draw_word();
          task.total = total;
          if (wishes.raw && !raw_later) shared.raw_log = log_of_parts(shared);
        }
        if (raw_later) leave_parts(shared, block, owned, raw_maxima, raw_sums, raw_largest);
      });
      if (raw_later && thread == kThreads - 1) shared.raw_log = log_of_parts(shared);
    }
    if (!in_list || listed > kListed) {
      return wishes.total ? Outcome::kFlat : Outcome::kOther;
    }
    float top = largest;
    if constexpr (kLowered) {
      if (listed < top_k) return Outcome::kFew;
      if (only_best && listed > kShortList) return Outcome::kOther;
      float of_list = kNegInf;
      for (int i = thread; i < listed; i += kThreads) of_list = fmaxf(of_list, shared.list_y[i]);
      top = block.max(of_list);
      if (!(fabsf(top) < kInf) || is_far(top)) return Outcome::kOther;
      if (thread == 0) task.largest = top;
      __syncthreads();
    }
    if (listed > kShortList) {
      selection = filter_list(shared, block, listed, wishes.total, 0.0, 0.0);
      if (!selection.complete) return Outcome::kOther;
      keep_in_row<Logits>(row, &selection);
      ending.report<Logits>(shared, block, selection, 0);
      return Outcome::kFinished;
    }
    const bool ranked = top_k > 0 || top_p < 1.0f || top_n > 0;
    if (thread < listed) {
      shared.list_masses[thread] = mass_of_y(shared.list_y[thread], static_cast<double>(top),
                                             load_f64(header + kParamWideScale));
    }
    if (ranked) rank_short_list(shared, listed);
    // What the output's tables have at the token that will be drawn is then not far.
    if (ending.tables.bits != nullptr && thread < listed && listed <= kFetchedAhead) {
      const int token = shared.list_ids[thread];
      prefetch(ending.tables.bits + (token >> 5));
      prefetch(ending.tables.counts + token);
    }
    __syncthreads();
    if (block.warp() == 0) {
      selection = listed <= 2 * kWarp ? draw_from_short_list<2>(listed, ranked, top_k, top_p, total)
                                      : draw_from_short_list<kShortList / kWarp>(
                                            listed, ranked, top_k, top_p, total);
    }
    if (wishes.total) {
      // Whether the list holds the whole nucleus.
      if (thread == 0) shared.found = selection.complete ? 1 : 0;
      __syncthreads();
      if (shared.found == 0) return Outcome::kOther;
    }
  }

  keep_in_row<Logits>(row, &selection);
  const bool from_list = listed >= top_n && row.plain() && !row.has(kProcessed);
  const bool by_warp = (top_n == 0 || from_list) && header[kParamNumGiven] == 0 && !row.has(kRank);
  if (by_warp) {
    if (block.warp() == 0) {
      report_by_warp<Logits>(ending.out, ending.tables, selection, top_n, listed, ending.stop,
                             ending.before);
    } else if (block.warp() == 1) {
      clear_lists(shared.arguments.layout, ending.out, top_n, 0, {lane, kWarp});
    }
    return Outcome::kFinished;
  }
  if (thread == 0) shared.selection = selection;
  __syncthreads();
  selection = shared.selection;
  ending.report<Logits>(shared, block, selection, 0);
  return Outcome::kFinished;
}

}  // namespace graphed_sampling
