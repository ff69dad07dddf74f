// A detector of data races, in a library of its own (`make races`).
//
// The kernels are compiled with -fsanitize=thread, which calls __tsan_read4() and its like before
// every access to memory. Those functions are here in place of the sanitizer's own: that knows of
// operating system threads, while the emulator's are fibers. Of every piece of memory they keep who
// accessed it last, and report two accesses that nothing orders, whichever came first by chance:
//
//   - Within a block only barriers order accesses, and within a warp __syncwarp() too. CUDA says of
//     shuffles, votes, matches and reductions that they order nothing.
//   - Between blocks an atomic does: what a block did before its atomic comes before what another
//     one does after an atomic on the same word. Fences are not looked at.
//   - Within a cluster its barrier does: what a thread did before cluster_arrive() comes before
//     what any thread does after the cluster_wait() that belongs to it.
//   - A gate does: what a thread did before gate_arrive(), and what its warp's lanes did before a
//     __syncwarp() in front of that, comes before what a thread of the block does behind
//     gate_wait() for that phase.
//
// Each of these orders by itself; orders that follow only from several of them together (an atomic
// behind the cluster's barrier, for another cluster) are not seen: what they order is reported.
//
// Two atomics are no race, nor is an atomic with a __ldcg(), which may poll it. Beside races these
// are found:
//
//   - plain reads of what another block of the launch has written, which may come from a cache that
//     does not know of it (a fence behind the atomic would do as well as __ldcg() does);
//   - __ldg() of what the launch writes;
//   - reads of __shared__ variables that the block has not written;
//   - __shared__ variables in clusters of several blocks, which share them here;
//   - accesses to another block's dynamic shared memory that may come after it has exited: nothing
//     orders them before its end.
//
// Only code that runs is checked, in whichever order its threads run.
#include "races.h"

#include <link.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>

#include "emulation.h"

namespace emulation::races {
namespace {

constexpr int kWarp = 32, kMaxWarps = 32, kMaxCluster = 16;

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t address) const { return address >= begin && address < end; }
};

Range range(const std::byte* begin, const std::byte* end) {
  return {reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(end)};
}

// Blocks are numbered from 1 on, through all launches, so what is left of earlier ones (or of
// nobody, 0) is recognised and need not be cleared.
struct Access {
  uint32_t block = 0;
  uint32_t barriers = 0;  // of the block, before
  uint32_t syncs = 0;     // of the lane, from 1 on
  uint32_t code = 0;      // from the library's start
  uint16_t thread : 12 = 0;
  Kind kind : 4 = Kind::kPlain;
  uint16_t arrivals = 0;  // at the cluster's barrier, of the thread, before

  int warp() const { return thread / kWarp; }
  int lane() const { return thread % kWarp; }
};

// A block of the running cluster, at its rank.
struct Block {
  uint32_t barriers;
  // known[warp][lane][other]: how far the other lane was, counted in its syncs from 1 on, with what
  // comes before anything that the lane does now.
  uint32_t known[kMaxWarps][kWarp][kWarp];
  // Of each thread, how often it has been at the cluster's barrier.
  uint16_t arrivals[kMaxWarps * kWarp], waits[kMaxWarps * kWarp];
  // What comes before anything that a thread does now, by gates: of every thread, in its syncs.
  // Empty until a gate is used.
  std::vector<std::array<uint32_t, kMaxWarps * kWarp>> behind_gates;
  Range shared;
  bool exited;
};

// All of it belongs to the launch that holds the emulator's mutex.
bool running = false;
Kind current_kind = Kind::kPlain;
Range stacks, dynamic_shared, image;  // dynamic_shared: of all blocks of the cluster
uintptr_t image_base = 0;
Block blocks[kMaxCluster];
Block* block = blocks;
int cluster_size = 1;
// Numbers of blocks: the running one, and the first ones of the launch and of the cluster.
uint32_t block_number = 0, first_block = 1, cluster_first = 1;
std::vector<uint3> block_indices;  // of the launch, from first_block on

// Accesses of one sort by one block between two barriers, enough of them that whoever races with
// any races with one of these (or, in warps that synchronise in parts, with nearly any): the first
// one, one of another thread of its warp, one of another warp. And the last one before of another
// block of the cluster.
class Recent {
  using Array = std::array<Access, 4>;

 public:
  void add(const Access& now) {
    if (first().block != now.block || first().barriers != now.barriers) {
      if (first().block == now.block || first().block < cluster_first) {
        accesses_ = Array{now, {}, {}, accesses_[3]};
      } else if (first().arrivals > now.arrivals) {
        accesses_[3] = now;  // what the cluster's barrier orders later stays
      } else {
        accesses_ = Array{now, {}, {}, first()};
      }
    } else if (first().warp() != now.warp()) {
      accesses_[2] = now;
    } else if (first().thread == now.thread || first().syncs < now.syncs) {
      accesses_[0] = now;
    } else {
      accesses_[1] = now;
    }
  }
  const Access& first() const { return accesses_[0]; }
  auto begin() const { return accesses_.begin(); }
  auto end() const { return accesses_.end(); }

 private:
  Array accesses_;
};

struct Cell {
  Recent writes, atomics, reads;
  Access constant;

  const Access& last_write() const {
    const Access &plain = writes.first(), &atomic = atomics.first();
    const bool of_cluster = plain.block >= cluster_first && atomic.block >= cluster_first;
    return of_cluster && plain.arrivals != atomic.arrivals
               ? (plain.arrivals > atomic.arrivals ? plain : atomic)
               : (plain.block > atomic.block ? plain : atomic);
  }
};

// Cells of 4 bytes each where no access has been narrower: that is most memory.
class Page {
 public:
  static constexpr int kBits = 12, kWidest = 2;
  static constexpr uintptr_t kBytes = uintptr_t{1} << kBits;

  Page() : cells_(kBytes >> kWidest) {}
  // The cells' width, after it was made to be no more than `most`; its logarithm.
  int narrow(int most) {
    if (most < width_) {
      std::vector<Cell> narrower(kBytes >> most);
      for (size_t i = 0; i < narrower.size(); ++i) narrower[i] = cells_[i >> (width_ - most)];
      cells_ = std::move(narrower);
      width_ = most;
    }
    return width_;
  }
  Cell& cell(uintptr_t address) { return cells_[(address & (kBytes - 1)) >> width_]; }
  size_t size() const { return cells_.size(); }
  const std::vector<Cell>& cells() const { return cells_; }
  int width() const { return width_; }

 private:
  int width_ = kWidest;
  std::vector<Cell> cells_;
};

enum class Rule {
  kBarrier,
  kSyncwarp,
  kBlocks,
  kCluster,
  kCached,
  kConstant,
  kUnwritten,
  kVariable,
  kExited,
};

// So many cells, of 260 bytes, may stay from launch to launch.
constexpr size_t kMostCells = size_t{1} << 21;

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
struct CachedPage {
  uintptr_t number = 0;
  Page* page = nullptr;
};
std::array<CachedPage, 256> page_cache;

// Of words, the last atomic of each block of the launch, or in shared memory of the cluster.
std::unordered_map<uintptr_t, std::vector<Access>> atomics;
// Of another block, its atomic and the first one after it of a block of the cluster.
struct Meeting {
  Access theirs, ours;
};
// By the numbers of both blocks.
std::unordered_map<uint64_t, std::vector<Meeting>> meetings;

// What comes before a gate's phase that is under way, and before the one that ended last, likewise.
struct Gate {
  std::array<uint32_t, kMaxWarps * kWarp> coming, passed;
};
std::unordered_map<const uint64_t*, Gate> gates;

std::vector<std::string> found;
std::set<std::tuple<Rule, uint32_t, uint32_t>> seen;

// Where the loader has put this library: __shared__ variables are static ones of it.
void find_image() {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void*) {
        Range range = {~uintptr_t{0}, 0};
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          range.begin = std::min(range.begin, begin);
          range.end = std::max(range.end, begin + segment.p_memsz);
        }
        if (!range.holds(reinterpret_cast<uintptr_t>(&running))) return 0;
        image = range;
        image_base = info->dlpi_addr;
        return 1;
      },
      nullptr);
}

Page& page_of(uintptr_t address) {
  const uintptr_t number = address >> Page::kBits;
  CachedPage& cached = page_cache[number % page_cache.size()];
  if (cached.page == nullptr || cached.number != number) {
    auto& page = pages[number];
    if (page == nullptr) page = std::make_unique<Page>();
    cached = {number, page.get()};
  }
  return *cached.page;
}

std::string describe(const Access& access, const char* verb) {
  const uint3 index = block_indices[access.block - first_block];
  char text[160];
  std::snprintf(text, sizeof(text), "thread %d of block (%u, %u, %u) %s at +0x%x", access.thread,
                index.x, index.y, index.z, verb, access.code);
  return text;
}

void report(Rule rule, const Access& earlier, bool earlier_writes, const Access& now, bool writes) {
  if (!seen.emplace(rule, earlier.code, now.code).second) return;
  static constexpr const char* kComplaints[] = {
      "no barrier between them",
      "no __syncwarp() between them",
      "no atomics of the two blocks between them",
      "no barrier of the cluster between them",
      "and not with __ldcg()",
      "and __ldg() is for what the launch leaves alone",
      "and the block has not written its variable",
      "and blocks of a cluster must have no __shared__ variables here",
      "and the block may have exited before",
  };
  const auto verb = [](const Access& access, bool does_write) {
    return access.kind == Kind::kAtomic     ? "has an atomic"
           : does_write                     ? "writes"
           : access.kind == Kind::kConstant ? "reads by __ldg()"
                                            : "reads";
  };
  found.push_back(describe(now, verb(now, writes)) + ", " +
                  describe(earlier, verb(earlier, earlier_writes)) + ": " +
                  kComplaints[static_cast<int>(rule)]);
}

// Whether both may touch the same memory at once.
bool compatible(const Access& a, const Access& b) {
  const auto shared_by_all = [](const Access& access) {
    return access.kind == Kind::kAtomic || access.kind == Kind::kCoherent;
  };
  return shared_by_all(a) && shared_by_all(b);
}

uint64_t pair_of(const Access& theirs, const Access& ours) {
  return uint64_t{theirs.block} << 32 | ours.block;
}

// Of another block: whether an atomic of it, and then one of this block, lie between.
bool blocks_have_met(const Access& earlier, const Access& now) {
  const auto all = meetings.find(pair_of(earlier, now));
  if (all == meetings.end()) return false;
  return std::any_of(all->second.begin(), all->second.end(), [&](const Meeting& meeting) {
    const auto& [theirs, ours] = meeting;
    return (earlier.barriers < theirs.barriers || earlier.thread == theirs.thread) &&
           (ours.barriers < now.barriers || ours.thread == now.thread);
  });
}

bool cluster_has_met(const Access& earlier, const Access& now) {
  return earlier.block >= cluster_first && earlier.arrivals < block->waits[now.thread];
}

bool gate_has_passed(const Access& earlier, const Access& now) {
  return earlier.block == now.block && !block->behind_gates.empty() &&
         earlier.syncs <= block->behind_gates[now.thread][earlier.thread];
}

void check(const Access& earlier, bool earlier_writes, const Access& now, bool writes,
           bool shared) {
  if (earlier.block < first_block || compatible(earlier, now)) return;
  if (cluster_has_met(earlier, now) || gate_has_passed(earlier, now)) return;
  if (earlier.block != now.block) {
    const bool of_cluster = earlier.block >= cluster_first;
    if ((of_cluster || !shared) && !blocks_have_met(earlier, now)) {
      report(of_cluster ? Rule::kCluster : Rule::kBlocks, earlier, earlier_writes, now, writes);
    }
  } else if (earlier.barriers == now.barriers && earlier.thread != now.thread) {
    if (earlier.warp() != now.warp()) {
      report(Rule::kBarrier, earlier, earlier_writes, now, writes);
    } else if (earlier.syncs > block->known[now.warp()][now.lane()][earlier.lane()]) {
      report(Rule::kSyncwarp, earlier, earlier_writes, now, writes);
    }
  }
}

void check_all(const Recent& earlier, bool earlier_writes, const Access& now, bool writes,
               bool shared) {
  if (earlier.first().block < first_block) return;
  for (const Access& one : earlier) check(one, earlier_writes, now, writes, shared);
}

void check_cell(Cell& cell, const Access& now, bool writes, bool shared, bool variable) {
  check_all(cell.writes, true, now, writes, shared);
  check_all(cell.atomics, true, now, writes, shared);
  const Access& last_write = cell.last_write();
  const bool was_written = last_write.block >= first_block;
  if (writes) {
    check_all(cell.reads, false, now, true, shared);
    if (cell.constant.block >= first_block) {
      report(Rule::kConstant, cell.constant, false, now, true);
    }
    (now.kind == Kind::kAtomic ? cell.atomics : cell.writes).add(now);
    return;
  }
  if (now.kind == Kind::kConstant) {
    if (was_written) report(Rule::kConstant, last_write, true, now, false);
    cell.constant = now;
    return;
  }
  if (was_written && last_write.block != now.block && now.kind == Kind::kPlain) {
    if (variable) {
      report(Rule::kUnwritten, last_write, true, now, false);
    } else if (!shared &&
               (last_write.block < cluster_first ||
                (blocks_have_met(last_write, now) && !cluster_has_met(last_write, now)))) {
      report(Rule::kCached, last_write, true, now, false);
    }
  }
  cell.reads.add(now);
}

void note_atomic(uintptr_t address, const Access& now) {
  std::vector<Access>& all = atomics[address];
  Access* own = nullptr;
  for (Access& theirs : all) {
    if (theirs.block == now.block) {
      own = &theirs;
      continue;
    }
    std::vector<Meeting>& met = meetings[pair_of(theirs, now)];
    const bool anew = met.empty() || met.back().theirs.barriers != theirs.barriers ||
                      met.back().theirs.thread != theirs.thread;
    if (anew) met.push_back({theirs, now});
  }
  if (own == nullptr) own = &all.emplace_back();
  *own = now;
}

bool is_of_exited_block(uintptr_t address) {
  if (block->shared.holds(address)) return false;
  return std::any_of(blocks, blocks + cluster_size,
                     [&](const Block& each) { return each.exited && each.shared.holds(address); });
}

void access(const volatile void* address, size_t bytes, bool writes, const void* code) {
  if (!running) return;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (stacks.holds(begin) || bytes == 0) return;
  if (address == &threadIdx.x) return;  // read all the time
  const auto thread = static_cast<uint16_t>(threadIdx.x);
  const int lane = thread % kWarp;
  const Access now = {block_number,
                      block->barriers,
                      block->known[thread / kWarp][lane][lane],
                      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - 1 - image_base),
                      thread,
                      current_kind,
                      block->arrivals[thread]};
  const bool variable = image.holds(begin), shared = variable || dynamic_shared.holds(begin);
  // One that changes nothing, such as a comparison that fails, could have.
  writes = writes || current_kind == Kind::kAtomic;
  if (cluster_size > 1 && shared) {
    if (variable && writes) report(Rule::kVariable, now, true, now, true);
    if (variable) return;
    if (is_of_exited_block(begin)) report(Rule::kExited, now, writes, now, writes);
  }
  if (current_kind == Kind::kAtomic && (!shared || cluster_size > 1)) note_atomic(begin, now);
  const int aligned = std::min(std::countr_zero(begin | bytes), Page::kWidest);
  for (uintptr_t at = begin; at < begin + bytes;) {
    Page& page = page_of(at);
    const int width = page.narrow(aligned);
    check_cell(page.cell(at), now, writes, shared, variable);
    at += uintptr_t{1} << width;
  }
}

}  // namespace

void start_launch(const std::byte* stacks_begin, const std::byte* stacks_end) {
  if (image.end == 0) find_image();
  stacks = range(stacks_begin, stacks_end);
  first_block += static_cast<uint32_t>(block_indices.size());
  block_indices.clear();
  atomics.clear();
  size_t cells = 0;
  for (const auto& [number, page] : pages) cells += page->size();
  if (cells > kMostCells) {
    pages.clear();
    page_cache = {};
  }
}

void start_cluster(int size) {
  cluster_size = size;
  cluster_first = first_block + static_cast<uint32_t>(block_indices.size());
  meetings.clear();
  if (size > 1) {
    std::erase_if(atomics, [](const auto& item) { return dynamic_shared.holds(item.first); });
  }
  dynamic_shared = {~uintptr_t{0}, 0};
  current_kind = Kind::kPlain;
  running = true;
}

void start_block(const uint3& index, const std::byte* shared_begin, const std::byte* shared_end) {
  const uint32_t number = first_block + static_cast<uint32_t>(block_indices.size());
  Block& started = blocks[number - cluster_first];
  block_indices.push_back(index);
  started.barriers = 0;
  started.exited = false;
  std::fill(std::begin(started.arrivals), std::end(started.arrivals), uint16_t{0});
  std::fill(std::begin(started.waits), std::end(started.waits), uint16_t{0});
  std::memset(started.known, 0, sizeof(started.known));
  started.behind_gates.clear();
  for (auto& lanes : started.known) {
    for (int lane = 0; lane < kWarp; ++lane) lanes[lane][lane] = 1;
  }
  started.shared = range(shared_begin, shared_end);
  dynamic_shared.begin = std::min(dynamic_shared.begin, started.shared.begin);
  dynamic_shared.end = std::max(dynamic_shared.end, started.shared.end);
}

void enter_block(unsigned rank) {
  block = &blocks[rank];
  block_number = cluster_first + rank;
}

// Accesses of others to its shared memory must come before: it is as if the exit wrote there.
void exit_block() {
  block->exited = true;
  if (cluster_size == 1) return;
  const uint16_t waits = *std::max_element(std::begin(block->waits), std::end(block->waits));
  Access now;
  now.block = block_number;
  now.barriers = ~0u;  // no thread of the block comes later
  const auto check_recent = [&](const Recent& recent, bool writes) {
    for (const Access& one : recent) {
      if (one.block < cluster_first || one.block == block_number) continue;
      if (one.arrivals >= waits && !blocks_have_met(one, now)) {
        report(Rule::kExited, one, writes, one, writes);
      }
    }
  };
  for (uintptr_t at = block->shared.begin; at < block->shared.end;) {
    const uintptr_t next = std::min((at | (Page::kBytes - 1)) + 1, block->shared.end);
    const auto page = pages.find(at >> Page::kBits);
    if (page != pages.end()) {
      const Page& held = *page->second;
      const uintptr_t start = at & ~(Page::kBytes - 1);
      for (size_t i = (at - start) >> held.width(); i < (next - start) >> held.width(); ++i) {
        check_recent(held.cells()[i].writes, true);
        check_recent(held.cells()[i].atomics, true);
        check_recent(held.cells()[i].reads, false);
      }
    }
    at = next;
  }
}

void end_cluster() { running = false; }

void meet_at_barrier() { ++block->barriers; }

void meet_at_syncwarp(int warp, uint32_t mask) {
  auto& lanes = block->known[warp];
  uint32_t all[kWarp] = {};
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const auto& lane = lanes[std::countr_zero(rest)];
    for (int other = 0; other < kWarp; ++other) all[other] = std::max(all[other], lane[other]);
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    std::memcpy(lanes[lane], all, sizeof(all));
    ++lanes[lane][lane];  // what it does from now on, the others do not know yet
  }
}

void arrive_at_cluster() { ++block->arrivals[threadIdx.x]; }

void wait_for_cluster() { ++block->waits[threadIdx.x]; }

void init_gate(const uint64_t* gate) {
  gates[gate] = {};
  if (block->behind_gates.empty()) block->behind_gates.resize(kMaxWarps * kWarp);
}

void arrive_at_gate(const uint64_t* gate) {
  auto& coming = gates.at(gate).coming;
  const unsigned thread = threadIdx.x, warp = thread / kWarp;
  const auto& behind = block->behind_gates[thread];
  auto& own = block->known[warp][thread % kWarp];
  for (size_t i = 0; i < coming.size(); ++i) coming[i] = std::max(coming[i], behind[i]);
  for (size_t i = 0; i < kWarp; ++i) {
    coming[warp * kWarp + i] = std::max(coming[warp * kWarp + i], own[i]);
  }
  ++own[thread % kWarp];  // what it does from now on, those behind the gate do not know
}

void end_phase_of_gate(const uint64_t* gate) {
  Gate& ended = gates.at(gate);
  ended.passed = ended.coming;
}

void pass_gate(const uint64_t* gate) {
  const auto& passed = gates.at(gate).passed;
  auto& behind = block->behind_gates[threadIdx.x];
  for (size_t i = 0; i < passed.size(); ++i) behind[i] = std::max(behind[i], passed[i]);
}

std::vector<std::string> take() {
  seen.clear();
  return std::exchange(found, {});
}

void set_kind(Kind kind) { current_kind = kind; }

}  // namespace emulation::races

// What -fsanitize=thread calls. Alignment is no concern here.

using emulation::races::access;

#define CODE __builtin_return_address(0)
#define ACCESSES(bytes)                                                                     \
  void __tsan_read##bytes(void* address) { access(address, bytes, false, CODE); }           \
  void __tsan_write##bytes(void* address) { access(address, bytes, true, CODE); }           \
  void __tsan_unaligned_read##bytes(void* address) { access(address, bytes, false, CODE); } \
  void __tsan_unaligned_write##bytes(void* address) { access(address, bytes, true, CODE); }

extern "C" {

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* address, size_t bytes) { access(address, bytes, false, CODE); }
void __tsan_write_range(void* address, size_t bytes) { access(address, bytes, true, CODE); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// The host's: kernels have CUDA's atomics.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_fetch_add(volatile int* address, int value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
}
