// What a row reports, and its next state.
#pragma once

#include "whole_row.h"

namespace graphed_sampling {

// Those that do a thing together.
struct Threads {
  int mine, number;
};

__device__ inline Threads threads_of_block() { return {static_cast<int>(threadIdx.x), kThreads}; }

// What a record says of lists without tokens: of the best ones from place `first` on, -inf of as
// many as are asked for, and of given ids.
__device__ inline void clear_lists(const TableLayout& layout, int32_t* out, int first, int asked,
                                   Threads threads) {
#pragma unroll 1
  for (int i = first + threads.mine; i < layout.max_logprobs; i += threads.number) {
    store_i64(out + kOutputLists + 2 * i, -1);
    out[layout.top_logprobs() + i] = __float_as_int(i < asked ? kNegInf : nan_f32());
  }
#pragma unroll 1
  for (int i = threads.mine; i < layout.max_logprob_ids; i += threads.number) {
    out[layout.given_logprobs() + i] = __float_as_int(nan_f32());
  }
}

// The record of a row in which nothing is drawn. state: null for a row without a request.
__device__ inline void write_idle(const TableLayout& layout, int32_t* out, const int32_t* state) {
  if (threadIdx.x == 0) {
    store_i64(out + kOutputTokenId, -1);
    out[kOutputLogprob] = __float_as_int(nan_f32());
    out[kOutputRank] = 0;
    out[kOutputNumKept] = 0;
    out[kOutputFinishReason] = state != nullptr ? state[kStateFinishReason] : 0;
    out[kOutputFlags] = state != nullptr ? kRowFinished : kRowPadding;
    out[kOutputGeneration] = state != nullptr ? state[kStateGeneration] : 0;
  }
  clear_lists(layout, out, 0, 0, threads_of_block());
}

// What logprobs of a row are worked out from.
struct Normaliser {
  bool processed;
  float largest;  // of the raw logits
  double log;     // ln of the sum of weights: of the raw logits, or of what is kept
  Kept kept;
  double scale;

  // x: the sanitised logit, y: the processed one.
  __device__ float logprob(float x, float y, int token) const {
    if (processed) {
      if (!kept.holds(y, token)) return kNegInf;
      const double z = (static_cast<double>(y) - static_cast<double>(kept.highest)) * scale;
      return static_cast<float>(z * kLn2 - log);
    }
    if (x == kNegInf) return kNegInf;
    // Equals of the maximum are told apart: it may be infinite.
    const double difference =
        x == largest ? 0.0 : static_cast<double>(x) - static_cast<double>(largest);
    return static_cast<float>(difference - log);
  }
};

__device__ inline void store_top(const TableLayout& layout, int32_t* out, int place, int token,
                                 float logprob) {
  store_i64(out + kOutputLists + 2 * place, token);
  out[layout.top_logprobs() + place] = __float_as_int(logprob);
}

// The n best one after the other, each found by going over the row.
template <class Logits>
__device__ __noinline__ void top_from_row(Shared& shared, Block& block, const Row& row,
                                          const TableLayout& layout, int32_t* out, int n,
                                          const Normaliser& normaliser) {
  Task& task = shared.task;
  uint64_t last = ~uint64_t{0};
  for (int place = 0; place < n; ++place) {
    uint64_t best = 0;
    for (int group = block.thread(); group < task.groups; group += kThreads) {
      for (int piece = 0; piece < kPieces; ++piece) {
        const int first = piece_first(group, piece);
        float y[kPiece];
        piece_y<Logits>(row, first, y);
        for (int i = 0; i < kPiece; ++i) {
          if (y[i] == kNegInf) continue;
          if (normaliser.processed ? !normaliser.kept.holds(y[i], first + i)
                                   : normaliser.largest == kInf && y[i] < kInf) {
            continue;
          }
          const uint64_t order = order_of(y[i], first + i);
          if (order < last && order > best) best = order;
        }
      }
    }
    best = block.max_bits(best);
    if (best == 0) break;
    if (block.thread() == 0) {
      const float value = y_of_order(best);
      const int token = id_of_order(best);
      store_top(layout, out, place, token, normaliser.logprob(value, value, token));
    }
    last = best;
  }
}

// The n best tokens by (value descending, id ascending), with their logprobs.
template <class Logits>
__device__ __noinline__ void report_top(Shared& shared, Block& block, const Row& row,
                                        const float* stored, const TableLayout& layout,
                                        int32_t* out, int n, const Normaliser& normaliser) {
  const float largest = largest_of(shared, block, stored);
  const float* maxima = stored;
  int count = kListed + 1;
  // Survivors that are no head of the order (typical_p) are looked for in the row itself.
  const bool head =
      !normaliser.processed || (row.special == kNormal && normaliser.kept.highest == largest);
  if (head && largest > kNegInf && largest < kInf && n <= kMaxListedTopK) {
    float bound = top_bound(shared, block, maxima, largest, n);
    // The bound of the best, or of the survivors.
    if (normaliser.processed) bound = fmaxf(bound, normaliser.kept.lowest);
    const int listed = list_groups(shared, block, maxima, bound);
    if (listed <= kListedGroups) count = list_candidates<Logits>(shared, block, row, listed, bound);
  }
  if (count > kListed) {
    top_from_row<Logits>(shared, block, row, layout, out, n, normaliser);
    return;
  }
  const uint64_t* sorted = sort_list(shared, block, count);
  for (int place = block.thread(); place < min(n, count); place += kThreads) {
    const float value = y_of_order(sorted[place]);
    const int token = id_of_order(sorted[place]);
    if (!normaliser.processed || normaliser.kept.holds(value, token)) {
      store_top(layout, out, place, token, normaliser.logprob(value, value, token));
    }
  }
}

// 1 + the number of tokens with a larger value.
template <class Logits>
__device__ __noinline__ int report_rank(Shared& shared, Block& block, const Row& row,
                                        const float* stored, float value) {
  Task& task = shared.task;
  int64_t above = 0;
  for (int group = block.thread(); group < task.groups; group += kThreads) {
    if (!(load_now(stored + group) > value)) continue;
    for (int piece = 0; piece < kPieces; ++piece) {
      float y[kPiece];
      piece_y<Logits>(row, piece_first(group, piece), y);
      for (int i = 0; i < kPiece; ++i) above += y[i] > value ? 1 : 0;
    }
  }
  return 1 + static_cast<int>(block.sum(above));
}

// The first 32 of the recent tokens, a lane has the one before its own: asked for long before the
// token is drawn.
__device__ inline int ask_for_recent(const int32_t* recent, int recent_tokens, int lane) {
  return lane > 0 && lane < recent_tokens ? recent[lane - 1] : 0;
}

// The token becomes the newest of the recent ones. A single warp's work: what it reads is read
// before anything is written over it. before: from `ask_for_recent`.
__device__ inline void remember(int32_t* recent, int recent_tokens, int before, int token,
                                int lane) {
#pragma unroll 1
  for (int last = recent_tokens - 1; last >= kWarp; last -= kWarp) {
    const int i = last - lane;
    const int older = i >= kWarp ? recent[i - 1] : 0;
    __syncwarp();
    if (i >= kWarp) recent[i] = older;
    __syncwarp();
  }
  if (lane < recent_tokens) recent[lane] = lane == 0 ? token : before;
}

// Of the tokens of a row's output: which there are, and how often. Null in a table without
// penalties.
struct SeenTables {
  int32_t* bits;
  int32_t* counts;
};

// Words of a record's head, and of a state, of which each lane of a warp stores one.
struct WordOfLane {
  int lane;
  int32_t word;

  __device__ void set(int at, int32_t value) { word = lane == at ? value : word; }
  __device__ void set_i64(int at, int64_t value) {
    set(at, static_cast<int32_t>(value));
    set(at + 1, static_cast<int32_t>(value >> 32));
  }
};

// The head of the record, and the next state, by a warp. seen, count: what the tables have at the
// token, lane 0's.
__device__ inline void advance(const Task& task, const SeenTables& tables, int32_t* out,
                               const Selection& selection, float logprob, int rank, int row_flags,
                               bool stopped, int32_t seen, int32_t count, int lane) {
  const Row& row = task.row;
  const int token = selection.drawn.token;
  const int generated = task.state[kStateNumGenerated] + 1;
  const int max_tokens = task.header[kParamMaxTokens];
  int reason = max_tokens > 0 && generated >= max_tokens ? kFinishLength : kFinishNone;
  if (stopped) reason = kFinishStop;
  const bool counted = row.has(kFiltered | kGreedy) || row.special == kEmptyRow;
  WordOfLane record = {lane, 0};
  record.set_i64(kOutputTokenId, token);
  record.set(kOutputLogprob, __float_as_int(logprob));
  record.set(kOutputRank, rank);
  record.set(kOutputNumKept, counted ? selection.num_kept : 0);
  record.set(kOutputFinishReason, reason);
  record.set(kOutputFlags, row_flags);
  record.set(kOutputGeneration, task.state[kStateGeneration]);
  if (lane < kOutputLists) out[lane] = record.word;
  WordOfLane state = {lane, 0};
  state.set_i64(kStatePosition, load_i64(task.state + kStatePosition) + 1);
  state.set_i64(kStateLastToken, token);
  state.set(kStateNumGenerated, generated);
  state.set(kStateFinishReason, reason);
  if (lane <= kStateFinishReason) row.state[lane] = state.word;
  if (tables.bits != nullptr && lane == 0) {
    const auto bit = static_cast<int32_t>(1u << (token & 31));
    tables.counts[token] = ((seen & bit) != 0 ? count : 0) + 1;
    tables.bits[token >> 5] = seen | bit;
  }
}
static_assert(kOutputTokenId == 0 && kOutputLogprob == 2 && kOutputRank == 3 &&
              kOutputNumKept == 4 && kOutputFinishReason == 5 && kOutputFlags == 6 &&
              kOutputGeneration == 7 && kOutputLists == 8);
static_assert(kStatePosition == 0 && kStateLastToken == 2 && kStateNumGenerated == 4 &&
              kStateFinishReason == 5);

// Everything about a row whose token is drawn: logprobs, rank, finish, output and state. stop: the
// thread's one of the stop ids, or -1. before: the lane's from `ask_for_recent`.
template <class Logits>
__device__ __noinline__ void report(Shared& shared, Block& block, const TableLayout& layout,
                                    int32_t* out, const SeenTables tables,
                                    const Selection selection, int row_flags, int stop,
                                    int before) {
  const Task& task = shared.task;
  const Row& row = task.row;
  const int32_t* params = row.params;
  const int thread = block.thread();
  const int token = selection.drawn.token;
  const bool processed_mode = row.has(kProcessed);
  const int n = params[kParamTopLogprobs], num_given = params[kParamNumGiven];
  const bool wants_logprob = row.has(kLogprobs), wants_rank = row.has(kRank);

  // What is to be loaded is asked for before it is used.
  float x = selection.drawn.y;
  if (!row.plain()) x = load_logit<Logits>(row, token);
  int32_t seen = 0, count = 0;
  if (tables.bits != nullptr && thread == 0) {
    seen = tables.bits[token >> 5];
    count = tables.counts[token];
  }

  const Row& values_row = processed_mode ? row : task.raw_row;
  const float* values = !processed_mode && task.wishes.split ? task.at.raw_maxima : task.at.maxima;
  Normaliser normaliser = {processed_mode, task.largest, 0.0, selection.kept,
                           load_f64(params + kParamWideScale)};
  if (processed_mode) {
    normaliser.log = log_mass(selection.total);
  } else if (wants_logprob || wants_rank || n > 0 || num_given > 0) {
    if (task.raw_known) {
      normaliser.largest = task.raw_largest;
      normaliser.log = shared.raw_log;
    } else {
      const bool apart = task.wishes.split || task.wishes.both;
      normaliser.largest = largest_of(shared, block, values);
      normaliser.log = raw_log(shared, block, values, apart ? task.at.raw_sums : task.at.sums,
                               normaliser.largest);
    }
  }

  clear_lists(layout, out, 0, n, threads_of_block());
  for (int i = thread; i < num_given; i += kThreads) {
    const int given = params[layout.given_ids() + i];
    const float given_x = load_logit<Logits>(row, given);
    float given_y = given_x;
    if (processed_mode) given_y = special_or(row, processed(row, given_x, given), given);
    const float logprob = normaliser.logprob(given_x, given_y, given);
    out[layout.given_logprobs() + i] = __float_as_int(logprob);
  }
  if (n > 0) {
    __syncthreads();  // the lists are cleared
    report_top<Logits>(shared, block, values_row, values, layout, out, n, normaliser);
  }
  int rank = 0;
  if (wants_rank) {
    rank = 1;
    if (!processed_mode || row.special == kNormal) {
      rank = report_rank<Logits>(shared, block, values_row, values,
                                 processed_mode ? selection.drawn.y : x);
    }
  }

  bool stopped = stop == token;
  for (int i = kThreads + thread; i < params[kParamNumStop]; i += kThreads) {
    stopped = stopped || params[layout.stop_ids() + i] == token;
  }
  stopped = __syncthreads_or(stopped ? 1 : 0) != 0;
  if (block.warp() == 0) {
    const float logprob =
        wants_logprob ? normaliser.logprob(x, selection.drawn.y, token) : nan_f32();
    advance(task, tables, out, selection, logprob, rank, row_flags, stopped, seen, count, thread);
    remember(row.state + kStateRecent, layout.recent_tokens(), before, token, thread);
  }
}

// The same by one warp, for a row without NaN, +inf, rank and given ids that has a token to draw,
// but for what `clear_lists` does. top_n: best tokens to report, of a ranked short list that has
// them; raw ones.
template <class Logits>
__device__ __noinline__ void report_by_warp(int32_t* out, const SeenTables tables,
                                            const Selection selection, int top_n, int listed,
                                            int stop, int before) {
  const Shared& shared = the_shared();
  const TableLayout& layout = shared.arguments.layout;
  const Task& task = shared.task;
  const Row& row = task.row;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int token = selection.drawn.token;
  float x = selection.drawn.y;
  if (!row.plain()) x = load_logit<Logits>(row, token);
  int32_t seen = 0, count = 0;
  if (tables.bits != nullptr && lane == 0) {
    seen = tables.bits[token >> 5];
    count = tables.counts[token];
  }
  const int num_stop = task.header[kParamNumStop];
  bool stopped = stop == token;
#pragma unroll 1
  for (int i = kWarp + lane; i < num_stop; i += kWarp) {
    stopped = stopped || row.params[layout.stop_ids() + i] == token;
  }
  stopped = __any_sync(kAllLanes, stopped) != 0;
  __syncwarp();  // Lanes have read the tables and recent tokens that are written now.
  remember(row.state + kStateRecent, layout.recent_tokens(), before, token, lane);

  Normaliser normaliser = {row.has(kProcessed), task.raw_largest, 0.0, selection.kept,
                           load_f64(task.header + kParamWideScale)};
  if (normaliser.processed) {
    normaliser.log = log_mass(selection.total);
  } else if (task.wishes.raw) {
    normaliser.log = shared.raw_log;
  }
  if (top_n > 0) {
#pragma unroll 1
    for (int i = lane; i < listed; i += kWarp) {
      const int place = static_cast<int>(shared.bins[i]);
      if (place < top_n) {
        const float y = shared.list_y[i];
        const int id = shared.list_ids[i];
        store_top(layout, out, place, id, normaliser.logprob(y, y, id));
      }
    }
  }
  const float logprob =
      row.has(kLogprobs) ? normaliser.logprob(x, selection.drawn.y, token) : nan_f32();
  advance(task, tables, out, selection, logprob, 0, 0, stopped, seen, count, lane);
}

}  // namespace graphed_sampling
