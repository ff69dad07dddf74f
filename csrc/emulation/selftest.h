// Kernels that show that the emulator does what CUDA does, and that it notices what CUDA forbids.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/device.h"

namespace graphed_sampling::selftest {

constexpr unsigned kAll = ~0u;

inline void expect(bool condition, const std::string& what,
                   std::source_location site = std::source_location::current()) {
  if (!condition) throw std::logic_error("line " + std::to_string(site.line()) + ": " + what);
}

template <class... P, class... A>
void run_cluster(void (*kernel)(P...), dim3 grid, int threads, int cluster, A... arguments) {
  const cudaError_t error =
      launch_kernel(kernel, grid, threads, 1024, cudaStream_t{}, true, cluster, arguments...);
  expect(error == cudaSuccess, cudaGetErrorString(error));
}

template <class... P, class... A>
void run(void (*kernel)(P...), dim3 grid, int threads, A... arguments) {
  run_cluster(kernel, grid, threads, 1, arguments...);
}

// The launch must raise, and its message must hold all the words.
template <class... P, class... A>
void expect_cluster_failure(const std::vector<std::string>& words, void (*kernel)(P...),
                            int cluster, int threads, A... arguments) {
  try {
    run_cluster(kernel, dim3(static_cast<unsigned>(cluster)), threads, cluster, arguments...);
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    for (const std::string& word : words) {
      expect(message.find(word) != std::string::npos, "no '" + word + "' in: " + message);
    }
    return;
  }
  expect(false, "no failure with '" + words.at(0) + "'");
}

template <class... P, class... A>
void expect_failure(std::vector<std::string> words, void (*kernel)(P...), int threads,
                    A... arguments) {
  words.push_back("kernel block (0, 0, 0)");
  expect_cluster_failure(words, kernel, 1, threads, arguments...);
}

// Shuffles: results[thread][kind], of values 1000 + thread.

template <class T>
__global__ void shuffle_kernel(T* results, int argument, int width) {
  const int thread = static_cast<int>(threadIdx.x);
  const T value = static_cast<T>(1000 + thread);
  results[thread * 4] = __shfl_sync(kAll, value, argument, width);
  results[thread * 4 + 1] = __shfl_up_sync(kAll, value, static_cast<unsigned>(argument), width);
  results[thread * 4 + 2] = __shfl_down_sync(kAll, value, static_cast<unsigned>(argument), width);
  results[thread * 4 + 3] = __shfl_xor_sync(kAll, value, argument, width);
}

template <class T>
void check_shuffles() {
  constexpr int kThreads = 96;
  std::vector<T> results(kThreads * 4);
  for (int width = 1; width <= 32; width *= 2) {
    for (const int argument : {0, 1, 2, 3, 5, 8, 16, 17, 31}) {
      run(shuffle_kernel<T>, 1, kThreads, results.data(), argument, width);
      for (int thread = 0; thread < kThreads; ++thread) {
        const int lane = thread % 32, segment = lane / width;
        const auto check = [&](int kind, int source) {
          const int chosen = thread - lane + source;
          expect(results[static_cast<size_t>(thread * 4 + kind)] == static_cast<T>(1000 + chosen),
                 "shuffle " + std::to_string(kind) + ", width " + std::to_string(width) +
                     ", argument " + std::to_string(argument) + ", thread " +
                     std::to_string(thread));
        };
        const int up = lane - argument, down = lane + argument, other = lane ^ argument;
        check(0, segment * width + argument % width);
        check(1, up >= segment * width ? up : lane);
        check(2, down < (segment + 1) * width ? down : lane);
        check(3, other < (segment + 1) * width ? other : lane);
      }
    }
  }
}

__global__ void shuffle_bits_kernel(unsigned long long* results) {
  // No bit of the wide types is lost, and each lane may name a source of its own.
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned long long value = 0x0123456789ABCDEFull * (threadIdx.x + 1);
  results[lane] = __shfl_sync(kAll, value, 31 - lane);
}

// Votes and reductions, of even lanes and of odd lanes that are in the same function at once.

struct Votes {
  unsigned ballot, any, all, match, add, min, max, bits_and, bits_or, bits_xor;
  int signed_min, signed_max, signed_add;
};

__device__ inline Votes vote(unsigned mask, unsigned value) {
  Votes votes;
  votes.ballot = __ballot_sync(mask, value % 3 == 0);
  votes.any = static_cast<unsigned>(__any_sync(mask, value == 4));
  votes.all = static_cast<unsigned>(__all_sync(mask, value % 2 == 0));
  votes.match = __match_any_sync(mask, value % 5);
  votes.add = __reduce_add_sync(mask, value);
  votes.min = __reduce_min_sync(mask, value - 7u);
  votes.max = __reduce_max_sync(mask, value - 7u);
  votes.signed_min = __reduce_min_sync(mask, static_cast<int>(value) - 7);
  votes.signed_max = __reduce_max_sync(mask, static_cast<int>(value) - 7);
  votes.signed_add = __reduce_add_sync(mask, -static_cast<int>(value));
  votes.bits_and = __reduce_and_sync(mask, ~value);
  votes.bits_or = __reduce_or_sync(mask, value);
  votes.bits_xor = __reduce_xor_sync(mask, value);
  return votes;
}

__global__ void vote_kernel(Votes* results) {
  if (threadIdx.x % 2 == 0) {
    results[threadIdx.x] = vote(0x55555555, threadIdx.x % 32);
  } else {
    results[threadIdx.x] = vote(0xAAAAAAAA, threadIdx.x % 32);
  }
}

inline void check_votes() {
  std::vector<Votes> results(64);
  run(vote_kernel, 1, 64, results.data());
  for (unsigned thread = 0; thread < 64; ++thread) {
    const unsigned own = thread % 32, parity = thread % 2;
    unsigned ballot = 0, match = 0, add = 0, bits_and = kAll, bits_or = 0, bits_xor = 0;
    unsigned least = kAll, greatest = 0;
    for (unsigned value = parity; value < 32; value += 2) {
      ballot |= (value % 3 == 0 ? 1u : 0u) << value;
      match |= (value % 5 == own % 5 ? 1u : 0u) << value;
      add += value;
      least = std::min(least, value - 7u);
      greatest = std::max(greatest, value - 7u);
      bits_and &= ~value;
      bits_or |= value;
      bits_xor ^= value;
    }
    const Votes& votes = results[thread];
    expect(votes.ballot == ballot && votes.match == match, "ballot or match");
    expect(votes.any == (parity == 0) && votes.all == (parity == 0), "any or all");
    expect(votes.add == add && votes.signed_add == -static_cast<int>(add), "sum");
    expect(votes.min == least && votes.max == greatest, "unsigned extremes");
    expect(votes.signed_min == static_cast<int>(parity) - 7 &&
               votes.signed_max == 30 + static_cast<int>(parity) - 7,
           "signed extremes");
    expect(votes.bits_and == bits_and && votes.bits_or == bits_or && votes.bits_xor == bits_xor,
           "bits");
  }
}

// A scan of a block in shared memory, of both sorts, and the counting barriers.

__global__ void scan_kernel(const int* values, int* sums, int* counts) {
  constexpr int kThreads = 256;
  __shared__ int buffer[2][kThreads];
  DYNAMIC_SHARED(int, totals);
  const int thread = static_cast<int>(threadIdx.x);
  const int base = static_cast<int>(blockIdx.x) * kThreads;
  if (totals[thread % 8] != -1) __trap();  // all ones
  buffer[0][thread] = values[base + thread];
  int side = 0;
  for (int step = 1; step < kThreads; step *= 2) {
    __syncthreads();
    buffer[1 - side][thread] =
        buffer[side][thread] + (thread >= step ? buffer[side][thread - step] : 0);
    side = 1 - side;
  }
  if (thread == kThreads - 1) totals[0] = buffer[side][thread];
  __syncthreads();
  sums[base + thread] = buffer[side][thread] + totals[0];
  const int value = values[base + thread];
  int count = __syncthreads_count(value % 3 == 0);
  count += __syncthreads_or(value == base + 17) * 1000;
  count += __syncthreads_or(value < 0) * 2000;
  count += __syncthreads_and(value >= base) * 4000;
  count += __syncthreads_and(value == base) * 8000;
  counts[base + thread] = count;
}

inline void check_scan() {
  constexpr int kThreads = 256, kBlocks = 6;
  std::vector<int> values(kThreads * kBlocks), sums(values.size()), counts(values.size());
  std::iota(values.begin(), values.end(), 0);
  run(scan_kernel, dim3(kBlocks), kThreads, values.data(), sums.data(), counts.data());
  for (size_t base = 0; base < values.size(); base += kThreads) {
    const auto first = values.begin() + static_cast<int>(base);
    const int total = std::accumulate(first, first + kThreads, 0);
    const auto thirds = std::count_if(first, first + kThreads, [](int v) { return v % 3 == 0; });
    int sum = 0;
    for (size_t thread = 0; thread < kThreads; ++thread) {
      sum += values[base + thread];
      expect(sums[base + thread] == sum + total, "scan");
      expect(counts[base + thread] == static_cast<int>(thirds) + 5000, "counting barriers");
    }
  }
}

// Threads that have exited count as arrived; warps may do things of their own.

__global__ void diverged_kernel(unsigned* results) {
  __shared__ unsigned sum;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x >= 100) return;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  if (warp == 0) {
    unsigned value = lane;
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(kAll, value, step);
    if (lane == 0) sum = value;
    __syncwarp();
  } else if (warp == 3) {
    if (lane == 3) return;
    __syncwarp(7);
  }
  if (warp == 1) {
    if (lane < 8) {
      // Lanes 0-3 first among themselves, and then, with 4-7 waiting, all eight.
      if (lane < 4) results[100 + lane] = __reduce_add_sync(0xF, lane);
      results[104 + lane] = __reduce_add_sync(0xFF, lane);
    } else {
      results[104 + lane] = __ballot_sync(0xFFFFFF00, lane % 2);
    }
  }
  __syncthreads();
  results[threadIdx.x] = sum;
}

inline void check_divergence() {
  std::vector<unsigned> results(136, 0);
  run(diverged_kernel, 1, 128, results.data());
  for (size_t thread = 0; thread < 99; ++thread) expect(results[thread] == 496, "divergence");
  expect(results[99] == 0, "an exited thread");
  for (size_t i = 0; i < 4; ++i) expect(results[100 + i] == 6, "four lanes");
  for (size_t i = 0; i < 8; ++i) expect(results[104 + i] == 28, "eight lanes");
  for (size_t i = 8; i < 32; ++i) expect(results[104 + i] == 0xAAAAAA00, "the other lanes");
}

__global__ void atomics_kernel(unsigned* words, unsigned long long* wide, float* sum, int* extremes,
                               unsigned* tickets) {
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  const unsigned thread = block * blockDim.x + threadIdx.x;
  atomicAdd(words, thread);
  atomicOr(words + 1, 1u << thread % 32);
  atomicAnd(words + 2, ~(1u << thread % 16));
  atomicInc(words + 3, 9);
  if (atomicCAS(words + 4, 0u, thread + 1) == 0) atomicAdd(words + 5, 1u);
  atomicExch(words + 6, 7u);
  atomicMax(wide, (static_cast<unsigned long long>(thread) << 32) | 5);
  atomicAdd(wide + 1, 1ull << 33);
  atomicAdd(sum, 0.5f);
  atomicMin(extremes, -static_cast<int>(thread));
  atomicMax(extremes + 1, -static_cast<int>(thread));
  // The last block to come sees what the others have written.
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(words + 7, 1u) == gridDim.x * gridDim.y - 1;
  __syncthreads();
  if (is_last) tickets[threadIdx.x] = __ldcg(words);
}

inline void check_atomics() {
  constexpr unsigned kBlocks = 4, kThreads = 64, kCount = kBlocks * kThreads;
  unsigned words[8] = {0, 0, kAll, 0, 0, 0, 0, 0};
  unsigned long long wide[2] = {};
  float sum = 0;
  int extremes[2] = {5, -1000};
  std::vector<unsigned> tickets(kThreads, 0);
  run(atomics_kernel, dim3(2, 2), kThreads, words, wide, &sum, extremes, tickets.data());
  constexpr unsigned kSum = kCount * (kCount - 1) / 2;
  expect(words[0] == kSum && words[1] == kAll && words[2] == 0xFFFF0000, "atomicAdd, Or, And");
  expect(words[3] == kCount % 10, "atomicInc");
  expect(words[4] >= 1 && words[4] <= kCount && words[5] == 1 && words[6] == 7, "CAS, Exch");
  expect(wide[0] == (uint64_t{kCount - 1} << 32 | 5) && wide[1] == uint64_t{kCount} << 33, "wide");
  expect(sum == kCount / 2 && extremes[0] == 1 - static_cast<int>(kCount) && extremes[1] == 0,
         "float and signed atomics");
  for (const unsigned ticket : tickets) expect(ticket == kSum, "the last block");
}

// Arithmetic.

inline void check_functions() {
  expect(__popc(0xF0F0u) == 8 && __popcll(~0ull) == 64 && __ffs(0) == 0 && __ffs(8) == 4, "bits");
  expect(__ffsll(1ll << 40) == 41 && __clz(0) == 32 && __clz(1) == 31 && __clzll(1) == 63, "bits");
  expect(__brev(1) == 0x80000000 && __brev(0x12345678) == 0x1E6A2C48, "reversed bits");
  expect(__umulhi(kAll, kAll) == kAll - 1 && __mulhi(-1, 1) == -1, "high halves");
  expect(__umul64hi(~0ull, 4) == 3, "high halves");
  expect(__funnelshift_r(0x12345678, 0x9ABCDEF0, 8) == 0xF0123456, "funnel shift");
  expect(__funnelshift_l(0x12345678, 0x9ABCDEF0, 8) == 0xBCDEF012, "funnel shift");
  expect(__byte_perm(0x33221100, 0x77665544, 0x7410) == 0x77441100, "byte_perm");
  expect(__byte_perm(0x00008000, 0, 0x0009) == 0x00000080, "byte_perm takes 3 bits of a digit");
  expect(spread_signs(0x00008000, 0x7F800000, 0xED98) == 0xFF00FF00, "spread_signs");

  expect(__double2float_rd(0.1) < 0.1 && __double2float_ru(0.1) > 0.1, "directed conversion");
  expect(__double2float_rn(0.1) == 0.1f && __double2float_rd(-1e300) == -INFINITY, "conversion");
  expect(__double2float_rd(1e300) == std::numeric_limits<float>::max(), "conversion");
  expect(__fadd_rd(1.0f, 1e-30f) == 1.0f && __fadd_ru(1.0f, 1e-30f) > 1.0f, "directed sum");
  expect(__fadd_rz(-1.0f, 1e-30f) > -1.0f && __dmul_ru(0.1, 0.1) > __dmul_rd(0.1, 0.1),
         "directed product");
  expect(__fmaf_rn(1 + 0x1p-12f, 1 + 0x1p-12f, -1) == 0x1p-11f + 0x1p-24f, "fused");
  const volatile float factor = 1 + 0x1p-12f;  // not fused by the compiler
  expect(factor * factor - 1.0f == 0x1p-11f, "contracted");
  expect(__float2int_rn(2.5f) == 2 && __float2int_rn(-3.5f) == -4, "half to even");
  expect(__float2int_rz(1e20f) == 0x7FFFFFFF && __float2int_rn(NAN) == 0, "saturation");
  expect(__double2ll_rn(-1e30) == std::numeric_limits<long long>::min(), "saturation");
  expect(__double2ull_rz(-1.0) == 0 && __double2uint_ru(0.25) == 1, "saturation");
  expect(__ll2double_rn((1ll << 53) + 1) == 0x1p53, "conversion");
  expect(__ull2double_ru((1ull << 53) + 1) > 0x1p53, "conversion");
  expect(min(-1, 1u) == 1u && max(-1, 1u) == kAll && min(-1, 1) == -1, "mixed extremes");
  expect(max(NAN, 1.0f) == 1.0f && min(1.0f, NAN) == 1.0f && max(1.0f, 2.0) == 2.0, "extremes");

  expect(ex2_approx(-3.0f) == 0.125f && ex2_approx(-126.0f) == 0x1p-126f, "ex2");
  expect(ex2_approx(-126.5f) == 0.0f && ex2_approx(-INFINITY) == 0.0f, "ex2");
  expect(ex2_approx(128.0f) == INFINITY && std::isnan(ex2_approx(NAN)), "ex2");
  expect(lg2_approx(8.0f) == 3.0f && lg2_approx(0.0f) == -INFINITY, "lg2");
  expect(half_to_float(0x3C00) == 1.0f && half_to_float(0xC500) == -5.0f, "half");
  expect(half_to_float(1) == 0x1p-24f && half_to_float(0x83FF) == -1023 * 0x1p-24f, "half");
  expect(half_to_float(0xFC00) == -INFINITY && std::isnan(half_to_float(0x7E00)), "half");
  expect(__float_as_uint(half_to_float(0x8000)) == 0x80000000, "half");
  expect(bf16_to_float(0xC040) == -3.0f, "bf16");
}

// What CUDA forbids.

__global__ void wrong_kernel(int what) {
  const unsigned lane = threadIdx.x % 32;
  switch (what) {
    case 0:  // Half a block waits for the other, which waits for lane 0.
      if (threadIdx.x < 32) {
        __syncthreads();
      } else if (lane != 0) {
        __shfl_sync(kAll, 1, 0);
      } else {
        __syncthreads();
      }
      break;
    case 1:  // Masks that disagree.
      __ballot_sync(lane < 16 ? kAll : 0xFFFF0000, 1);
      break;
    case 2:  // Both masks hold both lanes.
      if (lane < 3) __ballot_sync(lane == 0 ? 3 : 7, 1);
      break;
    case 3:  // A lane that left before, or that leaves while it is waited for.
      if (lane != 5) __any_sync(kAll, 1);
      break;
    case 4:
      if (lane == 3) {
        __any_sync(kAll, 1);
      } else {
        __all_sync(kAll, 1);
      }
      break;
    case 5:
      __syncwarp(~(1u << lane));
      break;
    case 6:
      __shfl_sync(kAll, 1.0f, 0, 24);
      break;
    case 7:
      if (lane == 3) {
        __shfl_sync(kAll, 1.0, 0);
      } else {
        __shfl_sync(kAll, 1.0f, 0);
      }
      break;
    case 8:
      if (threadIdx.x == 40) __trap();
      break;
    default:
      if (threadIdx.x < 40) {
        __syncthreads_or(1);
      } else {
        __syncthreads();
      }
  }
}

inline void check_failures() {
  expect_failure({"deadlock", "thread 32 at __syncthreads (",
                  "threads 33-63 at __shfl_sync of "
                  "mask 0xffffffff ("},
                 wrong_kernel, 64, 0);
  // The upper half goes on by itself, and ends.
  expect_failure({"__ballot_sync of mask 0xffffffff"}, wrong_kernel, 32, 1);
  expect_failure({"__ballot_sync of mask 0x0000000", "of another mask, 0x0000000"}, wrong_kernel,
                 32, 2);
  expect_failure({"__any_sync of mask 0xffffffff"}, wrong_kernel, 32, 3);
  expect_failure({"__any_sync", "__all_sync", "of the same mask"}, wrong_kernel, 32, 4);
  expect_failure({"__syncwarp of mask", "leaves out its own lane"}, wrong_kernel, 32, 5);
  expect_failure({"__shfl_sync", "with width 24"}, wrong_kernel, 32, 6);
  expect_failure({"operands of another size"}, wrong_kernel, 32, 7);
  expect_failure({"thread 40 met __trap()", "selftest.h:"}, wrong_kernel, 64, 8);
  expect_failure({"__syncthreads_or", "wait at __syncthreads"}, wrong_kernel, 64, 9);
  expect_failure({"lanes that have ended or never were, 0xffff0000"}, wrong_kernel, 16, 6);
  expect(launch_kernel(wrong_kernel, 1, 2000, 0, cudaStream_t{}, false, 1, 10) ==
                 cudaErrorInvalidConfiguration &&
             cudaGetLastError() == cudaErrorInvalidConfiguration &&
             cudaGetLastError() == cudaSuccess,
         "a launch of too many threads");
  expect(launch_kernel(wrong_kernel, 1, 32, 60000, cudaStream_t{}, false, 1, 10) ==
             cudaErrorInvalidValue,
         "a launch with too much shared memory");
}

// A barrier is missing: some orders must show it, whichever does not.

__global__ void race_kernel(int* results) {
  __shared__ int buffer[64];
  const int thread = static_cast<int>(threadIdx.x);
  buffer[thread] = 0;
  __syncthreads();
  buffer[thread] = thread;
  results[thread] = buffer[63 - thread];
}

inline void check_orders() {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    int results[64];
    emulation::set_order(seed);
    run(race_kernel, 1, 64, results);
    for (int thread = 0; thread < 64; ++thread) wrong += results[thread] != 63 - thread;
  }
  emulation::set_order(0);
  expect(wrong > 0, "no order shows that a barrier is missing");
}

// Clusters. Every block sums its threads' values in its own shared memory, every block gathers the
// sums of all, from the one behind it on, and the last to come writes to the first one's memory.

struct Gathered {
  int x, y, size, rank, sum, first, before;
};

__global__ void cluster_kernel(const int* values, Gathered* results) {
  DYNAMIC_SHARED(int, shared);  // the sum, who came, what the block has been given
  const unsigned size = cluster_size(), rank = cluster_rank();
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  const int before = shared[threadIdx.x % 256];
  __syncthreads();
  if (threadIdx.x < 2) shared[threadIdx.x] = 0;
  if (threadIdx.x == 2) *of_block(shared + 3, rank) = static_cast<int>(rank);
  __syncthreads();
  atomicAdd(shared, values[block * blockDim.x + threadIdx.x]);
  // A block's collectives are its own, in the midst of the cluster's.
  const int count = __syncthreads_count(threadIdx.x <= rank);
  cluster_arrive();
  if (threadIdx.x / 32 == 1 && cluster_size() > 1) __syncwarp();
  cluster_wait();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (unsigned i = 1; i <= size; ++i) sum += *of_block(shared, (rank + i) % size);
    atomicAdd(of_block(shared + 1, 0u), count);
    *of_block(shared + 2, (rank + 1) % size) = shared[3];
    shared[4] = sum;
  }
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 40) {
    results[block] = {static_cast<int>(blockIdx.x),
                      static_cast<int>(blockIdx.y),
                      static_cast<int>(size),
                      shared[2],
                      shared[4],
                      *of_block(shared + 1, 0u),
                      before};
  }
  cluster_arrive();
  cluster_wait();
}

inline void check_cluster(int cluster, dim3 grid, int threads) {
  const unsigned blocks = grid.x * grid.y, size = static_cast<unsigned>(cluster);
  std::vector<int> values(blocks * static_cast<unsigned>(threads));
  std::vector<Gathered> results(blocks);
  std::iota(values.begin(), values.end(), 1);
  run_cluster(cluster_kernel, grid, threads, cluster, values.data(), results.data());
  for (unsigned block = 0; block < blocks; ++block) {
    const unsigned rank = block % grid.x % size;
    const auto first = values.begin() + static_cast<int>(block - rank) * threads;
    const Gathered& result = results[block];
    expect(result.x == static_cast<int>(block % grid.x), "blockIdx.x");
    expect(result.y == static_cast<int>(block / grid.x), "blockIdx.y");
    expect(result.size == cluster, "cluster_size");
    expect(result.rank == static_cast<int>((rank + size - 1) % size), "a neighbour's rank");
    expect(result.sum == std::accumulate(first, first + cluster * threads, 0), "a cluster's sum");
    expect(result.first == cluster * (cluster + 1) / 2, "what all give the first block");
    expect(result.before == -1, "shared memory of another block");
  }
}

// Threads that have exited count as arrived, be it a block's last ones.

__global__ void early_exit_kernel(int* results) {
  DYNAMIC_SHARED(int, shared);
  if (cluster_rank() == 1 || threadIdx.x >= 32 + cluster_rank()) return;
  shared[threadIdx.x] = static_cast<int>(cluster_rank() * 100 + threadIdx.x);
  cluster_arrive();
  cluster_wait();
  results[cluster_rank() * 64 + threadIdx.x] = *of_block(shared + 5, 2 - cluster_rank());
  cluster_arrive();
  cluster_wait();
}

__global__ void wrong_cluster_kernel(int what) {
  DYNAMIC_SHARED(int, shared);
  __shared__ int variable;
  const unsigned rank = cluster_rank();
  switch (what) {
    case 0:
      cluster_arrive();
      cluster_arrive();
      break;
    case 1:
      if (rank == 1) cluster_wait();
      break;
    case 2:
      cluster_arrive();
      break;
    case 3:  // A warp of one block waits for one that waits for the cluster.
      if (rank == 1 && threadIdx.x >= 32) {
        __syncthreads();
      } else {
        cluster_arrive();
        cluster_wait();
      }
      break;
    case 4:
      of_block(shared, 2);
      break;
    case 5:
      of_block(&variable, 1 - rank);
      break;
    default: {  // The other block exits before its memory is asked for, or after.
      int* other = what == 6 ? shared : of_block(shared, 1u);
      cluster_arrive();
      cluster_wait();
      if (rank == 1) return;
      for (int i = 0; i < 100; ++i) __nanosleep(1);
      if (what == 6) other = of_block(shared, 1u);
      if (what == 7) *other = 1;
      if (what == 8 && *other == 1) __trap();
    }
  }
}

inline void check_clusters_of_all_sizes() {
  check_cluster(1, dim3(3), 64);
  check_cluster(2, dim3(2), 64);
  check_cluster(2, dim3(4, 3), 96);
  check_cluster(3, dim3(6), 64);
  check_cluster(8, dim3(16), 256);
  check_cluster(16, dim3(16), 256);
  check_cluster(1, dim3(2), 64);

  std::vector<int> results(3 * 64, 0);
  run_cluster(early_exit_kernel, dim3(3), 64, 3, results.data());
  for (size_t i = 0; i < results.size(); ++i) {
    const int expected = i < 32 ? 205 : i >= 128 && i < 128 + 34 ? 5 : 0;
    expect(results[i] == expected, "blocks that have exited");
  }
}

inline void check_cluster_failures() {
  const auto fails = [](std::vector<std::string> words, int what) {
    words.push_back("kernel block (");
    expect_cluster_failure(words, wrong_cluster_kernel, 2, 64, what);
  };
  fails({"cluster_arrive (", "selftest.h:", "again, without cluster_wait"}, 0);
  fails({"cluster_wait (", "selftest.h:", "without cluster_arrive"}, 1);
  fails({"ends between cluster_arrive and cluster_wait"}, 2);
  fails({"deadlock", "block 0; threads 0-63 at cluster_wait (",
         "block 1; threads 0-31 at cluster_wait (", "; threads 32-63 at __syncthreads ("},
        3);
  fails({"of_block (", "selftest.h:", "block 2 of a smaller cluster"}, 4);
  fails({"what is not in its dynamic shared memory"}, 5);
  fails({"asks by of_block (", "shared memory of the cluster's block 1, which has exited"}, 6);
  fails({"touches shared memory of the cluster's block 1, which has exited"}, 7);
  fails({"touches shared memory of the cluster's block 1, which has exited"}, 8);

  const auto refused = [](dim3 grid, int cluster) {
    return launch_kernel(wrong_cluster_kernel, grid, 32, 0, cudaStream_t{}, false, cluster, 10) ==
               cudaErrorInvalidConfiguration &&
           cudaGetLastError() == cudaErrorInvalidConfiguration;
  };
  expect(refused(dim3(3), 2) && refused(dim3(2, 2), 4), "a grid that is not of whole clusters");
  expect(refused(dim3(17), 17) && refused(dim3(2), 0), "no size of a cluster");
  int number = -1;
  expect(most_clusters(&number, wrong_cluster_kernel, 256, 1024, 16) == cudaSuccess && number > 0,
         "clusters at once");
  emulation::set_most_clusters(3);
  expect(most_clusters(&number, wrong_cluster_kernel, 256, 1024, 8) == cudaSuccess && number == 3,
         "clusters at once, as set");
  emulation::set_most_clusters(1000);
  expect(most_clusters(&number, wrong_cluster_kernel, 256, 60000, 8) != cudaSuccess && number == 0,
         "clusters with too much shared memory");
  expect(allow_dynamic_shared(wrong_cluster_kernel, 60000) == cudaSuccess &&
             most_clusters(&number, wrong_cluster_kernel, 256, 60000, 8) == cudaSuccess,
         "clusters with much shared memory");
  expect(allow_dynamic_shared(wrong_cluster_kernel, 0) == cudaSuccess, "shared memory as before");
}

// The cluster's barrier is missing.

__global__ void cluster_race_kernel(int* results, bool with_barrier) {
  DYNAMIC_SHARED(int, shared);
  const unsigned other = cluster_size() - 1 - cluster_rank();
  *of_block(shared + threadIdx.x, other) = static_cast<int>(blockIdx.x * 64 + threadIdx.x);
  if (with_barrier) {
    cluster_arrive();
    cluster_wait();
  }
  results[blockIdx.x * 64 + threadIdx.x] = shared[threadIdx.x];
  cluster_arrive();
  cluster_wait();
}

inline void check_cluster_orders() {
  int wrong[2] = {};
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    for (const bool with_barrier : {false, true}) {
      int results[4 * 64];
      emulation::set_order(seed);
      run_cluster(cluster_race_kernel, dim3(4), 64, 4, results, with_barrier);
      for (int i = 0; i < 4 * 64; ++i)
        wrong[with_barrier] += results[i] != i % 64 + (3 - i / 64) * 64;
    }
  }
  emulation::set_order(0);
  expect(wrong[0] > 0, "no order shows that a cluster's barrier is missing");
  expect(wrong[1] == 0, "a cluster's barrier does not suffice");
}

// Gates. Each warp adds to what the one before it left, round after round, and nobody else waits.
// kOpen: without the gates.

template <bool kOpen>
__global__ void gates_kernel(int* result, int rounds) {
  DYNAMIC_SHARED(int, shared);
  auto* gates = reinterpret_cast<uint64_t*>(shared + 2);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x == 0) *shared = 0;
  if (threadIdx.x < blockDim.x / 32) gate_init(&gates[threadIdx.x], 32);
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const int before = warp > 0 ? warp - 1 : warps - 1;
    const int phase = warp > 0 ? round : round - 1;
    if (phase >= 0 && !kOpen) gate_wait(&gates[before], static_cast<unsigned>(phase) & 1);
    if (threadIdx.x % 32 == 0) *shared = 2 * *shared % 1000003 + warp;
    gate_arrive(&gates[warp]);
  }
  __syncthreads();
  if (threadIdx.x == 0) *result = *shared;
  if (threadIdx.x < blockDim.x / 32) gate_end(&gates[threadIdx.x]);
}

template <bool kOpen>
int run_gates(int rounds) {
  int result = -1;
  run_cluster(gates_kernel<kOpen>, dim3(1), 128, 1, &result, rounds);
  return result;
}

inline void check_gates() {
  int expected = 0;
  for (int i = 0; i < 4 * 5; ++i) expected = 2 * expected % 1000003 + i % 4;
  expect(run_gates<false>(5) == expected, "warps that pass gates in turns");
}

inline void check_gate_orders() {
  int expected = 0, wrong[2] = {};
  for (int i = 0; i < 4 * 5; ++i) expected = 2 * expected % 1000003 + i % 4;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    emulation::set_order(seed);
    wrong[0] += run_gates<false>(5) != expected;
    wrong[1] += run_gates<true>(5) != expected;
  }
  emulation::set_order(0);
  expect(wrong[0] == 0, "gates do not suffice");
  expect(wrong[1] > 0, "no order shows that gates are missing");
}

// For measurements: what 256 threads need for 1000 shuffles and 100 barriers.

__global__ void speed_kernel(unsigned* result) {
  unsigned value = threadIdx.x;
  for (int i = 0; i < 100; ++i) {
    for (int j = 0; j < 10; ++j) value += __shfl_xor_sync(kAll, value, 1 << j % 5);
    __syncthreads();
  }
  result[threadIdx.x] = value;
}

// In the order that was set; afterwards the order is ascending.
inline void check_everything() {
  check_functions();
  check_shuffles<int>();
  check_shuffles<unsigned>();
  check_shuffles<float>();
  check_shuffles<double>();
  check_shuffles<long long>();
  check_shuffles<unsigned long long>();
  std::vector<unsigned long long> wide(32);
  run(shuffle_bits_kernel, 1, 32, wide.data());
  for (unsigned lane = 0; lane < 32; ++lane) {
    expect(wide[lane] == 0x0123456789ABCDEFull * (32 - lane), "64 bits shuffled");
  }
  check_votes();
  check_scan();
  check_divergence();
  check_atomics();
  check_failures();
  check_clusters_of_all_sizes();
  check_cluster_failures();
  check_gates();
  check_orders();
  check_cluster_orders();
  check_gate_orders();
}

}  // namespace graphed_sampling::selftest
