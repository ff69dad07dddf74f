#include "emulation.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// EMULATION_UCONTEXT may be defined from outside, to test that way on x86-64 too.
#if !defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
#define EMULATION_UCONTEXT
#endif
#ifdef EMULATION_UCONTEXT
#include <ucontext.h>
#endif

namespace emulation {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxCluster = 16;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMaxDynamicShared = 227 << 10;
// What a launch may have without cudaFuncSetAttribute.
constexpr size_t kDefaultDynamicShared = 48 << 10;

constexpr const char* kNames[] = {
    "nothing",           "__syncthreads",     "__syncthreads_count", "__syncthreads_or",
    "__syncthreads_and", "cluster_wait",      "__syncwarp",          "__shfl_sync",
    "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",     "__ballot_sync",
    "__any_sync",        "__all_sync",        "__match_any_sync",    "__match_all_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",   "__reduce_min_sync",
    "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",    "__reduce_xor_sync",
};
static_assert(std::size(kNames) == static_cast<size_t>(Collective::kReduceXor) + 1);

// Fibers: a suspended one is its stack pointer.

#ifdef EMULATION_UCONTEXT
using Context = ucontext_t;

void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

void start_context(Context& context, std::byte* stack, std::byte* top, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = static_cast<size_t>(top - stack);
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#else
using Context = void*;

extern "C" void graphed_sampling_switch_stack(void** from, void* to);
// Saves what a call must leave as it was. The modes of mxcsr and of the x87 are the same
// everywhere.
asm(R"(
.pushsection .text
.p2align 4
.hidden graphed_sampling_switch_stack
.globl graphed_sampling_switch_stack
.type graphed_sampling_switch_stack, @function
graphed_sampling_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size graphed_sampling_switch_stack, . - graphed_sampling_switch_stack
.popsection
)");

void switch_context(Context& from, Context& to) { graphed_sampling_switch_stack(&from, to); }

void start_context(Context& context, std::byte*, std::byte* top, void (*entry)()) {
  // Six registers, where to go, and the address that `entry` would return to: after `ret` the
  // stack lies as after a call, 8 bytes off a multiple of 16.
  auto** frame = reinterpret_cast<void**>(top) - 8;
  std::fill_n(frame, 8, nullptr);
  frame[6] = reinterpret_cast<void*>(entry);
  context = frame;
}
#endif

// What a fiber of an earlier launch that was not resumed has left on its stack is no fault.
void forget_stack([[maybe_unused]] std::byte* begin, [[maybe_unused]] std::byte* end) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(begin, static_cast<size_t>(end - begin));
#endif
}

// Memory with an inaccessible page below every part of it, and one behind the last. Parts are
// inaccessible too until they are opened.
class GuardedMemory {
 public:
  GuardedMemory(size_t parts, size_t bytes) {
    guard_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    stride_ = guard_ + (bytes + guard_ - 1) / guard_ * guard_;
    const size_t total = parts * stride_ + guard_;
    void* memory =
        mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<std::byte*>(memory);
  }
  // The first so many parts, and those that were open before.
  void open(size_t parts) {
    for (; opened_ < parts; ++opened_) protect(opened_, PROT_READ | PROT_WRITE);
  }
  void open_again(size_t part) { protect(part, PROT_READ | PROT_WRITE); }
  void close(size_t part) { protect(part, PROT_NONE); }
  std::byte* begin(size_t part) const { return start_ + part * stride_ + guard_; }
  std::byte* end(size_t part) const { return start_ + (part + 1) * stride_; }

 private:
  void protect(size_t part, int protection) {
    if (mprotect(begin(part), stride_ - guard_, protection) != 0) throw std::bad_alloc();
  }

  size_t guard_, stride_, opened_ = 0;
  std::byte* start_;
};

struct Lane {
  Context context;
  Site site;
  Collective waits_at;
  uint32_t mask;
};

// Lanes that wait for each other. There is more than one only in warps that have diverged.
struct Group {
  uint32_t mask;
  uint32_t arrived;
  Collective kind;
  uint8_t bytes;
};

struct Warp {
  Lane lanes[kWarp];
  uint64_t values[kWarp];  // what lanes brought along
  uint64_t results[kWarp];
  int arguments[kWarp], widths[kWarp];
  Group groups[kWarp];
  int group_count;
  uint32_t ready, yielded, at_barrier, gone;
  // Of the cluster's barrier: who has arrived and not yet waited; for whom of those it is complete;
  // who is waiting.
  uint32_t arrived, passed, at_cluster;
};

struct Barrier {
  Collective kind;
  int arrived;
  int count;  // predicates that were true
  int result;
};

// A block of the running cluster, at its rank.
struct Block {
  Warp warps[kMaxThreads / kWarp];
  Barrier barrier;
  int ended_count;
  uint3 index;
  std::byte *shared_begin, *shared_end;
  bool closed;  // to everybody, since the block has exited
};

struct Generator {
  uint64_t state = 0;
  uint32_t next() {  // PCG
    const uint64_t old = state;
    state = old * 6364136223846793005u + 1442695040888963407u;
    return std::rotr(static_cast<uint32_t>((old >> 18 ^ old) >> 27), static_cast<int>(old >> 59));
  }
  uint32_t below(uint32_t end) {
    return static_cast<uint32_t>(static_cast<uint64_t>(next()) * end >> 32);
  }
  template <class T>
  void shuffle(T* items, size_t count) {
    for (size_t i = count; i > 1; --i)
      std::swap(items[i - 1], items[below(static_cast<uint32_t>(i))]);
  }
};

// All of it belongs to the launch that holds the mutex.
std::mutex launch_mutex;
bool shuffled = false;
Generator generator;
std::map<const void*, size_t> dynamic_shared_limits;
cudaError_t last_error = cudaSuccess;
int most_clusters_number = 1000;

Block blocks[kMaxCluster];
int block_count = 1;
Block* block = blocks;  // of the running fiber
Context scheduler;
Warp* warp = nullptr;  // of the running fiber
int warp_number = 0, lane_number = 0;
int thread_count = 0, warp_count = 0;        // of a block
int cluster_arrived = 0, cluster_ended = 0;  // threads
Invoke kernel_invoke = nullptr;
const void* kernel_closure = nullptr;
GuardedMemory* shared_memory = nullptr;
int64_t gates_made = 0, first_block_waits = 0;
bool has_yielded = false;  // somebody, since the block was entered
std::string failure;
bool failed = false;
// In shuffled order: the lanes that were ready when the warp's turn began.
uint8_t turn[kWarp];
int turn_position = 0, turn_count = 0;

unsigned running_rank() { return static_cast<unsigned>(block - blocks); }

void enter_block(unsigned rank) {
  block = &blocks[rank];
  blockIdx = block->index;
  races::enter_block(rank);
}

uint32_t lane_bit() { return 1u << lane_number; }

void become(int lane) {
  lane_number = lane;
  threadIdx.x = static_cast<unsigned>(warp_number * kWarp + lane);
  warp->ready &= ~lane_bit();
}

// The next lane of the warp in the order of this turn; -1 where the turn is over.
int next_lane() {
  if (shuffled) return turn_position < turn_count ? turn[turn_position++] : -1;
  if (warp->ready == 0) return -1;
  const uint32_t behind = warp->ready & ~((lane_bit() << 1) - 1);
  return std::countr_zero(behind != 0 ? behind : warp->ready);
}

// Has others run, the warp's next lane at once, until somebody makes this one ready.
void suspend() {
  Context& own = warp->lanes[lane_number].context;
  const int next = failed ? -1 : next_lane();
  if (next < 0) {
    switch_context(own, scheduler);
  } else {
    become(next);
    switch_context(own, warp->lanes[next].context);
  }
}

std::string describe(const Site& site) {
  std::ostringstream text;
  text << " (" << site.file_name() << ":" << site.line() << ")";
  return text.str();
}

std::string hexadecimal(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

std::string describe_call(Collective kind, uint32_t mask, const Site& site) {
  std::string text = kNames[static_cast<int>(kind)];
  if (kind >= Collective::kSyncWarp) text += " of mask " + hexadecimal(mask);
  return text + describe(site);
}

// Ends the launch. An exception must not leave the fiber: the scheduler throws it.
[[noreturn, gnu::cold, gnu::noinline]] void fail(const std::string& what) {
  failure = "thread " + std::to_string(threadIdx.x) + " " + what;
  failed = true;
  suspend();
  std::abort();  // a fiber that has failed is not resumed
}

void finish_barrier() {
  Barrier& barrier = block->barrier;
  barrier.result = barrier.kind == Collective::kSyncThreadsCount ? barrier.count
                   : barrier.kind == Collective::kSyncThreadsAnd ? barrier.count == barrier.arrived
                                                                 : barrier.count != 0;
  barrier.arrived = barrier.count = 0;
  races::meet_at_barrier();
  for (int i = 0; i < warp_count; ++i) {
    block->warps[i].ready |= block->warps[i].at_barrier;
    block->warps[i].at_barrier = 0;
  }
}

// Where the last thread has arrived or ended.
void finish_cluster_barrier() {
  if (cluster_arrived == 0 || cluster_arrived + cluster_ended < block_count * thread_count) return;
  cluster_arrived = 0;
  for (int rank = 0; rank < block_count; ++rank) {
    for (int i = 0; i < warp_count; ++i) {
      Warp& each = blocks[rank].warps[i];
      each.passed = each.arrived;
      each.ready |= each.at_cluster;
      each.at_cluster = 0;
    }
  }
}

// Whose shared memory others must not touch any more.
void end_block() {
  races::exit_block();
  if (block_count == 1) return;
  shared_memory->close(running_rank());
  block->closed = true;
}

template <class Function>
void for_each(uint32_t mask, Function function) {
  for (; mask != 0; mask &= mask - 1) function(std::countr_zero(mask));
}

template <class Source>
void shuffle_values(uint32_t mask, Source source_of) {
  for_each(mask, [&](int lane) {
    const int width = warp->widths[lane], first = lane & -width;
    const int source = source_of(lane, warp->arguments[lane] & 31, first, first + width - 1);
    // CUDA leaves the value of a lane outside the mask undefined: all ones, a NaN.
    warp->results[lane] = mask >> source & 1 ? warp->values[source] : ~uint64_t{0};
  });
}

// As PTX defines shfl: the argument's low five bits count, and a lane whose source lies outside its
// segment keeps its own value; except that xor may reach the segments before.
void finish_shuffle(const Group& group) {
  switch (group.kind) {
    case Collective::kShuffle:
      shuffle_values(group.mask, [](int, int argument, int first, int last) {
        return first | (argument & (last - first));
      });
      break;
    case Collective::kShuffleUp:
      shuffle_values(group.mask, [](int lane, int argument, int first, int) {
        return lane - argument >= first ? lane - argument : lane;
      });
      break;
    case Collective::kShuffleDown:
      shuffle_values(group.mask, [](int lane, int argument, int, int last) {
        return lane + argument <= last ? lane + argument : lane;
      });
      break;
    default:
      shuffle_values(group.mask, [](int lane, int argument, int, int last) {
        return (lane ^ argument) <= last ? lane ^ argument : lane;
      });
  }
}

void finish_match(const Group& group) {
  for_each(group.mask, [&](int lane) {
    uint64_t matches = 0;
    for_each(group.mask, [&](int other) {
      if (warp->values[other] == warp->values[lane]) matches |= uint64_t{1} << other;
    });
    if (group.kind == Collective::kMatchAll && matches != group.mask) matches = 0;
    warp->results[lane] = matches;
  });
}

void finish_reduction(const Group& group) {
  const auto operand = [](int lane) { return static_cast<uint32_t>(warp->values[lane]); };
  uint32_t result = operand(std::countr_zero(group.mask));
  const auto fold = [&](auto operation) {
    for_each(group.mask & (group.mask - 1),
             [&](int lane) { result = operation(result, operand(lane)); });
  };
  switch (group.kind) {
    case Collective::kBallot:
      result = 0;
      for_each(group.mask, [&](int lane) { result |= operand(lane) << lane; });
      break;
    case Collective::kAny:
    case Collective::kReduceOr:
      fold([](uint32_t a, uint32_t b) { return a | b; });
      break;
    case Collective::kAll:
    case Collective::kReduceAnd:
      fold([](uint32_t a, uint32_t b) { return a & b; });
      break;
    case Collective::kReduceXor:
      fold([](uint32_t a, uint32_t b) { return a ^ b; });
      break;
    case Collective::kReduceAdd:
      fold([](uint32_t a, uint32_t b) { return a + b; });
      break;
    case Collective::kReduceMin:
      fold([](uint32_t a, uint32_t b) { return std::min(a, b); });
      break;
    case Collective::kReduceMax:
      fold([](uint32_t a, uint32_t b) { return std::max(a, b); });
      break;
    case Collective::kReduceMinSigned:
      fold([](uint32_t a, uint32_t b) {
        return static_cast<uint32_t>(std::min(static_cast<int>(a), static_cast<int>(b)));
      });
      break;
    default:
      fold([](uint32_t a, uint32_t b) {
        return static_cast<uint32_t>(std::max(static_cast<int>(a), static_cast<int>(b)));
      });
  }
  for_each(group.mask, [&](int lane) { warp->results[lane] = result; });
}

void finish_group(const Group& group) {
  switch (group.kind) {
    case Collective::kSyncWarp:
      break;
    case Collective::kShuffle:
    case Collective::kShuffleUp:
    case Collective::kShuffleDown:
    case Collective::kShuffleXor:
      finish_shuffle(group);
      break;
    case Collective::kMatchAny:
    case Collective::kMatchAll:
      finish_match(group);
      break;
    default:
      finish_reduction(group);
  }
}

// A lane that exits: nobody may count on it any more.
void end_lane() {
  if ((warp->arrived & lane_bit()) != 0) fail("ends between cluster_arrive and cluster_wait");
  warp->gone |= lane_bit();
  ++block->ended_count;
  ++cluster_ended;
  for (int i = 0; i < warp->group_count; ++i) {
    const Group& group = warp->groups[i];
    if ((group.mask & lane_bit()) == 0) continue;
    const int waiting = std::countr_zero(group.arrived);
    const Lane& other = warp->lanes[waiting];
    fail("ends while lane " + std::to_string(waiting) + " of its warp waits for it at " +
         describe_call(other.waits_at, other.mask, other.site));
  }
  const int at_barrier = block->barrier.arrived;
  if (at_barrier > 0 && at_barrier + block->ended_count == thread_count) finish_barrier();
  finish_cluster_barrier();
  if (block->ended_count == thread_count) end_block();
}

// noexcept: there is nothing below this frame that could catch.
void fiber_main() noexcept {
  kernel_invoke(kernel_closure);
  end_lane();
  suspend();
  std::abort();
}

// One visit of a warp. In ascending order it goes as far as it can without the others.
bool run_warp(int index) {
  warp = &block->warps[index];
  warp_number = index;
  const bool progress = (warp->ready | warp->yielded) != 0;
  lane_number = kWarp - 1;  // so that the first lane is next
  turn_position = turn_count = 0;
  if (shuffled) {
    for_each(warp->ready, [](int lane) { turn[turn_count++] = static_cast<uint8_t>(lane); });
    generator.shuffle(turn, static_cast<size_t>(turn_count));
  }
  if (const int first = next_lane(); first >= 0) {
    become(first);
    switch_context(scheduler, warp->lanes[first].context);
    if (failed) throw std::runtime_error(failure);
  }
  warp->ready |= warp->yielded;
  warp->yielded = 0;
  return progress;
}

// Who of a block waits where, neighbours that wait at the same place together.
void describe_threads(const Block& waiting, std::ostringstream& text) {
  const auto lane_of = [&](int thread) -> const Lane& {
    return waiting.warps[thread / kWarp].lanes[thread % kWarp];
  };
  const auto has_ended = [&](int thread) {
    return (waiting.warps[thread / kWarp].gone >> (thread % kWarp) & 1) != 0;
  };
  for (int first = 0, end = 0; first < thread_count; first = end) {
    const auto same = [&](int thread) {
      const Lane &a = lane_of(first), &b = lane_of(thread);
      if (has_ended(first) || has_ended(thread)) return has_ended(first) && has_ended(thread);
      return a.waits_at == b.waits_at && a.mask == b.mask && a.site.line() == b.site.line();
    };
    for (end = first + 1; end < thread_count && same(end);) ++end;
    text << (end - first > 1 ? "; threads " : "; thread ") << first;
    if (end - first > 1) text << "-" << end - 1;
    const Lane& lane = lane_of(first);
    text << (has_ended(first) ? " ended"
                              : " at " + describe_call(lane.waits_at, lane.mask, lane.site));
  }
}

[[noreturn]] void fail_for_deadlock() {
  std::ostringstream text;
  text << "deadlock: no thread can run";
  for (int rank = 0; rank < block_count; ++rank) {
    if (block_count > 1) text << "; in the cluster's block " << rank;
    describe_threads(blocks[rank], text);
  }
  throw std::runtime_error(text.str());
}

void start_block(int rank, const GuardedMemory& stacks) {
  Block& started_block = blocks[rank];
  started_block.barrier = {};
  started_block.ended_count = 0;
  for (int index = 0; index < warp_count; ++index) {
    Warp& started = started_block.warps[index];
    const int lanes = std::min(thread_count - index * kWarp, kWarp);
    started.ready = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    started.gone = ~started.ready;
    started.at_barrier = started.yielded = 0;
    started.arrived = started.passed = started.at_cluster = 0;
    started.group_count = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const auto fiber = static_cast<size_t>(rank * thread_count + index * kWarp + lane);
      // Tops at various places of a page, lest they all compete for the same lines of the cache.
      std::byte* top = stacks.end(fiber) - fiber * 192 % 4096;
      forget_stack(stacks.begin(fiber), stacks.end(fiber));
      start_context(started.lanes[lane].context, stacks.begin(fiber), top, fiber_main);
    }
  }
}

// Visits of a block's warps, again and again: in ascending order as long as it can go on without
// other blocks, which is quicker than to take turns, else for a while.
bool run_block(int rank) {
  enter_block(static_cast<unsigned>(rank));
  std::array<uint8_t, kMaxThreads / kWarp> order;
  std::iota(order.begin(), order.end(), uint8_t{0});
  bool any_progress = false, progress = true;
  has_yielded = false;
  for (uint32_t rounds = shuffled ? 1 + generator.below(8) : ~0u;
       progress && !has_yielded && rounds > 0; --rounds) {
    if (shuffled) generator.shuffle(order.data(), static_cast<size_t>(warp_count));
    progress = false;
    for (int i = 0; i < warp_count; ++i) progress |= run_warp(order[static_cast<size_t>(i)]);
    any_progress |= progress;
  }
  return any_progress;
}

void run_cluster(const GuardedMemory& stacks) {
  cluster_arrived = cluster_ended = 0;
  failed = false;
  for (int rank = 0; rank < block_count; ++rank) start_block(rank, stacks);
  std::array<uint8_t, kMaxCluster> order;
  std::iota(order.begin(), order.end(), uint8_t{0});
  while (cluster_ended < block_count * thread_count) {
    if (shuffled) generator.shuffle(order.data(), static_cast<size_t>(block_count));
    bool progress = false;
    for (int i = 0; i < block_count; ++i) progress |= run_block(order[static_cast<size_t>(i)]);
    if (!progress) fail_for_deadlock();
  }
}

// While it lives, a thread that touches the shared memory of a block that has exited fails, where
// else the process would end. The kernel's code is what the signal interrupts, so the handler may
// do what a collective may, and need not return.
class WatchForExitedBlocks {
 public:
  WatchForExitedBlocks() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before_);
  }
  ~WatchForExitedBlocks() { sigaction(SIGSEGV, &before_, nullptr); }
  WatchForExitedBlocks(const WatchForExitedBlocks&) = delete;
  WatchForExitedBlocks& operator=(const WatchForExitedBlocks&) = delete;

 private:
  static void handle(int, siginfo_t* info, void*) {
    for (int rank = 0; rank < block_count; ++rank) {
      const Block& other = blocks[rank];
      if (info->si_addr >= other.shared_begin && info->si_addr < other.shared_end && other.closed) {
        fail("touches shared memory of the cluster's block " + std::to_string(rank) +
             ", which has exited");
      }
    }
    // Anything else happens again on return, and is no business of this one.
    sigaction(SIGSEGV, &before_, nullptr);
  }

  inline static struct sigaction before_;
};

cudaError_t check_shape(const void* kernel, int threads, size_t dynamic_shared_bytes, int cluster) {
  if (threads < 1 || threads > kMaxThreads || cluster < 1 || cluster > kMaxCluster) {
    return cudaErrorInvalidConfiguration;
  }
  const auto limit = dynamic_shared_limits.find(kernel);
  const size_t allowed = limit == dynamic_shared_limits.end() ? 0 : limit->second;
  return dynamic_shared_bytes > std::max(kDefaultDynamicShared, allowed) ? cudaErrorInvalidValue
                                                                         : cudaSuccess;
}

}  // namespace

void set_order(uint64_t seed) {
  const std::lock_guard lock(launch_mutex);
  shuffled = seed != 0;
  generator.state = seed;
  generator.next();
}

int wait_for_block(Collective kind, bool predicate, Site site) {
  Barrier& barrier = block->barrier;
  if (barrier.arrived > 0 && barrier.kind != kind) {
    fail("is at " + describe_call(kind, 0, site) + " while others wait at " +
         kNames[static_cast<int>(barrier.kind)]);
  }
  barrier.kind = kind;
  barrier.count += predicate;
  ++barrier.arrived;
  if (barrier.arrived + block->ended_count == thread_count) {
    finish_barrier();
  } else {
    Lane& lane = warp->lanes[lane_number];
    lane.waits_at = kind;
    lane.mask = 0;
    lane.site = site;
    warp->at_barrier |= lane_bit();
    suspend();
  }
  return barrier.result;
}

uint64_t wait_for_warp(Collective kind, uint32_t mask, uint64_t value, int bytes, int argument,
                       int width, Site site) {
  const auto complain = [&](const std::string& what) __attribute__((cold, noinline)) {
    fail("is at " + describe_call(kind, mask, site) + what);
  };
  const uint32_t bit = lane_bit();
  if ((mask & bit) == 0) complain(", which leaves out its own lane");
  if ((mask & warp->gone) != 0) {
    complain(" with lanes that have ended or never were, " + hexadecimal(mask & warp->gone));
  }
  if (width < 1 || width > kWarp || !std::has_single_bit(static_cast<unsigned>(width))) {
    complain(" with width " + std::to_string(width));
  }
  warp->values[lane_number] = value;
  warp->arguments[lane_number] = argument;
  warp->widths[lane_number] = width;

  int index = 0;
  while (index < warp->group_count && warp->groups[index].mask != mask) ++index;
  if (index == warp->group_count) {
    warp->groups[warp->group_count++] = {mask, 0, kind, static_cast<uint8_t>(bytes)};
  }
  Group& group = warp->groups[index];
  if (group.kind != kind || group.bytes != bytes) {
    complain(std::string(" while others wait at ") + kNames[static_cast<int>(group.kind)] +
             " of the same mask" + (group.kind == kind ? " with operands of another size" : ""));
  }
  for (int i = 0; warp->group_count > 1 && i < warp->group_count; ++i) {
    const Group& other = warp->groups[i];
    if (i == index || (other.mask & bit) == 0 || (other.arrived & mask) == 0) continue;
    // Each waits for the other.
    complain(" while lanes " + hexadecimal(other.arrived & mask) + " wait at " +
             kNames[static_cast<int>(other.kind)] + " of another mask, " + hexadecimal(other.mask));
  }

  group.arrived |= bit;
  if (group.arrived == mask) {
    finish_group(group);
    if (kind == Collective::kSyncWarp) {
      races::meet_at_syncwarp(warp_number, mask);
    }
    group = warp->groups[--warp->group_count];
    warp->ready |= mask & ~bit;
  } else {
    Lane& lane = warp->lanes[lane_number];
    lane.waits_at = kind;
    lane.mask = mask;
    lane.site = site;
    suspend();
  }
  return warp->results[lane_number];
}

void yield() {
  warp->yielded |= lane_bit();
  has_yielded = true;
  suspend();
}

int64_t count_gates() { return gates_made; }

int64_t count_first_block_waits() { return first_block_waits; }

// count | missing << 16 | phase << 32
void gate_init(uint64_t* gate, unsigned count) {
  ++gates_made;
  *gate = count | uint64_t{count} << 16;
  races::init_gate(gate);
}

void gate_end(uint64_t* gate) { *gate = ~uint64_t{0}; }

void gate_arrive(uint64_t* gate) {
  races::arrive_at_gate(gate);
  *gate -= uint64_t{1} << 16;
  if ((*gate >> 16 & 0xFFFF) != 0) return;
  races::end_phase_of_gate(gate);
  *gate += (*gate & 0xFFFF) << 16 | uint64_t{1} << 32;
}

bool gate_passed(const uint64_t* gate, unsigned parity) {
  if ((*gate >> 32 & 1) == parity) return false;
  races::pass_gate(gate);
  return true;
}

void trap(const char* message, Site site) { fail(std::string("met ") + message + describe(site)); }

void* dynamic_shared() { return block->shared_begin; }

unsigned cluster_size() { return static_cast<unsigned>(block_count); }

unsigned cluster_rank() { return running_rank(); }

void cluster_arrive(Site site) {
  if ((warp->arrived & lane_bit()) != 0) {
    fail("is at cluster_arrive" + describe(site) + " again, without cluster_wait");
  }
  races::arrive_at_cluster();
  warp->arrived |= lane_bit();
  ++cluster_arrived;
  finish_cluster_barrier();
}

void cluster_wait(Site site) {
  if ((warp->arrived & lane_bit()) == 0) {
    fail("is at cluster_wait" + describe(site) + " without cluster_arrive");
  }
  if ((warp->passed & lane_bit()) == 0) {
    Lane& lane = warp->lanes[lane_number];
    lane.waits_at = Collective::kClusterWait;
    lane.mask = 0;
    lane.site = site;
    warp->at_cluster |= lane_bit();
    suspend();
  }
  if (block_count > 1 && cluster_rank() == 0) ++first_block_waits;
  races::wait_for_cluster();
  warp->arrived &= ~lane_bit();
  warp->passed &= ~lane_bit();
}

void* address_of_block(const volatile void* mine, unsigned rank, Site site) {
  const auto complain = [&](const std::string& what) {
    fail("asks by of_block" + describe(site) + " for " + what);
  };
  auto* place = static_cast<std::byte*>(const_cast<void*>(mine));
  if (rank >= cluster_size()) complain("block " + std::to_string(rank) + " of a smaller cluster");
  if (rank == running_rank()) return place;
  if (place < block->shared_begin || place > block->shared_end) {
    complain("what is not in its dynamic shared memory");
  }
  const Block& other = blocks[rank];
  if (other.closed) {
    complain("shared memory of the cluster's block " + std::to_string(rank) + ", which has exited");
  }
  return other.shared_begin + (place - block->shared_begin);
}

cudaError_t set_dynamic_shared_limit(const void* kernel, int bytes) {
  const std::lock_guard lock(launch_mutex);
  if (bytes < 0 || static_cast<size_t>(bytes) > kMaxDynamicShared) {
    return last_error = cudaErrorInvalidValue;
  }
  dynamic_shared_limits[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

void set_most_clusters(int number) {
  const std::lock_guard lock(launch_mutex);
  most_clusters_number = number;
}

cudaError_t count_clusters(int* number, const void* kernel, int threads,
                           size_t dynamic_shared_bytes, int cluster) {
  const std::lock_guard lock(launch_mutex);
  const cudaError_t error = check_shape(kernel, threads, dynamic_shared_bytes, cluster);
  *number = error == cudaSuccess ? most_clusters_number : 0;
  return error;
}

cudaError_t run_grid(const void* kernel, Invoke invoke, const void* closure, dim3 grid, int threads,
                     size_t dynamic_shared_bytes, int cluster) {
  static GuardedMemory stacks(kMaxCluster * kMaxThreads, kStackBytes);
  // The end of a part is that of what was asked for: what lies behind it is no memory.
  static GuardedMemory shared(kMaxCluster, kMaxDynamicShared);
  const std::lock_guard lock(launch_mutex);
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7FFFFFFF || grid.y > 65535 ||
      grid.z > 65535 || cluster < 1 || grid.x % static_cast<unsigned>(cluster) != 0) {
    return last_error = cudaErrorInvalidConfiguration;
  }
  const cudaError_t error = check_shape(kernel, threads, dynamic_shared_bytes, cluster);
  if (error != cudaSuccess) return last_error = error;
  const auto size = static_cast<unsigned>(cluster);
  const auto fibers = static_cast<size_t>(cluster * threads);
  stacks.open(fibers);
  shared.open(size);
  races::start_launch(stacks.begin(0), stacks.end(fibers - 1));
  kernel_invoke = invoke;
  kernel_closure = closure;
  block_count = cluster;
  thread_count = threads;
  warp_count = (threads + kWarp - 1) / kWarp;
  shared_memory = &shared;
  threadIdx = {};
  gridDim = grid;
  blockDim = dim3(static_cast<unsigned>(threads));
  std::optional<WatchForExitedBlocks> watch;
  if (cluster > 1) watch.emplace();

  const unsigned in_x = grid.x / size;
  const uint64_t clusters = uint64_t{in_x} * grid.y * grid.z;
  std::vector<uint64_t> order;
  if (shuffled) {
    order.resize(clusters);
    std::iota(order.begin(), order.end(), uint64_t{0});
    generator.shuffle(order.data(), clusters);
  }
  for (uint64_t i = 0; i < clusters; ++i) {
    const uint64_t number = shuffled ? order[i] : i;
    races::start_cluster(cluster);
    for (unsigned rank = 0; rank < size; ++rank) {
      Block& each = blocks[rank];
      each.index = {static_cast<unsigned>(number % in_x) * size + rank,
                    static_cast<unsigned>(number / in_x % grid.y),
                    static_cast<unsigned>(number / in_x / grid.y)};
      if (std::exchange(each.closed, false)) shared.open_again(rank);
      each.shared_end = shared.end(rank);
      each.shared_begin = each.shared_end - (dynamic_shared_bytes + 15) / 16 * 16;
      std::fill(each.shared_begin, each.shared_end, std::byte{0xFF});
      races::start_block(each.index, each.shared_begin, each.shared_end);
    }
    enter_block(0);
    try {
      run_cluster(stacks);
      races::end_cluster();
    } catch (const std::runtime_error& error) {
      races::end_cluster();
      std::ostringstream text;
      text << "kernel block (" << blockIdx.x << ", " << blockIdx.y << ", " << blockIdx.z << "): ";
      throw std::runtime_error(text.str() + error.what());
    }
  }
  return cudaSuccess;
}

}  // namespace emulation

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess             ? "no error"
         : error == cudaErrorInvalidValue ? "invalid argument"
                                          : "invalid configuration argument";
}

cudaError_t cudaGetLastError() {
  const std::lock_guard lock(emulation::launch_mutex);
  return std::exchange(emulation::last_error, cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  // A small Hopper: grids that fill the device stay short.
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t count, cudaStream_t) {
  std::memset(memory, value, count);
  return cudaSuccess;
}
