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
//
// Two atomics are no race, nor is an atomic with a __ldcg(), which may poll it. Beside races these
// are found:
//
//   - plain reads of what another block of the launch has written, which may come from a cache that
//     does not know of it (a fence behind the atomic would do as well as __ldcg() does);
//   - __ldg() of what the launch writes;
//   - reads of __shared__ variables that the block has not written.
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

constexpr int kWarp = 32, kMaxWarps = 32;

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t address) const { return address >= begin && address < end; }
};

// Blocks are numbered from 1 on, through all launches, so what is left of earlier ones (or of
// nobody, 0) is recognised and need not be cleared.
struct Access {
  uint32_t block = 0;
  uint32_t barriers = 0;  // of the block, before
  uint32_t syncs = 0;     // of the lane, from 1 on
  uint32_t code = 0;      // from the library's start
  uint16_t thread = 0;
  Kind kind = Kind::kPlain;

  int warp() const { return thread / kWarp; }
  int lane() const { return thread % kWarp; }
};

// Accesses of one sort by one block between two barriers, enough of them that whoever races with
// any races with one of these (or, in warps that synchronise in parts, with nearly any): the first
// one, one of another thread of its warp, one of another warp.
class Recent {
 public:
  void add(const Access& now) {
    if (first().block != now.block || first().barriers != now.barriers) {
      accesses_ = {now, {}, {}};
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
  std::array<Access, 3> accesses_;
};

struct Cell {
  Recent writes, atomics, reads;
  Access constant;

  const Access& last_write() const {
    return writes.first().block > atomics.first().block ? writes.first() : atomics.first();
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

 private:
  int width_ = kWidest;
  std::vector<Cell> cells_;
};

enum class Rule { kBarrier, kSyncwarp, kBlocks, kCached, kConstant, kUnwritten };

// So many cells, of 200 bytes, may stay from launch to launch.
constexpr size_t kMostCells = size_t{1} << 21;

// All of it belongs to the launch that holds the emulator's mutex.
bool running = false;
Kind current_kind = Kind::kPlain;
Range stacks, dynamic_shared, image;
uintptr_t image_base = 0;
uint32_t block = 0, first_block = 1, barriers = 0;
std::vector<uint3> block_indices;  // of the launch, from first_block on
// known[warp][lane][other]: how far the other lane was, counted in its syncs from 1 on, with what
// comes before anything that the lane does now.
uint32_t known[kMaxWarps][kWarp][kWarp];

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
struct CachedPage {
  uintptr_t number = 0;
  Page* page = nullptr;
};
std::array<CachedPage, 256> page_cache;

// Of words in global memory, the last atomic of each block of the launch.
std::unordered_map<uintptr_t, std::vector<Access>> atomics;
// Of an earlier block, its atomic and the one of the running block that came after it.
struct Meeting {
  Access theirs, ours;
};
std::unordered_map<uint32_t, Meeting> meetings;

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
      "and not with __ldcg()",
      "and __ldg() is for what the launch leaves alone",
      "and the block has not written its variable",
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

// Of an earlier block of the launch: whether an atomic of it, and then one of this block, lie
// between.
bool blocks_have_met(const Access& earlier, const Access& now) {
  const auto meeting = meetings.find(earlier.block);
  if (meeting == meetings.end()) return false;
  const auto& [theirs, ours] = meeting->second;
  return (earlier.barriers < theirs.barriers || earlier.thread == theirs.thread) &&
         (ours.barriers < now.barriers || ours.thread == now.thread);
}

void check(const Access& earlier, bool earlier_writes, const Access& now, bool writes,
           bool shared) {
  if (earlier.block < first_block || compatible(earlier, now)) return;
  if (earlier.block != now.block) {
    if (!shared && !blocks_have_met(earlier, now)) {
      report(Rule::kBlocks, earlier, earlier_writes, now, writes);
    }
  } else if (earlier.barriers == now.barriers && earlier.thread != now.thread) {
    if (earlier.warp() != now.warp()) {
      report(Rule::kBarrier, earlier, earlier_writes, now, writes);
    } else if (earlier.syncs > known[now.warp()][now.lane()][earlier.lane()]) {
      report(Rule::kSyncwarp, earlier, earlier_writes, now, writes);
    }
  }
}

void check_all(const Recent& earlier, bool earlier_writes, const Access& now, bool writes,
               bool shared) {
  const Access& first = earlier.first();
  if (first.block < first_block) return;
  if (first.block == now.block && first.barriers != now.barriers) return;
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
    } else if (!shared) {
      report(Rule::kCached, last_write, true, now, false);
    }
  }
  cell.reads.add(now);
}

void note_atomic(uintptr_t address, const Access& now) {
  std::vector<Access>& all = atomics[address];
  for (const Access& theirs : all) {
    if (theirs.block != now.block) meetings.try_emplace(theirs.block, Meeting{theirs, now});
  }
  if (all.empty() || all.back().block != now.block) all.emplace_back();
  all.back() = now;
}

void access(const volatile void* address, size_t bytes, bool writes, const void* code) {
  if (!running) return;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (stacks.holds(begin) || bytes == 0) return;
  if (address == &threadIdx.x) return;  // read all the time
  const auto thread = static_cast<uint16_t>(threadIdx.x);
  const int lane = thread % kWarp;
  const Access now = {block,
                      barriers,
                      known[thread / kWarp][lane][lane],
                      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code) - 1 - image_base),
                      thread,
                      current_kind};
  const bool variable = image.holds(begin), shared = variable || dynamic_shared.holds(begin);
  // One that changes nothing, such as a comparison that fails, could have.
  writes = writes || current_kind == Kind::kAtomic;
  if (current_kind == Kind::kAtomic && !shared) note_atomic(begin, now);
  const int aligned = std::min(std::countr_zero(begin | bytes), Page::kWidest);
  for (uintptr_t at = begin; at < begin + bytes;) {
    Page& page = page_of(at);
    const int width = page.narrow(aligned);
    check_cell(page.cell(at), now, writes, shared, variable);
    at += uintptr_t{1} << width;
  }
}

}  // namespace

void start_launch(const std::byte* stacks_begin, const std::byte* stacks_end,
                  const std::byte* dynamic_shared_begin, const std::byte* dynamic_shared_end) {
  const auto range = [](const std::byte* begin, const std::byte* end) {
    return Range{reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(end)};
  };
  if (image.end == 0) find_image();
  stacks = range(stacks_begin, stacks_end);
  dynamic_shared = range(dynamic_shared_begin, dynamic_shared_end);
  first_block = block + 1;
  block_indices.clear();
  atomics.clear();
  size_t cells = 0;
  for (const auto& [number, page] : pages) cells += page->size();
  if (cells > kMostCells) {
    pages.clear();
    page_cache = {};
  }
}

void start_block() {
  ++block;
  barriers = 0;
  block_indices.push_back(blockIdx);
  meetings.clear();
  std::memset(known, 0, sizeof(known));
  for (auto& lanes : known) {
    for (int lane = 0; lane < kWarp; ++lane) lanes[lane][lane] = 1;
  }
  current_kind = Kind::kPlain;
  running = true;
}

void end_block() { running = false; }

void meet_at_barrier() { ++barriers; }

void meet_at_syncwarp(int warp, uint32_t mask) {
  auto& lanes = known[warp];
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
