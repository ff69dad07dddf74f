// One kernel a step
//
// A row is read once, by one or several blocks, each warp a tile of it: of every group of 64 tokens
// they leave the maximum and the sum of weights. One block finishes the row: from the groups'
// statistics it bounds what can be drawn, reads the few groups again that reach the bound, and
// applies the filters to their tokens. So the end of one row lies beside the reading of others, and
// no launch depends on data.
//
// Where the device has clusters, the blocks of a row are one, and the statistics lie in the shared
// memory of its first block, which finishes. Elsewhere they lie in global memory, and the block
// that is through last finishes, which decides nothing but who works.
//
// Where the raw logits' statistics are given, rows that need no others are not read: the first
// block finishes such a row at once, and its others have nothing to do.
#include "sample_step.h"
#include "step/finish.h"

namespace graphed_sampling {
namespace {

// With so many blocks every multiprocessor has work until the end, and streams while others finish
// rows. Fewer, which read more each, wait less often for each other.
constexpr int64_t kTargetBlocks = 512;

// Maxima and sums from `closest` on, the others behind their place in scratch.
__device__ inline Statistics statistics_from(float* closest, float* apart,
                                             const ScratchLayout& scratch) {
  return {closest, closest + scratch.groups, apart + 2 * scratch.groups, apart + 3 * scratch.groups,
          apart + 4 * scratch.groups};
}

// A row's given statistics on their way to the block that finishes it.
struct GivenStatistics {
  // Vectors of 4 groups that a thread has of each: all where they fit into shared memory.
  static constexpr int kHeld = kSharedGroups / 4 / kThreads;
  const float* maxima;
  int groups;
  float4 held_maxima[kHeld], held_sums[kHeld];

  __device__ float4 load(int kind, int vector) const {
    return __ldg(reinterpret_cast<const float4*>(maxima + kind * groups) + vector);
  }

  __device__ void ask_for(const float* group_stats, int vocab, int index) {
    groups = groups_of_stats(vocab);
    maxima = group_stats + int64_t{index} * 2 * groups;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int vector = static_cast<int>(threadIdx.x) + i * kThreads;
      if (4 * vector < groups) {
        held_maxima[i] = load(0, vector);
        held_sums[i] = load(1, vector);
      }
    }
  }

  // Leaves them as the first pass does its own. all: how many groups it has.
  __device__ void leave(const Statistics& at, int vocab, int all) const {
    const auto leave_vector = [&](int vector, const float4& maximum, const float4& sum) {
      const Vector given_maxima(maximum), given_sums(sum);
      float left[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float m = given_maxima[j], s = given_sums[j];
        const bool is_number = m == m && s == s;
        left[0][j] =
            piece_first(4 * vector + j, 0) < vocab ? (is_number ? m + 0.0f : kInf) : kNegInf;
        // 64 weights, one of them 1, are no less and no more, whatever is given.
        left[1][j] = fminf(fmaxf(s, 1.0f), static_cast<float>(kGroup));
      }
      for (int kind = 0; kind < 2; ++kind) {
        auto* to = reinterpret_cast<float4*>(kind == 0 ? at.maxima : at.sums);
        to[vector] = {left[kind][0], left[kind][1], left[kind][2], left[kind][3]};
      }
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int vector = static_cast<int>(threadIdx.x) + i * kThreads;
      if (4 * vector < all) leave_vector(vector, held_maxima[i], held_sums[i]);
    }
#pragma unroll 1
    for (int vector = static_cast<int>(threadIdx.x) + kHeld * kThreads; 4 * vector < all;
         vector += kThreads) {
      const bool there = 4 * vector < groups;
      const float4 nothing = {kNegInf, kNegInf, kNegInf, kNegInf};
      leave_vector(vector, there ? load(0, vector) : nothing, there ? load(1, vector) : nothing);
    }
  }
};
static_assert(groups_of_stats(1) % 4 == 0 && groups_of_stats(kGroup * 4 + 1) == 8);

// Whether the raw logits' statistics are all that a row wants.
__device__ inline bool raw_suffice(const Wishes& wishes, float scale) {
  return !wishes.split && !wishes.mean && (!wishes.total || scale == kLog2E);
}

// A block's part in a step. group_stats: of Informed logits.
template <class Logits>
__device__ __forceinline__ void step(const StepArguments& a,
                                     [[maybe_unused]] const float* group_stats) {
  Shared& shared = the_shared();
  grid_dependency_wait();
  grid_dependency_launch();
  if (a.late_cycles > 0 && static_cast<int>(blockIdx.x) / a.late_blocks == 1 &&
      a.slots[kBlocksOfMultiprocessor * a.late_blocks] >= 0) {
    wait_cycles(a.late_cycles);
  }
  const auto blocks = static_cast<unsigned>(a.blocks_of_row);
  const int index = static_cast<int>(blockIdx.x / blocks);
  const unsigned part = blockIdx.x % blocks;
  int32_t* out = a.output + int64_t{index} * a.layout.output_words();
  // Whoever the row belongs to: so they come beside what tells.
  [[maybe_unused]] GivenStatistics given_statistics = {};
  [[maybe_unused]] int32_t heeds_given = 1;
  if constexpr (Logits::kInformed) {
    if (part == 0) given_statistics.ask_for(group_stats, a.layout.vocab_size, index);
    if (a.given != nullptr) heeds_given = a.given[2];
  }
  const int32_t asked_grammar = ask_for_grammar(a);
  const int given_slot = a.slots[index];
  if constexpr (Logits::kInformed) {
    if (part == 0) keep_arguments(a);
  }
  const bool has_slot = given_slot >= 0 && given_slot < a.layout.max_requests;
  // Of few rows the logits are asked for before it is known whether the row has a slot.
  const bool early = !Logits::kInformed && a.rows <= kFewRows;
  if (!early && !has_slot) {
    if (part == 0) write_idle(a.layout, out, nullptr);
    return;
  }

  // In any case they are before it is known what is wanted of them.
  using Bits = typename Logits::Bits;
  const Bits* logits = static_cast<const Bits*>(a.logits) + index * a.logits_stride;
  const Source source = {logits, a.layout.vocab_size,
                         reinterpret_cast<uintptr_t>(logits) % 16 == 0};
  const ScratchLayout scratch(a.layout);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // A block's tiles lie side by side, its warps take them in turns.
  const int tiles = scratch.groups / kGroupsOfTile;
  const int tiles_of_block = ceil_div(tiles, a.blocks_of_row);
  const int first_tile = static_cast<int>(part) * tiles_of_block;
  const int end_tile = min(first_tile + tiles_of_block, tiles);
  const int tile = first_tile + warp;
  const int whole = tiles_to_load<Logits>(source);
  Set<Logits> sets[kSets] = {};
  const auto load_first = [&] {
    if (tile < min(end_tile, whole)) load_tile(source, tile, lane, sets);
  };
  if (early) load_first();
  if (!has_slot) {
    if (part == 0) write_idle(a.layout, out, nullptr);
    return;
  }
  const int slot = given_slot;
  // A lane has a word of each. Asked for after the logits they would come after them.
  const int32_t header = a.params[int64_t{slot} * a.layout.params_words() + lane];
  int32_t* state = a.state + int64_t{slot} * a.layout.state_words();
  const auto load_state = [&] { return lane < kStateRecent ? state[lane] : 0; };
  // A row that is not read may be finished before its other blocks have begun.
  [[maybe_unused]] int32_t state_word = !Logits::kInformed || part == 0 ? load_state() : 0;
  if (!early && !Logits::kInformed) load_first();
  const auto parameter = [&](int word) { return __shfl_sync(kAllLanes, header, word); };

  int32_t* row_scratch = a.scratch + int64_t{index} * scratch.words;
  auto* ticket = reinterpret_cast<unsigned*>(row_scratch) + ScratchLayout::kTicket;
  const int flags = parameter(kParamFlags);
  const bool clustered = a.in_shared && blocks > 1;
  const bool admitted = (flags & kAdmitted) != 0;
  [[maybe_unused]] bool is_read = true;
  if constexpr (Logits::kInformed) {
    const float scale = __int_as_float(parameter(kParamScale));
    const Wishes wishes = first_wishes(a.layout, has_grammar(asked_grammar), parameter);
    // A shuffle: a comparison would be made, and waited for, before all else is asked for.
    const bool heeded = __shfl_sync(kAllLanes, heeds_given, 0) != 0;
    is_read = !heeded || !raw_suffice(wishes, scale);
    if (is_read) {
      if (part > 0) state_word = load_state();
      load_first();
    } else if (part > 0) {
      // It counts as below, and of a cluster nobody waits for it.
      if (!clustered && threadIdx.x == 0) atomicInc(ticket, blocks - 1);
      return;
    }
  }
  if (!admitted || __shfl_sync(kAllLanes, state_word, kStateFinishReason) != 0) {
    if (part == 0) write_idle(a.layout, out, admitted ? state : nullptr);
    // All blocks of a row with a slot count, so that the count ends at 0 whatever happens to it;
    // and a cluster's stay while others may use their memory. Where rows share a slot, one may
    // finish it before another's blocks have all seen it.
    if (clustered) {
      for (int i = 0; i < 2; ++i) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
      }
    } else if (blocks > 1 && threadIdx.x == 0) {
      atomicInc(ticket, blocks - 1);
    }
    return;
  }
  if constexpr (Logits::kInformed) {
    if (!is_read) {
      if (blocks > 1 && !clustered && threadIdx.x == 0) atomicInc(ticket, blocks - 1);
      Wishes wishes = first_wishes(a.layout, has_grammar(asked_grammar), parameter);
      wishes.own = wishes.both = false;
      const bool in_shared = scratch.groups <= kSharedGroups;
      auto* apart = reinterpret_cast<float*>(row_scratch) + ScratchLayout::kHeader;
      const Statistics at = statistics_from(in_shared ? the_statistics() : apart, apart, scratch);
      begin_task(a, source, scratch, wishes, at, header, state_word, index, slot,
                 has_grammar(asked_grammar), in_shared, 1, 0);
      given_statistics.leave(at, source.vocab, scratch.groups);
      if (threadIdx.x == 4 * kWarp) {
        // If the statistics are wrong there may be nothing to find.
        shared.found = 0;
        shared.drawn_window = {0, 0, 1};
      }
      __syncthreads();
      finish_row<Logits>();
      return;
    }
  }
  // The first block's memory is written to only when that block is there.
  if (threadIdx.x == 0) shared.helpers = 0;
  if (clustered) {
    __syncwarp();
    cluster_arrive();
  }
  float* scratch_statistics = reinterpret_cast<float*>(row_scratch) + ScratchLayout::kHeader;
  float* statistics = scratch_statistics;
  if (a.in_shared) {
    // Those of the row's first block, which finishes it.
    statistics = the_statistics();
    if (part > 0) statistics = of_block(statistics, 0);
  }
  const Statistics at = statistics_from(statistics, scratch_statistics, scratch);
  Task& task = shared.task;
  const float scale = __int_as_float(parameter(kParamScale));
  // Greedy rows, and those with a top_k that a list holds, take no second pass as a rule.
  const int top_k = parameter(kParamTopK);
  const bool lists_suffice =
      top_k > 0 && top_k <= kMaxListedTopK && !(__int_as_float(parameter(kParamTopNSigma)) > 0.0f);
  const bool helped = clustered && (flags & kGreedy) == 0 && !lists_suffice;
  const Wishes wishes = first_wishes(a.layout, has_grammar(asked_grammar), parameter);
  keep_arguments(a);
  begin_task(a, source, scratch, wishes, at, header, state_word, index, slot,
             has_grammar(asked_grammar), a.in_shared, helped ? a.blocks_of_row : 1,
             a.in_shared ? a.blocks_of_row * kWarps : 0);
  if (clustered) {
    __syncwarp();
    cluster_wait();
  }
  if (helped && part > 0 && threadIdx.x == 0) atomicAdd(of_block(&shared.helpers, 0u), 1);
  Best best;
  // Where a multiprocessor's blocks do not read side by side, one alone asks for too little.
  const bool ahead = a.late_cycles > 0;
  if (wishes.split) {
    __syncthreads();
    best = stream_checked_tiles<Logits>(task.row, wishes, tile, kWarps, end_tile, whole, lane, at);
  } else {
    best = stream_tiles<false, Logits>(source, wishes, scale, tile, kWarps, end_tile, whole, lane,
                                       sets, at, ahead);
  }
  if (a.in_shared) {
    BestOfWarps* of_row = &shared.best;
    if (part > 0) of_row = of_block(of_row, 0);
    leave_best(best, of_row, static_cast<int>(part) * kWarps + warp, lane);
  }

  if (clustered) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (part > 0) {
      if (helped) help_finishing<Logits>();
      return;
    }
  } else {
    __syncthreads();
  }
  if (blocks > 1 && !clustered) {
    if (threadIdx.x == 0) {
      __threadfence();
      // The last one leaves 0 for the next step.
      shared.is_last = atomicInc(ticket, blocks - 1) == blocks - 1 ? 1 : 0;
      __threadfence();
    }
    __syncthreads();
    if (shared.is_last == 0) return;
  }
  if (!a.in_shared && scratch.groups <= kSharedGroups) {
    const auto* from = reinterpret_cast<const float4*>(statistics);
    auto* to = reinterpret_cast<float4*>(the_statistics());
    for (int i = static_cast<int>(threadIdx.x); i < kStatisticsInShared * scratch.groups / 4;
         i += kThreads) {
      to[i] = load_now(from + i);
    }
    if (threadIdx.x == 0) {
      float* own = the_statistics();
      task.at.maxima = own;
      task.at.sums = own + scratch.groups;
      task.in_shared = true;
    }
    __syncthreads();
  }
  finish_row<Logits>();
}

template <class Logits>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    sample_step_kernel(const __grid_constant__ StepArguments a) {
  step<Logits>(a, nullptr);
}

// The same with group_stats. A kernel of its own, so that the other one pays nothing for them.
template <class Logits>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    informed_step_kernel(const __grid_constant__ StepArguments a, const float* group_stats) {
  step<Informed<Logits>>(a, group_stats);
}

}  // namespace

int64_t sample_step_scratch_words(const TableLayout& layout, int64_t rows) {
  return rows * ScratchLayout(layout).words;
}

namespace {

// How a step is launched: it changes no result.
struct Plan {
  int blocks_of_row;
  bool in_shared;  // the blocks of a row are a cluster, whose first one's memory has the statistics
  size_t bytes;    // of shared memory
  int late_cycles, late_blocks;
};

// More rows than blocks fit at once come in waves, in which a multiprocessor's two blocks would
// read together and then finish together, with nothing being read. So the second one of the first
// wave begins later, by about half of what a row takes: 16 bytes a cycle, or 21 of fp32, of which
// more are on their way, is what a multiprocessor reads of it by its share of the memory. It does
// not pay for few bytes, nor, unless these are many, where the rows' waves are two and both full;
// nor if what follows the first wave is padding, which the kernel finds out.
inline int cycles_late(int rows, int at_once, int64_t row_bytes, int bytes_of_logit) {
  constexpr int64_t kFewBytes = 128000, kManyBytes = 384000;
  const bool two_full = rows > at_once * 7 / 4 && rows <= 2 * at_once;
  if (rows <= at_once || row_bytes < kFewBytes || (two_full && row_bytes < kManyBytes)) return 0;
  const int64_t cycles = bytes_of_logit == 4 ? row_bytes * 3 / 64 : row_bytes / 16;
  return static_cast<int>(std::min<int64_t>(cycles, 1 << 16));
}

template <class Kernel>
cudaError_t make_plan(Kernel kernel, const StepArguments& arguments, Plan* plan) {
  const TableLayout& layout = arguments.layout;
  const int rows = arguments.rows;
  const int tiles = tiles_of(layout.vocab_size);
  const int most_blocks = ceil_div(tiles, kWarps);
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  const int groups = groups_of(layout.vocab_size);
  const size_t bytes = shared_bytes(groups);
  error = allow_dynamic_shared(kernel, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  *plan = {static_cast<int>(std::min<int64_t>((kTargetBlocks + rows - 1) / rows, most_blocks)),
           false, bytes, 0, 1};
  if (groups > kSharedGroups) return cudaSuccess;
  const int blocks = blocks_of_cluster(rows, most_blocks);
  // Without clusters, or where the device has no place for one, a row's blocks take tickets.
  if (blocks > 1) {
    int clusters = 0;
    if (major < 9 || most_clusters(&clusters, kernel, kThreads, bytes, blocks) != cudaSuccess ||
        clusters == 0) {
      return cudaSuccess;
    }
  }
  *plan = {blocks, true, bytes, 0, 1};
  if (blocks > 1) return cudaSuccess;
  int bytes_of_multiprocessor = 0;
  error = cudaDeviceGetAttribute(&plan->late_blocks, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&bytes_of_multiprocessor,
                                   cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error != cudaSuccess) return error;
  // A block takes 1 KB more than it asks for.
  const bool both_fit =
      kBlocksOfMultiprocessor * (bytes + 1024) <= static_cast<size_t>(bytes_of_multiprocessor);
  if (both_fit) {
    const auto bytes_of_logit = static_cast<int>(bytes_of(arguments.logits_type));
    plan->late_cycles = cycles_late(rows, kBlocksOfMultiprocessor * plan->late_blocks,
                                    int64_t{layout.vocab_size} * bytes_of_logit, bytes_of_logit);
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_sample_step(const StepArguments& arguments, const float* group_stats,
                               bool programmatic, cudaStream_t stream) {
  const auto launch = [&](auto* kernel, auto... more) {
    Plan plan;
    const cudaError_t error = make_plan(kernel, arguments, &plan);
    if (error != cudaSuccess) return error;
    StepArguments chosen = arguments;
    chosen.blocks_of_row = plan.blocks_of_row;
    chosen.in_shared = plan.in_shared;
    // With statistics there is nothing to read, as a rule.
    chosen.late_cycles = group_stats == nullptr ? plan.late_cycles : 0;
    chosen.late_blocks = plan.late_blocks;
    // Blocks of a row lie side by side, so that rows are through one after the other.
    const dim3 grid(static_cast<unsigned>(int64_t{arguments.rows} * plan.blocks_of_row));
    return launch_kernel(kernel, grid, kThreads, plan.bytes, stream, programmatic,
                         plan.in_shared ? plan.blocks_of_row : 1, chosen, more...);
  };
  const auto launch_for = [&](auto logits) {
    using Logits = decltype(logits);
    return group_stats == nullptr ? launch(sample_step_kernel<Logits>)
                                  : launch(informed_step_kernel<Logits>, group_stats);
  };
  switch (arguments.logits_type) {
    case LogitsType::kFloat32:
      return launch_for(Float32());
    case LogitsType::kBFloat16:
      return launch_for(BFloat16());
    default:
      return launch_for(Float16());
  }
}

}  // namespace graphed_sampling
