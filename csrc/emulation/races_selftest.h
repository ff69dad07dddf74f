// Kernels with races, and kernels without, which the detector must tell apart.
#pragma once

#include <string>
#include <vector>

#include "selftest.h"

namespace graphed_sampling::selftest {

// Races must be found, all with that complaint. An empty complaint: none must be.
template <class... P, class... A>
void expect_cluster_race(const std::string& complaint, const char* what, void (*kernel)(P...),
                         int blocks, int cluster, A... arguments) {
  constexpr int kThreads = 64;
  emulation::races::take();
  run_cluster(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, cluster, arguments...);
  const std::vector<std::string> races = emulation::races::take();
  expect(races.empty() == complaint.empty(),
         std::string(what) + ": " + (races.empty() ? "no race was found" : races.front()));
  for (const std::string& race : races) {
    expect(race.find(complaint) != std::string::npos, std::string(what) + ": " + race);
  }
}

template <class... P, class... A>
void expect_race(const std::string& complaint, const char* what, void (*kernel)(P...), int blocks,
                 A... arguments) {
  expect_cluster_race(complaint, what, kernel, blocks, 1, arguments...);
}

enum class Between { kNothing, kBarrier, kSyncwarp, kHalves, kShuffle };

// Every thread reads what another one, so many threads away, writes before or afterwards.
template <Between kBetween, bool kReadsFirst>
__global__ void neighbours_kernel(int* results, int distance) {
  __shared__ int buffer[64];
  const int thread = static_cast<int>(threadIdx.x);
  int value = 0;
  buffer[thread] = thread;
  if (kReadsFirst) {
    __syncthreads();
    value = buffer[thread ^ distance];
  }
  if (kBetween == Between::kBarrier) __syncthreads();
  if (kBetween == Between::kSyncwarp) __syncwarp();
  if (kBetween == Between::kHalves) __syncwarp(thread % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u);
  if (kBetween == Between::kShuffle) results[64 + thread] = __shfl_xor_sync(kAll, thread, 1);
  if (kReadsFirst) {
    buffer[thread] = -1;
  } else {
    value = buffer[thread ^ distance];
  }
  results[thread] = value;
}

template <Between kBetween>
void expect_neighbours_race(int distance, const std::string& complaint) {
  int results[128];
  expect_race(complaint, "write, then read", neighbours_kernel<kBetween, false>, 1, results,
              distance);
  expect_race(complaint, "read, then write", neighbours_kernel<kBetween, true>, 1, results,
              distance);
}

__global__ void some_write_kernel(int* result, int distance) {
  if (static_cast<int>(threadIdx.x) % distance == 0) *result = 1;
}

// Bytes and half words beside each other are not the same memory.
__global__ void narrow_kernel(uint8_t* bytes, uint16_t* halves) {
  bytes[threadIdx.x] = 1;
  halves[threadIdx.x] = 1;
}

enum class Count { kWell, kClearedLate, kReadEarly };

template <Count kCount>
__global__ void count_kernel(int* results) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  if (kCount != Count::kClearedLate) __syncthreads();
  atomicAdd(&count, 1);
  if (kCount != Count::kReadEarly) __syncthreads();
  results[blockIdx.x * blockDim.x + threadIdx.x] = count;
}

__global__ void unwritten_kernel(int* results) {
  __shared__ int value;
  results[blockIdx.x * blockDim.x + threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x == 0) value = 1;
}

enum class Finish { kWell, kPlainRead, kConstantRead, kNoTicket, kNoBarrier };

// The block that is last reads what the first one has written.
template <Finish kFinish>
__global__ void last_block_kernel(int* values, int* results, unsigned* ticket) {
  __shared__ bool is_last;
  values[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (kFinish != Finish::kNoBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    is_last = kFinish == Finish::kNoTicket ? blockIdx.x == gridDim.x - 1
                                           : atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  const int* value = values + threadIdx.x;
  results[threadIdx.x] = kFinish == Finish::kPlainRead      ? *value
                         : kFinish == Finish::kConstantRead ? __ldg(value)
                                                            : __ldcg(value);
}

template <Finish kFinish>
void expect_last_block_race(const std::string& complaint, const char* what) {
  std::vector<int> values(3 * 64), results(64);
  unsigned ticket = 0;
  expect_race(complaint, what, last_block_kernel<kFinish>, 3, values.data(), results.data(),
              &ticket);
}

__global__ void constant_kernel(int* values) {
  const int before = __ldg(values + threadIdx.x);
  values[threadIdx.x] = before + 1;
}

// Clusters.

__device__ inline void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

enum class Meet { kWell, kNothing, kBlockOnly, kLateWrite, kEarlyRead, kNextBarrier };

// Every block reads what another one writes, in shared or in global memory, before or afterwards.
template <Meet kMeet, bool kGlobal, bool kReadsFirst>
__global__ void across_blocks_kernel(int* global, int* results) {
  DYNAMIC_SHARED(int, shared);
  const unsigned thread = threadIdx.x, other = (cluster_rank() + 1) % cluster_size();
  const unsigned first = blockIdx.x - cluster_rank();
  int* const mine = kGlobal ? global + blockIdx.x * 64 + thread : shared + thread;
  int* const theirs =
      kGlobal ? global + (first + other) * 64 + 63 - thread : of_block(shared + 63 - thread, other);
  int value = 0;
  if (kReadsFirst) {
    *mine = 0;
    cluster_barrier();
    value = *theirs;
  } else if (kMeet != Meet::kLateWrite) {
    *mine = 1;
  }
  if (kMeet == Meet::kBlockOnly) __syncthreads();
  if (kMeet != Meet::kNothing && kMeet != Meet::kBlockOnly) {
    cluster_arrive();
    // Between the two nothing is ordered.
    if (kMeet == Meet::kLateWrite && !kReadsFirst) *mine = 1;
    if (kMeet == Meet::kLateWrite && kReadsFirst) value = *theirs;
    if (kMeet == Meet::kEarlyRead && !kReadsFirst) results[blockIdx.x * 64 + thread] = *theirs;
    if (kMeet == Meet::kEarlyRead && kReadsFirst) *mine = 1;
    cluster_wait();
  }
  if (kMeet == Meet::kNextBarrier) cluster_barrier();
  if (kReadsFirst) {
    *mine = 1;
  } else {
    value = *theirs;
  }
  results[blockIdx.x * 64 + thread] = value;
  cluster_barrier();
}

template <Meet kMeet>
void expect_across_blocks(const std::string& complaint) {
  std::vector<int> global(6 * 64), results(6 * 64);
  expect_cluster_race(complaint, "shared, write, then read",
                      across_blocks_kernel<kMeet, false, false>, 6, 3, global.data(),
                      results.data());
  expect_cluster_race(complaint, "shared, read, then write",
                      across_blocks_kernel<kMeet, false, true>, 6, 3, global.data(),
                      results.data());
  expect_cluster_race(complaint, "global, write, then read",
                      across_blocks_kernel<kMeet, true, false>, 6, 3, global.data(),
                      results.data());
  expect_cluster_race(complaint, "global, read, then write",
                      across_blocks_kernel<kMeet, true, true>, 6, 3, global.data(), results.data());
}

enum class Gather { kWell, kNoTicket, kNoSyncthreads };

// The first block of a cluster reads what the others have written into its memory, once the last
// of them has counted there. Another one reads the first one's memory at last.
template <Gather kGather>
__global__ void gather_kernel(int* results) {
  DYNAMIC_SHARED(int, shared);
  if (threadIdx.x == 0) shared[128] = 0;
  cluster_barrier();
  int* const count = of_block(shared + 128, 0u);
  if (cluster_rank() > 0) {
    of_block(shared, 0u)[(cluster_rank() - 1) * 64 + threadIdx.x] = 1;
    if (kGather != Gather::kNoSyncthreads) __syncthreads();
    if (threadIdx.x == 0) atomicAdd(count, 1);
  } else {
    if (threadIdx.x == 0 && kGather != Gather::kNoTicket) {
      while (atomicAdd(count, 0) < 2) __nanosleep(20);
    }
    __syncthreads();
    results[threadIdx.x] = shared[threadIdx.x] + shared[64 + threadIdx.x];
  }
  cluster_barrier();
  if (cluster_rank() == 2) results[64 + threadIdx.x] = *count;
  cluster_barrier();
}

template <Gather kGather>
void expect_gather_race(const std::string& complaint, const char* what) {
  std::vector<int> results(128);
  expect_cluster_race(complaint, what, gather_kernel<kGather>, 3, 3, results.data());
  if (complaint.empty()) expect(results[7] == 2 && results[64 + 7] == 2, "gathered");
}

// The first block may have exited when its memory is read or written.
template <bool kWaits, bool kWrites>
__global__ void exit_kernel(int* results) {
  DYNAMIC_SHARED(int, shared);
  shared[threadIdx.x] = 1;
  cluster_barrier();
  if (cluster_rank() == 1) {
    int* const place = of_block(shared + threadIdx.x, 0u);
    if (kWrites) *place = 2;
    if (!kWrites) results[threadIdx.x] = *place;
  }
  if (kWaits) cluster_barrier();
}

inline void check_cluster_races() {
  const std::string nothing, cluster = "no barrier of the cluster", exited = "may have exited";
  expect_across_blocks<Meet::kWell>(nothing);
  expect_across_blocks<Meet::kNothing>(cluster);
  expect_across_blocks<Meet::kBlockOnly>(cluster);
  expect_across_blocks<Meet::kLateWrite>(cluster);
  expect_across_blocks<Meet::kEarlyRead>(cluster);
  expect_across_blocks<Meet::kNextBarrier>(nothing);

  expect_gather_race<Gather::kWell>(nothing, "a gathering");
  expect_gather_race<Gather::kNoTicket>(cluster, "a gathering without a ticket");
  expect_gather_race<Gather::kNoSyncthreads>(cluster, "a gathering with early tickets");

  std::vector<int> results(4 * 64);
  // In ascending order the other block comes first by chance, and nothing raises.
  expect_cluster_race(nothing, "a read before the end", exit_kernel<true, false>, 2, 2,
                      results.data());
  expect_cluster_race(nothing, "a write before the end", exit_kernel<true, true>, 2, 2,
                      results.data());
  expect_cluster_race(exited, "a read at the end", exit_kernel<false, false>, 2, 2, results.data());
  expect_cluster_race(exited, "a write at the end", exit_kernel<false, true>, 2, 2, results.data());
  expect_cluster_race("no __shared__ variables", "a variable", count_kernel<Count::kWell>, 2, 2,
                      results.data());
}

inline void check_races() {
  // Here blocks must come in order.
  emulation::set_order(0);
  emulation::races::take();
  check_shuffles<int>();
  check_votes();
  check_scan();
  check_divergence();
  check_atomics();
  check_clusters_of_all_sizes();
  const std::vector<std::string> races = emulation::races::take();
  expect(races.empty(), races.empty() ? "" : races.front());

  const std::string nothing, barrier = "no barrier", syncwarp = "no __syncwarp()";
  expect_neighbours_race<Between::kNothing>(32, barrier);
  expect_neighbours_race<Between::kNothing>(1, syncwarp);
  expect_neighbours_race<Between::kNothing>(0, nothing);
  expect_neighbours_race<Between::kBarrier>(32, nothing);
  expect_neighbours_race<Between::kBarrier>(1, nothing);
  expect_neighbours_race<Between::kSyncwarp>(32, barrier);
  expect_neighbours_race<Between::kSyncwarp>(16, nothing);
  expect_neighbours_race<Between::kHalves>(16, syncwarp);
  expect_neighbours_race<Between::kHalves>(8, nothing);
  expect_neighbours_race<Between::kShuffle>(1, syncwarp);

  std::vector<int> results(128);
  const std::string blocks = "no atomics of the two blocks";
  expect_race(barrier, "two warps write", some_write_kernel, 1, results.data(), 32);
  expect_race(" between them", "lanes write", some_write_kernel, 1, results.data(), 16);
  expect_race(blocks, "two blocks write", some_write_kernel, 2, results.data(), 64);
  expect_race(nothing, "one thread writes", some_write_kernel, 1, results.data(), 64);
  uint8_t bytes[64];
  uint16_t halves[64];
  expect_race(nothing, "narrow writes", narrow_kernel, 1, bytes, halves);

  expect_race(nothing, "a count", count_kernel<Count::kWell>, 2, results.data());
  // Both of lanes of the same warp and of others.
  expect_race(" between them", "cleared late", count_kernel<Count::kClearedLate>, 1,
              results.data());
  expect_race(" between them", "read early", count_kernel<Count::kReadEarly>, 1, results.data());

  expect_race(nothing, "one block", unwritten_kernel, 1, results.data());
  expect_race("has not written", "two blocks", unwritten_kernel, 2, results.data());

  expect_last_block_race<Finish::kWell>(nothing, "the last block");
  expect_last_block_race<Finish::kPlainRead>("not with __ldcg()", "a plain read");
  expect_last_block_race<Finish::kConstantRead>("__ldg()", "__ldg() of what was written");
  expect_last_block_race<Finish::kNoTicket>(blocks, "no ticket");
  expect_last_block_race<Finish::kNoBarrier>(blocks, "an early ticket");
  expect_race("__ldg() is for", "__ldg(), then a write", constant_kernel, 1, results.data());
  run_gates<false>(5);
  expect(emulation::races::take().empty(), "gates order nothing");
  run_gates<true>(5);
  expect(!emulation::races::take().empty(), "missing gates are no race");
  check_cluster_races();
}

}  // namespace graphed_sampling::selftest
