// How most rows end: with the groups' statistics in registers, one short list, and filters, draw
// and report by a single warp. What a row waits for here is one instruction after the other, so
// there are few, and few barriers.
#pragma once

#include "../common/philox.h"
#include "../sample_step.h"
#include "report.h"

namespace graphed_sampling {

constexpr int kVectors = kCachedGroups / (4 * kThreads);  // of 4 groups, that a thread has at most
constexpr int kShortList = kThreads;

// The groups that are a thread's: neighbours, so that ids ascend as threads do.
struct Owned {
  int first, vectors, groups;

  __device__ Owned(int groups_, int thread)
      : first(0), vectors((groups_ + 4 * kThreads - 1) / (4 * kThreads)), groups(groups_) {
    first = thread * 4 * vectors;
  }
  // Calls use(vector, place, group) for each of them, all at places that the compiler knows.
  template <class Use>
  __device__ void each(Use use) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v >= vectors) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) use(v, i, first + 4 * v + i);
    }
  }
};

using OfOwned = float[kVectors][4];

// No group's is as much as `otherwise`.
__device__ inline void load_owned(const Owned& owned, const float* stored, float otherwise,
                                  OfOwned& values) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float4 vector = make_float4(otherwise, otherwise, otherwise, otherwise);
    const int group = owned.first + 4 * v;
    if (v < owned.vectors && group < owned.groups) {
      vector = load_now(reinterpret_cast<const float4*>(stored + group));
    }
    values[v][0] = vector.x;
    values[v][1] = vector.y;
    values[v][2] = vector.z;
    values[v][3] = vector.w;
  }
}

__device__ inline int64_t mass_of_owned(const Owned& owned, const OfOwned& maxima,
                                        const OfOwned& sums, float largest, float scale) {
  int64_t mass = 0;
  owned.each(
      [&](int v, int i, int) { mass += group_mass(maxima[v][i], sums[v][i], largest, scale); });
  return mass;
}

// The bin in which what lies in the bins before it and in it reaches `needed`; kBins if all of them
// do not. Every warp finds it by itself.
__device__ inline int reaching_bin(const uint32_t (&bins)[kBins], uint32_t needed, int lane) {
  constexpr int kEach = kBins / kWarp;
  uint32_t mine[kEach], number = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) number += mine[i] = bins[lane * kEach + i];
  uint32_t up_to = number;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
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

// Lists the tokens of listed groups with y >= bound, ids ascending; how many there are, of which as
// many as fit are listed.
template <class Logits>
__device__ inline int list_tokens(Shared& shared, Block& block, const Row& row, int num_groups,
                                  float bound) {
  constexpr int kEach = 4;  // pieces a thread reads at a time
  static_assert(kEach * kPiece == 32);
  const int pieces = num_groups * kPieces;
  const bool plain = row.plain();
  int count = 0;
#pragma unroll 1
  for (int begin = 0; begin < pieces && count <= kListed; begin += kThreads * kEach) {
    const int first = begin + block.thread() * kEach;
    uint32_t reaching = 0;
    int ids[kEach] = {};
    if (first < pieces) {
      // The 4 pieces are halves of one group or of two: pieces are whole groups' in number.
      const int id = shared.group_list[first / kPieces] * kGroup + first % kPieces * kPiece;
#pragma unroll
      for (int i = 0; i < kEach; ++i) ids[i] = id + i * kPiece;
      float y[kEach][kPiece];
#pragma unroll
      for (int i = 0; i < kEach; ++i) piece_y<Logits>(row, ids[i], y[i]);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          reaching |= (y[i][j] >= bound ? 1u : 0u) << (i * kPiece + j);
        }
      }
    }
    int listed;
    int place = count + block.sum_before(__popc(reaching), &listed);
    for (; reaching != 0; reaching &= reaching - 1, ++place) {
      // Loaded once more: registers cannot be numbered.
      const int token = ids[0] + __ffs(static_cast<int>(reaching)) - 1;
      float y = load_logit<Logits>(row, token);
      if (!plain) y = special_or(row, processed(row, y, token), token);
      if (place < kListed) {
        shared.list_y[place] = y;
        shared.list_ids[place] = token;
      }
    }
    count += listed;
  }
  __syncthreads();
  return count;
}

// How many of a short list's tokens come before each, by (y descending, id ascending), into
// shared.bins, which are 0 before.
__device__ inline void rank_short_list(Shared& shared, int count) {
  const int thread = static_cast<int>(threadIdx.x);
  // Several threads share a token; those of a warp compare with the same others.
  int size = kWarp;
  while (size < count) size *= 2;
  const int mine = thread % size, part = thread / size, parts = kThreads / size;
  const int each = size / parts;
  if (mine >= count) return;
  const float y = shared.list_y[mine];
  uint32_t above = 0;
  for (int i = part * each; i < min((part + 1) * each, count); ++i) {
    const float other = shared.list_y[i];
    above += other > y || (other == y && i < mine) ? 1 : 0;
  }
  if (parts == 1) {
    shared.bins[mine] = above;
  } else if (above > 0) {
    atomicAdd(&shared.bins[mine], above);
  }
}

// top_k, top_p and the draw on a short list, by one warp. ranked: whether shared.bins has ranks.
// least: that top_p is of this total and not of the list's own; 0 else.
template <int kEach>
__device__ __noinline__ Selection draw_from_short_list(Shared& shared, int count, bool ranked,
                                                       int top_k, float top_p, int64_t of_total) {
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

// The bin of a maximum that takes part in a histogram.
struct Histogram {
  Bins bins;
  float low;
  int last;  // what reaches the bound is in it or before it

  __device__ bool holds(float maximum) const { return maximum >= low; }
  __device__ bool reaches(float maximum) const {
    return last == kBins || (maximum >= low && bins.bin(maximum) <= last);
  }
};

// The word of a row's draw.
__device__ __noinline__ uint64_t draw_word(const StepArguments& a, const Task& task) {
  const bool given = a.words != nullptr && (a.given == nullptr || a.given[1] != 0);
  return given ? static_cast<uint64_t>(a.words[task.index])
               : philox_word(static_cast<uint64_t>(load_i64(task.header + kParamSeed)),
                             static_cast<uint64_t>(load_i64(task.state + kStatePosition)), 0);
}

// Finishes a row, if it turns out to be a usual one; else leaves everything as it was.
template <class Logits>
__device__ inline bool finish_usual(Shared& shared, Block& block, const StepArguments& a,
                                    int32_t* out, const SeenTables& tables, int stop) {
  Task& task = shared.task;
  const Row& row = task.row;
  const Wishes wishes = task.wishes;
  const int32_t* header = task.header;
  const int thread = block.thread(), lane = block.lane();
  const bool greedy = row.has(kGreedy);
  const int top_k = header[kParamTopK], top_n = header[kParamTopLogprobs];
  const float top_p = load_f32(header + kParamTopP), min_p = load_f32(header + kParamMinP);
  const int most = top_k > 0 ? max(top_k, top_n) : 0;
  const bool other_filters =
      load_f32(header + kParamTypicalP) < 1.0f || load_f32(header + kParamEpsilonCutoff) > 0.0f ||
      load_f32(header + kParamEtaCutoff) > 0.0f || load_f32(header + kParamTopNSigma) > 0.0f;
  if (task.groups > kCachedGroups || most > kShortList || (other_filters && !greedy)) return false;

  const Owned owned(task.groups, thread);
  OfOwned maxima, sums, raw_sums;
  load_owned(owned, task.at.maxima, kNegInf, maxima);
  if (wishes.total || (wishes.raw && !wishes.split)) {
    load_owned(owned, task.at.sums, 0.0f, sums);
  }
  if (wishes.both) load_owned(owned, task.at.raw_sums, 0.0f, raw_sums);
  shared.bins[thread] = 0;
  float mine = kNegInf;
  owned.each([&](int v, int i, int) { mine = fmaxf(mine, maxima[v][i]); });
  const bool unfiltered = wishes.total && top_p >= 1.0f;
  if (unfiltered && thread == kThreads - 1) task.word = draw_word(a, task);
  // As many maxima as threads that have tokens are not below the lowest of theirs.
  const Range range = block.range(mine > kNegInf ? mine : kInf, mine);
  const float largest = range.high;
  if (largest == kInf || largest == kNegInf) return false;

  // Each warp's part of the raw mass: they are added up when it is asked for.
  float raw_largest = largest;
  if (wishes.raw) {
    int64_t raw_mass;
    if (wishes.split) {
      OfOwned raw_maxima;
      load_owned(owned, task.at.raw_maxima, kNegInf, raw_maxima);
      load_owned(owned, task.at.raw_sums, 0.0f, raw_sums);
      float most_raw = kNegInf;
      owned.each([&](int v, int i, int) { most_raw = fmaxf(most_raw, raw_maxima[v][i]); });
      raw_largest = block.max(most_raw);
      if (raw_largest == kInf) return false;
      raw_mass = mass_of_owned(owned, raw_maxima, raw_sums, raw_largest, kLog2E);
    } else if (wishes.both) {
      raw_mass = mass_of_owned(owned, maxima, raw_sums, largest, kLog2E);
    } else {
      raw_mass = mass_of_owned(owned, maxima, sums, largest, kLog2E);
    }
    raw_mass = sum_of_lanes(raw_mass);
    if (lane == 0) shared.raw_masses[block.warp()] = raw_mass;
  }
  if (thread == 0) {
    task.largest = largest;
    task.raw_largest = raw_largest;
    *task.by_row = 0;
  }

  Selection selection = {};
  int listed = 0;
  bool ranked = false;
  if (greedy) {
    unsigned first = ~0u;
    owned.each([&](int v, int i, int group) {
      if (maxima[v][i] == largest) first = min(first, static_cast<unsigned>(group));
    });
    const int group = static_cast<int>(block.min_bits(first));
    if (block.warp() == 0) {
      const int token = first_in_group<Logits>(row, group, largest, lane);
      selection = {true, {token, largest}, {largest, largest, token}, int64_t{1} << kMassBits, 1};
    }
  } else if (unfiltered) {
    const int64_t mass = mass_of_owned(owned, maxima, sums, largest, row.scale);
    int64_t total;
    int64_t before = block.sum_before(mass, &total);
    const int64_t position = position_of(task.word, total);
    if (before <= position && position < before + mass) {
      bool found = false;
      owned.each([&](int v, int i, int group) {
        const int64_t of_group = group_mass(maxima[v][i], sums[v][i], largest, row.scale);
        if (!found && position < before + of_group) {
          found = true;
          shared.drawn_group = {group, before, of_group};
        }
        before += of_group;
      });
    }
    __syncthreads();
    const Kept all = {largest, kNegInf, row.vocab};
    if (block.warp() == 0) {
      const Drawn drawn = draw_in_group<Logits>(task, all, total, shared.drawn_group, lane);
      selection = {true, drawn, all, total, 0};
    }
  } else {
    float least = -kFltMax;  // y of what the filters keep reaches it
    int64_t total = 0;       // where the mass of all tokens matters
    Histogram histogram = {Bins(0.0f, 0.0f), kNegInf, kBins};
    uint32_t needed = 0;
    if (min_p > 0.0f) {
      const double offset = load_f64(header + kParamMinPOffset);
      least = round_down(static_cast<double>(largest) + offset);
    }
    if (wishes.total) {
      const int64_t mass = mass_of_owned(owned, maxima, sums, largest, row.scale);
      total = block.sum(mass);
      // Weights of groups in units of 2**-30 of the total, none rounded up. Groups below the bound
      // may hold 15/16 of what top_p leaves out; the rest is for tokens below it in other groups.
      const float of_largest = static_cast<float>(static_cast<double>(total) / kOne);
      const float unit = 1073741824.0f / of_largest;
      const float spare = (1.0f - top_p) * (1073741824.0f * 0.9375f);
      needed = static_cast<uint32_t>(1073741824.0f - spare) + 1;
      const float tokens = static_cast<float>(task.groups * kGroup);
      const float start =
          fminf(lg2_approx(of_largest * fmaxf(1.0f - top_p, 1e-6f) / tokens) - 1.0f, -1.0f);
      const float low = fmaxf(largest + start / row.scale, -kFltMax);
      histogram = {Bins(low, largest), low, kBins};
      owned.each([&](int v, int i, int) {
        const float maximum = maxima[v][i];
        if (histogram.holds(maximum)) {
          const float weight = sums[v][i] * ex2_approx(z_of(maximum, largest, row.scale)) * unit;
          atomicAdd(&shared.bins[histogram.bins.bin(maximum)], static_cast<uint32_t>(weight));
        }
      });
    } else if (top_k > 0) {
      needed = static_cast<uint32_t>(most);
      histogram = {Bins(range.low, largest), range.low, kBins};
      owned.each([&](int v, int i, int) {
        if (histogram.holds(maxima[v][i])) {
          atomicAdd(&shared.bins[histogram.bins.bin(maxima[v][i])], 1u);
        }
      });
    }
    if (needed > 0) {
      __syncthreads();
      histogram.last = reaching_bin(shared.bins, needed, lane);
      if (histogram.last == kBins) return false;
    }
    // Which groups reach the bound, and the lowest maximum of those.
    uint32_t reaching = 0;
    float lowest = kInf;
    owned.each([&](int v, int i, int) {
      const float maximum = maxima[v][i];
      if (maximum > kNegInf && histogram.reaches(maximum)) {
        lowest = fminf(lowest, maximum);
        if (maximum >= least) reaching |= 1u << (4 * v + i);
      }
    });
    const Listing listing = block.listing(__popc(reaching), lowest);
    shared.bins[thread] = 0;
    if (listing.total > kListedGroups) return false;
    for (int place = listing.before; reaching != 0; reaching &= reaching - 1, ++place) {
      shared.group_list[place] = owned.first + __ffs(static_cast<int>(reaching)) - 1;
    }
    // Beside the loading of tokens, of which the last threads have none as a rule.
    if (thread == kThreads - 1) task.word = draw_word(a, task);
    __syncthreads();
    if (needed > 0) least = fmaxf(least, listing.lowest);
    listed = list_tokens<Logits>(shared, block, row, listing.total, least);
    if (listed > kListed) return false;
    if (thread == 0) task.total = total;
    if (listed > kShortList) {
      if (thread == 0) task.raw_total = -1;
      __syncthreads();
      selection = filter_list(shared, block, listed, wishes.total, 0.0, 0.0);
      if (!selection.complete) return false;
      report<Logits>(shared, block, a.layout, out, tables, selection, 0, stop);
      return true;
    }
    ranked = top_k > 0 || top_p < 1.0f || top_n > 0;
    if (thread < listed) {
      const double scale = load_f64(header + kParamWideScale);
      const double z =
          (static_cast<double>(shared.list_y[thread]) - static_cast<double>(largest)) * scale;
      shared.list_masses[thread] = mass_of(exp2_wide(z));
    }
    if (ranked) rank_short_list(shared, listed);
    __syncthreads();
    if (block.warp() == 0) {
      selection = listed <= 2 * kWarp
                      ? draw_from_short_list<2>(shared, listed, ranked, top_k, top_p, total)
                      : draw_from_short_list<kShortList / kWarp>(shared, listed, ranked, top_k,
                                                                 top_p, total);
    }
    if (wishes.total && top_p < 1.0f) {
      // Whether the list holds the whole nucleus.
      if (thread == 0) shared.found = selection.complete ? 1 : 0;
      __syncthreads();
      if (shared.found == 0) return false;
    }
  }

  const bool from_list = listed >= top_n && row.plain() && !row.has(kProcessed);
  const bool by_warp = (top_n == 0 || from_list) && header[kParamNumGiven] == 0 && !row.has(kRank);
  if (by_warp) {
    if (block.warp() == 0) {
      report_by_warp<Logits>(shared, a.layout, out, tables, selection, top_n, listed, stop);
    }
    return true;
  }
  if (thread == 0) {
    shared.selection = selection;
    task.raw_total = -1;
  }
  __syncthreads();
  selection = shared.selection;
  report<Logits>(shared, block, a.layout, out, tables, selection, 0, stop);
  return true;
}

}  // namespace graphed_sampling
