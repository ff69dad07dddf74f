// One kernel for any number of positions
//
// A block takes one row after the other: it reads the row once, as the step's first pass does, into
// statistics of groups in its shared memory, and works out from these what is asked. While it does,
// the other blocks of the multiprocessor read. The sums are the step's own, so that a logprob has
// the bits of a step's.
#include <algorithm>

#include "score_rows.h"
#include "step/repair.h"
#include "step/report.h"

namespace graphed_sampling {
namespace {

// Registers for two blocks a multiprocessor, which between them have 64 KB of logits on their way.
constexpr int kScoringBlocks = 2;
// By so much a block's place among the others changes from a round of rows to the next. Where every
// other row is asked for, or one of 3, 4 or 8, no block gets all of them.
constexpr int64_t kTurn = 97;
// Of a device of any size: what `scratch` is for.
constexpr int kMostScoringBlocks = 512;
// Statistics of a block outside shared memory: maxima and sums where they do not fit, and moments.
constexpr int kScoringStatistics = 3;

__device__ inline void store_position(int32_t* out, float largest, double log, float logprob,
                                      int rank, float entropy, int flags) {
  out[kPositionLargest] = __float_as_int(largest);
  out[kPositionLogNormaliser] = __float_as_int(static_cast<float>(log));
  out[kPositionLogprob] = __float_as_int(logprob);
  out[kPositionRank] = rank;
  out[kPositionNumKept] = 0;
  out[kPositionEntropy] = __float_as_int(entropy);
  out[kPositionFlags] = flags;
}

// Lists without a token: the best ones -inf where they were asked for.
__device__ inline void clear_position_lists(const TableLayout& layout, int32_t* out, float top) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < layout.max_logprobs; i += kThreads) {
    store_i64(out + kPositionLists + 2 * i, -1);
    out[layout.top_logprobs() + i] = __float_as_int(top);
  }
  for (int i = thread; i < layout.max_logprob_ids; i += kThreads) {
    out[layout.given_logprobs() + i] = __float_as_int(nan_f32());
  }
}

// From a row's statistics to its record.
template <class Logits>
__device__ __noinline__ void score_row(const ScoreArguments& a, int index, int64_t token,
                                       int32_t* out) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  const Row& row = task.row;
  const TableLayout& layout = a.layout;
  Block block = {0};
  const int thread = block.thread();
  int flags = 0;
  float largest = largest_of(shared, block, task.at.maxima);
  if (largest == kInf) {
    if (repair_marked<Logits>(shared, block)) flags |= kRowNan;
    largest = largest_of(shared, block, task.at.maxima);
  }
  if (largest == kInf) flags |= kRowPosInf;
  if (largest == kNegInf) flags |= kRowEmpty;
  const Normaliser normaliser = {
      false, largest, raw_log(shared, block, task.at.maxima, task.at.sums, largest), {}, 0.0};

  float entropy = nan_f32();
  if (a.entropy && largest == kInf) entropy = static_cast<float>(normaliser.log);
  if (a.entropy && fabsf(largest) < kInf) {
    const int64_t total =
        mass_of_groups(shared, block, task.at.maxima, task.at.sums, largest, kLog2E);
    if (thread == 0) {
      task.largest = largest;
      task.total = total;
    }
    __syncthreads();
    const double mean = mean_of_groups(shared, block);
    entropy = static_cast<float>(fmax(normaliser.log - mean * kLn2, 0.0));
  }

  clear_position_lists(layout, out, kNegInf);
  for (int i = thread; i < layout.max_logprob_ids; i += kThreads) {
    const int64_t given = a.given_ids[int64_t{index} * layout.max_logprob_ids + i];
    if (given < 0) continue;
    const float x = load_logit<Logits>(row, static_cast<int>(given));
    const float logprob = normaliser.logprob(x, x, static_cast<int>(given));
    out[layout.given_logprobs() + i] = __float_as_int(logprob);
  }
  if (layout.max_logprobs > 0) {
    __syncthreads();  // the lists are cleared
    report_top<Logits>(shared, block, task.raw_row, task.at.maxima, layout, out,
                       layout.max_logprobs, normaliser);
  }
  float logprob = nan_f32();
  int rank = 0;
  if (token >= 0) {
    const float x = load_logit<Logits>(row, static_cast<int>(token));
    logprob = normaliser.logprob(x, x, static_cast<int>(token));
    if (a.rank) rank = report_rank<Logits>(shared, block, task.raw_row, task.at.maxima, x);
  }
  if (thread == 0) {
    store_position(out, largest, largest == kNegInf ? 0.0 : normaliser.log, logprob, rank, entropy,
                   flags);
  }
}

template <class Logits>
__global__ void __launch_bounds__(kThreads, kScoringBlocks)
    score_rows_kernel(const __grid_constant__ ScoreArguments a) {
  Shared& shared = the_shared();
  Task& task = shared.task;
  grid_dependency_wait();
  grid_dependency_launch();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int groups = groups_of(a.layout.vocab_size), tiles = groups / kGroupsOfTile;
  float* scratch = reinterpret_cast<float*>(a.scratch) +
                   static_cast<int64_t>(blockIdx.x) * kScoringStatistics * groups;
  float* statistics = a.in_shared ? the_statistics() : scratch;
  const Statistics at = {statistics, statistics + groups, nullptr, nullptr, scratch + 2 * groups};
  Wishes wishes = {};
  wishes.raw = true;
  wishes.mean = a.entropy;
  const auto blocks = static_cast<int64_t>(gridDim.x);
  for (int64_t round = 0; round * blocks < a.positions; ++round) {
    const int64_t place = round * blocks + (blockIdx.x + round * kTurn) % blocks;
    if (place >= a.positions) continue;
    const auto index = static_cast<int>(place);
    const int64_t at_row = a.rows[index];
    const int64_t token = a.token_ids[index];
    int32_t* out = a.output + int64_t{index} * a.layout.output_words();
    if (at_row < 0) {
      clear_position_lists(a.layout, out, nan_f32());
      if (threadIdx.x == 0) {
        store_position(out, kNegInf, 0.0, nan_f32(), 0, nan_f32(), kRowPadding);
      }
      continue;
    }
    using Bits = typename Logits::Bits;
    const Bits* logits = static_cast<const Bits*>(a.logits) + at_row * a.logits_stride;
    const Source source = {logits, a.layout.vocab_size,
                           reinterpret_cast<uintptr_t>(logits) % 16 == 0};
    const int whole = tiles_to_load(source);
    Set<Logits> sets[kSets] = {};
    if (warp < min(tiles, whole)) {
#pragma unroll
      for (int i = 0; i < kSets; ++i) sets[i] = load_set<Logits>(source, warp, i, lane);
    }
    if (threadIdx.x == 0) {
      task.row = {};
      static_cast<Source&>(task.row) = source;
      task.row.special = kNormal;
      task.row.scale = kLog2E;
      task.raw_row = task.row;
      task.wishes = wishes;
      task.at = at;
      task.groups = groups;
      task.in_shared = a.in_shared;
    }
    stream_tiles<Logits>(source, wishes, kLog2E, warp, kWarps, tiles, whole, lane, sets, at);
    __syncthreads();
    score_row<Logits>(a, index, token, out);
    __syncthreads();  // before the next row's statistics take the place of these
  }
}

}  // namespace

int64_t score_rows_scratch_words(const TableLayout& layout, bool entropy) {
  const int groups = groups_of(layout.vocab_size);
  if (!entropy && groups <= kSharedGroups) return 0;
  return int64_t{kMostScoringBlocks} * kScoringStatistics * groups;
}

cudaError_t launch_score_rows(const ScoreArguments& arguments, bool programmatic,
                              cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(ScoreArguments)) {
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    const int groups = groups_of(arguments.layout.vocab_size);
    ScoreArguments chosen = arguments;
    chosen.in_shared = groups <= kSharedGroups;
    const size_t bytes = shared_bytes(groups);
    error = allow_dynamic_shared(kernel, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    // Blocks that all run from the start: each then takes its share of the rows.
    const int blocks =
        std::min({arguments.positions, kScoringBlocks * multiprocessors, kMostScoringBlocks});
    return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, bytes, stream,
                         programmatic, 1, chosen);
  };
  switch (arguments.logits_type) {
    case LogitsType::kFloat32:
      return launch(score_rows_kernel<Float32>);
    case LogitsType::kBFloat16:
      return launch(score_rows_kernel<BFloat16>);
    default:
      return launch(score_rows_kernel<Float16>);
  }
}

}  // namespace graphed_sampling
