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
#include "sample_step.h"
#include "step/finish.h"

namespace graphed_sampling {
namespace {

// With so many blocks every multiprocessor has work until the end, and streams while others finish
// rows. Fewer, which read more each, wait less often for each other.
constexpr int64_t kTargetBlocks = 512;

template <class Logits>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    sample_step_kernel(const __grid_constant__ StepArguments a) {
  Shared& shared = the_shared();
  grid_dependency_wait();
  grid_dependency_launch();
  const auto blocks = static_cast<unsigned>(a.blocks_of_row);
  const int index = static_cast<int>(blockIdx.x / blocks);
  const unsigned part = blockIdx.x % blocks;
  int32_t* out = a.output + int64_t{index} * a.layout.output_words();
  const int given_slot = a.slots[index];
  const bool has_slot = given_slot >= 0 && given_slot < a.layout.max_requests;
  // Of few rows the logits are asked for before it is known whether the row has a slot.
  const bool early = a.rows <= kFewRows;
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
  const int whole = tiles_to_load(source);
  Set<Logits> sets[kSets] = {};
  const auto load_first = [&] {
    if (tile < min(end_tile, whole)) {
#pragma unroll
      for (int i = 0; i < kSets; ++i) sets[i] = load_set<Logits>(source, tile, i, lane);
    }
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
  const int32_t state_word = lane < kStateRecent ? state[lane] : 0;
  if (!early) load_first();
  const auto parameter = [&](int word) { return __shfl_sync(kAllLanes, header, word); };

  int32_t* row_scratch = a.scratch + int64_t{index} * scratch.words;
  auto* ticket = reinterpret_cast<unsigned*>(row_scratch) + ScratchLayout::kTicket;
  const int flags = parameter(kParamFlags);
  const bool clustered = a.in_shared && blocks > 1;
  const bool admitted = (flags & kAdmitted) != 0;
  if (!admitted || __shfl_sync(kAllLanes, state_word, kStateFinishReason) != 0) {
    if (part == 0) write_idle(a.layout, out, admitted ? state : nullptr);
    // All blocks of a row with a slot count, so that the count ends at 0 whatever happens to it;
    // and a cluster's stay while others may use their memory. Where rows share a slot, one may
    // finish it before another's blocks have all seen it.
    if (clustered) {
      for (int i = 0; i < 2; ++i) {
        cluster_arrive();
        cluster_wait();
      }
    } else if (blocks > 1 && threadIdx.x == 0) {
      atomicInc(ticket, blocks - 1);
    }
    return;
  }
  // The first block's memory is written to only when that block is there.
  if (clustered) cluster_arrive();
  float* scratch_statistics = reinterpret_cast<float*>(row_scratch) + ScratchLayout::kHeader;
  float* statistics = scratch_statistics;
  if (a.in_shared) {
    // Those of the row's first block, which finishes it.
    statistics = the_statistics();
    if (part > 0) statistics = of_block(statistics, 0);
  }
  const Statistics at = {
      statistics, statistics + scratch.groups, scratch_statistics + 2 * scratch.groups,
      scratch_statistics + 3 * scratch.groups, scratch_statistics + 4 * scratch.groups};
  Task& task = shared.task;
  const float scale = __int_as_float(parameter(kParamScale));
  // Greedy rows, and those with top_k, take no second pass.
  const bool helped = clustered && (flags & kGreedy) == 0 && parameter(kParamTopK) <= 0;
  const Wishes wishes = first_wishes(a, flags, parameter(kParamTopLogprobs), scale);
  begin_task(a, source, scratch, wishes, at, header, state_word, index, slot, a.in_shared,
             helped ? a.blocks_of_row : 1);
  if (clustered) cluster_wait();
  if (wishes.split) {
    __syncthreads();
    stream_checked_tiles<Logits>(task.row, wishes, tile, kWarps, end_tile, whole, lane, at);
  } else {
    stream_tiles<Logits>(source, wishes, scale, tile, kWarps, end_tile, whole, lane, sets, at);
  }

  if (clustered) {
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
};

template <class Kernel>
cudaError_t make_plan(Kernel kernel, const TableLayout& layout, int rows, Plan* plan) {
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
           false, bytes};
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
  *plan = {blocks, true, bytes};
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_sample_step(const StepArguments& arguments, bool programmatic,
                               cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(StepArguments)) {
    Plan plan;
    const cudaError_t error = make_plan(kernel, arguments.layout, arguments.rows, &plan);
    if (error != cudaSuccess) return error;
    StepArguments chosen = arguments;
    chosen.blocks_of_row = plan.blocks_of_row;
    chosen.in_shared = plan.in_shared;
    // Blocks of a row lie side by side, so that rows are through one after the other.
    const dim3 grid(static_cast<unsigned>(int64_t{arguments.rows} * plan.blocks_of_row));
    return launch_kernel(kernel, grid, kThreads, plan.bytes, stream, programmatic,
                         plan.in_shared ? plan.blocks_of_row : 1, chosen);
  };
  switch (arguments.logits_type) {
    case LogitsType::kFloat32:
      return launch(sample_step_kernel<Float32>);
    case LogitsType::kBFloat16:
      return launch(sample_step_kernel<BFloat16>);
    default:
      return launch(sample_step_kernel<Float16>);
  }
}

}  // namespace graphed_sampling
