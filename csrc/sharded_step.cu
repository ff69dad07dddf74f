// A step of a vocabulary that is sharded over devices
//
// The devices of a group are to a row what the blocks of a cluster are in sample_step.cu. Each
// streams its own shard and stores the statistics of groups into the exchange buffers of all ranks;
// then each finishes the row by itself, from the same statistics, and reads the few tokens that it
// looks at again where they lie. So all ranks come to the same bits, and nobody tells the others
// what was drawn.
//
// Groups are streamed by sets. Sets that have tokens of several shards are streamed by whoever
// finishes the row, as part of finishing it. So the bits are those of one device which has all
// logits, wherever shards begin.
//
// A rank's memory is read by others until they have finished their rows, so its step does not end
// before that. Then what was sent has been read too, and the next step may write over it.
//
// Where all blocks are there at once, a launch does all of it: its rows' blocks wait for those of
// other ranks. Elsewhere there are two, of which the first one waits for nobody.
#include "sharded_step.h"
#include "step/exchange.h"

namespace graphed_sampling {
namespace {

// Which of the rank's groups a block streams: those of tiles [first, end), of which the outer ones
// may have a set of another's.
struct Part {
  int first, end, first_set, end_set;

  __device__ Part(const ShardedArguments& s, int part, int blocks) {
    const int first_tile = s.first_set / kSets;
    const int tiles = s.first_set < s.end_set ? ceil_div(s.end_set, kSets) - first_tile : 0;
    const int each = ceil_div(tiles, blocks);
    first = min(part * each, tiles) + first_tile;
    end = min((part + 1) * each, tiles) + first_tile;
    first_set = max(first * kSets, s.first_set);
    end_set = min(end * kSets, s.end_set);
  }
};

// Waits for all ranks' statistics of the row, and takes them. False if one of them did not come.
template <class Logits>
__device__ inline bool receive(const ShardedArguments& s, const ExchangeLayout& exchange, int index,
                               uint64_t signal, const Wishes& wishes, const Statistics& at) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  int32_t* own = s.exchange[s.rank];
  int32_t* record = own + exchange.row(index);
  bool failed = false;
  if (thread < s.ranks) {
    failed =
        !wait_for(s, signal_of_rank(record, thread), signal_of_rank(own + exchange.row(0), thread),
                  signal, thread, kFinishPhase, index);
  }
  // The task is known behind the barrier.
  if (__syncthreads_or(failed ? 1 : 0) != 0) return false;
  const Task& task = the_shared().task;
  // The last warps begin with what is far away.
  for (int i = kWarps - 1 - warp; i < s.num_split_sets; i += kWarps) {
    stream_one_set<Sharded<Logits>>(task.row, wishes, s.split_sets[i], lane, at, {});
  }
  if (task.in_shared) {
    constexpr int kAhead = 4;
    const auto* from = reinterpret_cast<const float4*>(record + ExchangeLayout::kSignals);
    auto* to = reinterpret_cast<float4*>(at.maxima);
    const int number = kStatisticsInShared * exchange.groups / 4;
    for (int begin = thread; begin < number; begin += kAhead * kThreads) {
      float4 values[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int i = begin + k * kThreads;
        if (i < number) values[k] = load_now(from + i);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int i = begin + k * kThreads;
        const int set = 4 * i % exchange.groups / kGroupsOfSet;
        bool is_split = i >= number;
        for (int j = 0; j < s.num_split_sets; ++j) is_split = is_split || s.split_sets[j] == set;
        if (!is_split) to[i] = values[k];
      }
    }
  }
  __syncthreads();
  return true;
}

// A thread a rank waits until that one is through with the step, and then the step is over. By one
// block, when all of the rank's others are through.
__device__ inline void close_step(const ShardedArguments& s, uint64_t signal) {
  int32_t* own = s.exchange[s.rank];
  const int thread = static_cast<int>(threadIdx.x);
  bool failed = false;
  if (thread < s.ranks) {
    const uint64_t* done = signal_of_rank(own + ExchangeLayout::kDone, thread);
    failed = !wait_for(s, done, done, signal, thread, kClosePhase, 0);
  }
  failed = __syncthreads_or(failed ? 1 : 0) != 0;
  if (thread == 0) {
    if (failed) {
      own[ExchangeLayout::kSilent] = 1;
    } else {
      own[ExchangeLayout::kClosed] = static_cast<int32_t>(signal);
    }
  }
}

template <class Logits>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    sharded_step_kernel(const __grid_constant__ StepArguments a,
                        const __grid_constant__ ShardedArguments s) {
  Shared& shared = the_shared();
  grid_dependency_wait();
  grid_dependency_launch();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  int32_t* own = s.exchange[s.rank];
  const bool streams = (s.phases & kStreamPhase) != 0, finishes = (s.phases & kFinishPhase) != 0;
  const auto this_signal = [&] {
    const auto step = static_cast<uint32_t>(load_now(own + ExchangeLayout::kClosed)) + 1;
    return signal_of(step, a.rows);
  };
  if (!streams && !finishes) {
    close_step(s, this_signal());
    return;
  }
  const auto blocks = static_cast<unsigned>(a.blocks_of_row);
  const int index = static_cast<int>(blockIdx.x / blocks);
  const unsigned part = blockIdx.x % blocks;
  int32_t* out = a.output + int64_t{index} * a.layout.output_words();
  const int32_t asked_grammar = ask_for_grammar(a);
  const int slot = a.slots[index];
  const bool has_slot = slot >= 0 && slot < a.layout.max_requests;
  const bool early = a.rows <= kFewRows;

  // Where the rank's own shard would have token 0. Of other tokens than its own nothing is loaded.
  constexpr int64_t kBytes = sizeof(typename Logits::Bits);
  const int64_t row_bytes = index * a.logits_stride * kBytes;
  const auto row_of_rank = [&](int rank) {
    return s.logits[rank] + static_cast<uintptr_t>(row_bytes - s.starts[rank] * kBytes);
  };
  const Source source = {reinterpret_cast<const void*>(row_of_rank(s.rank)), a.layout.vocab_size,
                         row_of_rank(s.rank) % 16 == 0};
  const Part mine(s, static_cast<int>(part), static_cast<int>(blocks));
  // Outer tiles that are not whole are a set each, at the end of their warp's work.
  const bool half_first = mine.first < mine.end && mine.first * kSets < mine.first_set;
  const bool half_last = mine.first < mine.end && mine.end * kSets > mine.end_set;
  const int end_tile = half_last ? mine.end - 1 : mine.end;
  const int tile = mine.first + warp + (half_first && warp == 0 ? kWarps : 0);
  const int whole = tiles_to_load<Logits>(source);
  Set<Logits> sets[kSets] = {};
  const auto load_first = [&] {
    if (streams && tile < min(end_tile, whole)) load_tile(source, tile, lane, sets);
  };
  if (early) load_first();
  int32_t header = 0, state_word = 0;
  int32_t* state = nullptr;
  if (has_slot) {
    header = a.params[int64_t{slot} * a.layout.params_words() + lane];
    state = a.state + int64_t{slot} * a.layout.state_words();
    if (lane < kStateRecent) state_word = state[lane];
    if (!early) load_first();
  }
  const auto parameter = [&](int word) { return __shfl_sync(kAllLanes, header, word); };
  const int flags = parameter(kParamFlags);
  const bool admitted = (flags & kAdmitted) != 0;
  const bool live = admitted && __shfl_sync(kAllLanes, state_word, kStateFinishReason) == 0;
  // Nobody waits for an idle row's other blocks: the step may be closed before they begin.
  const uint64_t signal = live || part == 0 ? this_signal() : 0;
  if (live) {
    const ScratchLayout scratch(a.layout);
    const ExchangeLayout exchange(a.layout);
    const int groups = exchange.groups;
    const bool in_shared = groups <= kSharedGroups;
    auto* record = reinterpret_cast<float*>(own + exchange.row(index) + ExchangeLayout::kSignals);
    float* statistics = in_shared ? the_statistics() : record;
    const Statistics at = {statistics, statistics + groups, record + 2 * groups,
                           record + 3 * groups, record + 4 * groups};
    const float scale = __int_as_float(parameter(kParamScale));
    const bool grammar = has_grammar(asked_grammar);
    const Wishes wishes = first_wishes(a.layout, grammar, parameter);
    keep_arguments(a);
    begin_task(a, source, scratch, wishes, at, header, state_word, index, slot, grammar, in_shared,
               1, 0);
    if (thread <= s.ranks) shared.shards.starts[thread] = s.starts[thread];
    if (thread < s.ranks) shared.shards.rows[thread] = row_of_rank(thread);
    if (streams) {
      if (wishes.split) {
        __syncthreads();
        stream_checked_tiles<Logits>(shared.task.row, wishes, tile, kWarps, end_tile, whole, lane,
                                     at);
      } else {
        stream_tiles<false, Logits>(source, wishes, scale, tile, kWarps, end_tile, whole, lane,
                                    sets, at);
        if (half_first || half_last) __syncthreads();
      }
      if (half_first && warp == 0) {
        stream_one_set<Logits>(shared.task.row, wishes, mine.first_set, lane, at, {});
      }
      if (half_last && warp == (end_tile - mine.first) % kWarps) {
        stream_one_set<Logits>(shared.task.row, wishes, mine.end_set - 1, lane, at, {});
      }
      __syncthreads();
      // Who has given up sends nothing, so that the others do too.
      const bool silent = load_now(own + ExchangeLayout::kSilent) != 0;
      if (!silent) {
        send_statistics(s, exchange.row(index), groups, mine.first_set * kGroupsOfSet,
                        mine.end_set * kGroupsOfSet, wishes, at);
      }
      if (blocks > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
      } else {
        __syncthreads();
      }
      if (part == 0 && thread < s.ranks && !silent) {
        store_release(signal_of_rank(s.exchange[thread] + exchange.row(index), s.rank), signal);
      }
    }
    if (finishes && part == 0) {
      if (receive<Logits>(s, exchange, index, signal, wishes, at)) {
        finish_row<Sharded<Logits>>();
      } else {
        write_idle(a.layout, out, nullptr);
      }
    }
  } else if (finishes && part == 0) {
    write_idle(a.layout, out, admitted ? state : nullptr);
  }

  if (!finishes || part > 0) return;
  __syncthreads();
  if (a.rows > 1) {
    if (thread == 0) {
      __threadfence();
      auto* ticket = reinterpret_cast<unsigned*>(own) + ExchangeLayout::kTicket;
      const auto last = static_cast<unsigned>(a.rows - 1);
      shared.is_last = atomicInc(ticket, last) == last ? 1 : 0;
      __threadfence();
    }
    __syncthreads();
    if (shared.is_last == 0) return;
  }
  if (thread < s.ranks && !has_failed(own)) {
    store_release(signal_of_rank(s.exchange[thread] + ExchangeLayout::kDone, s.rank), signal);
  }
  if ((s.phases & kClosePhase) != 0) close_step(s, signal);
}

// Which sets of tokens a rank has all of, and which nobody has.
void assign_sets(const TableLayout& layout, ShardedArguments* s) {
  constexpr int kSet = kTile / kSets;
  const int vocab = layout.vocab_size, sets = tiles_of(vocab) * kSets;
  const int start = s->starts[s->rank], end = s->starts[s->rank + 1];
  // Those behind the vocabulary belong to who has its last token.
  s->first_set = ceil_div(start, kSet);
  s->end_set = end == vocab && start < end ? sets : end / kSet;
  s->num_split_sets = 0;
  for (int i = 1; i < s->ranks; ++i) {
    const int set = s->starts[i] / kSet;
    if (s->starts[i] == vocab || s->starts[i] % kSet == 0) continue;
    if (s->num_split_sets > 0 && s->split_sets[s->num_split_sets - 1] == set) continue;
    s->split_sets[s->num_split_sets++] = set;
  }
}

}  // namespace

int64_t sharded_exchange_words(const TableLayout& layout, int64_t rows) {
  return ExchangeLayout(layout).row(rows);
}

cudaError_t launch_sharded_step(const StepArguments& arguments, const ShardedArguments& sharded,
                                bool programmatic, cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(StepArguments, ShardedArguments)) {
    StepArguments a = arguments;
    ShardedArguments s = sharded;
    assign_sets(a.layout, &s);
    const size_t bytes = shared_bytes(groups_of(a.layout.vocab_size));
    cudaError_t error = allow_dynamic_shared(kernel, static_cast<int>(bytes));
    int device = 0, major = 0;
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error != cudaSuccess) return error;
    // How many clusters of so many blocks there are at once. Devices before 9.0 have none.
    const auto clusters_of = [&](int blocks) {
      int clusters = 0;
      if (major < 9) return 0;
      return most_clusters(&clusters, kernel, kThreads, bytes, blocks) == cudaSuccess ? clusters
                                                                                      : 0;
    };
    const int sets = std::max(s.end_set - s.first_set, 1);
    int blocks = blocks_of_cluster(a.rows, ceil_div(ceil_div(sets, kSets), kWarps));
    int clusters = clusters_of(blocks);
    if (blocks > 1 && clusters == 0) {
      blocks = 1;
      clusters = clusters_of(blocks);
    }
    const auto enqueue = [&](int phases, int blocks_of_row) {
      s.phases = phases;
      a.blocks_of_row = blocks_of_row;
      const int64_t all = phases == kClosePhase ? 1 : int64_t{a.rows} * blocks_of_row;
      return launch_kernel(kernel, dim3(static_cast<unsigned>(all)), kThreads, bytes, stream,
                           programmatic, blocks_of_row, a, s);
    };
    const int phases = sharded.phases;
    const bool streams = (phases & kStreamPhase) != 0;
    // A block that waits must not take the place of one that others wait for.
    if (phases == kStreamPhase || (streams && clusters >= a.rows)) return enqueue(phases, blocks);
    if (streams) error = enqueue(kStreamPhase, blocks);
    return error == cudaSuccess ? enqueue(phases & ~kStreamPhase, 1) : error;
  };
  switch (arguments.logits_type) {
    case LogitsType::kFloat32:
      return launch(sharded_step_kernel<Float32>);
    case LogitsType::kBFloat16:
      return launch(sharded_step_kernel<BFloat16>);
    default:
      return launch(sharded_step_kernel<Float16>);
  }
}

}  // namespace graphed_sampling
