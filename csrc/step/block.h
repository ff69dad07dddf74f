// What all threads of a block work out together.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace graphed_sampling {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Of the lanes' values, all of which take part.
__device__ inline int64_t sum_of_lanes(int64_t value) {
  // Three parts whose sums fit into 32 bits: additions of 32 bits take one instruction a warp.
  const auto bits = static_cast<uint64_t>(value);
  const uint64_t low = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits & 0x7FFFFF));
  const uint64_t middle =
      __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits >> 23 & 0x7FFFFF));
  const uint64_t high = __reduce_add_sync(kAllLanes, static_cast<unsigned>(bits >> 46));
  return static_cast<int64_t>(low + (middle << 23) + (high << 46));
}

// In one order, whatever the values.
__device__ inline float sum_of_lanes(float value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ inline uint64_t max_of_lanes(uint64_t value) {
  const auto high = static_cast<unsigned>(value >> 32), low = static_cast<unsigned>(value);
  const unsigned highest = __reduce_max_sync(kAllLanes, high);
  const unsigned lowest = __reduce_max_sync(kAllLanes, high == highest ? low : 0);
  return static_cast<uint64_t>(highest) << 32 | lowest;
}

// The block's place for exchanges between warps. Two buffers take turns, so that one barrier an
// exchange suffices: before a buffer is written again all threads have passed another barrier.
struct Exchange {
  uint64_t words[2][kWarps];
};

// It is the first thing in shared memory. Functions that are not inlined say so themselves: a
// reference that is passed to them could be to any memory.
__device__ inline Exchange& the_exchange() {
  DYNAMIC_SHARED(Exchange, exchange);
  return *exchange;
}

struct Range {
  float low, high;
};

// The exchanges are functions of their own, not inlined: a row is finished in code that is run
// once, and waits for its instructions more than for anything else.
// (`inline` lets several kernels' files hold them, no more.)

// Every warp's word, one after the other, for all threads.
__device__ inline const uint64_t* exchanged(int turn, uint64_t word) {
  uint64_t* words = the_exchange().words[turn];
  if (threadIdx.x % kWarp == 0) words[threadIdx.x / kWarp] = word;
  __syncthreads();
  return words;
}

__device__ inline __noinline__ Range exchange_range(int turn, float low, float high) {
  int low_key = __reduce_min_sync(kAllLanes, key_of(low));
  int high_key = __reduce_max_sync(kAllLanes, key_of(high));
  const uint64_t* words =
      exchanged(turn, static_cast<uint64_t>(static_cast<uint32_t>(low_key)) << 32 |
                          static_cast<uint32_t>(high_key));
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    low_key = min(low_key, static_cast<int>(words[i] >> 32));
    high_key = max(high_key, static_cast<int>(words[i] & 0xFFFFFFFFu));
  }
  return {from_key(low_key), from_key(high_key)};
}

__device__ inline __noinline__ int64_t exchange_sum(int turn, int64_t value) {
  const uint64_t* words = exchanged(turn, static_cast<uint64_t>(sum_of_lanes(value)));
  uint64_t total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += words[i];
  return static_cast<int64_t>(total);
}

// In one order, whatever the block does.
__device__ inline __noinline__ float exchange_total(int turn, float value) {
  value = sum_of_lanes(value);
  const uint64_t* words = exchanged(turn, static_cast<uint64_t>(__float_as_uint(value)));
  value = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) value += __uint_as_float(static_cast<uint32_t>(words[i]));
  return value;
}

__device__ inline __noinline__ uint64_t exchange_max(int turn, uint64_t value) {
  const uint64_t* words = exchanged(turn, max_of_lanes(value));
  value = words[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) value = words[i] > value ? words[i] : value;
  return value;
}

template <class Integer>
struct Sums {
  Integer before, total;
};

__device__ inline int shuffled_up(int value, int step) {
  return __shfl_up_sync(kAllLanes, value, step);
}
__device__ inline int64_t shuffled_up(int64_t value, int step) {
  return __shfl_up_sync(kAllLanes, static_cast<long long>(value), step);
}

// A warp's inclusive sums, and what one of its lanes has.
template <class Integer>
__device__ inline Integer sum_up_to_lane(Integer value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Integer other = shuffled_up(value, step);
    if (lane >= step) value += other;
  }
  return value;
}
__device__ inline int64_t of_lane(int64_t value, int lane) {
  return __shfl_sync(kAllLanes, static_cast<long long>(value), lane);
}

// Of what each warp has left, and of what this one has before its own.
template <class Integer>
__device__ inline Sums<Integer> sums_of_warps(const uint64_t* words, Integer before) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  Sums<Integer> sums = {before, 0};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const auto of_warp = static_cast<Integer>(words[i]);
    if (i < warp) sums.before += of_warp;
    sums.total += of_warp;
  }
  return sums;
}

template <class Integer>
__device__ __noinline__ Sums<Integer> exchange_sums(int turn, Integer value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Integer up_to = sum_up_to_lane(value, lane);
  uint64_t* words = the_exchange().words[turn];
  if (lane == kWarp - 1) words[warp] = static_cast<uint64_t>(up_to);
  __syncthreads();
  return sums_of_warps(words, up_to - value);
}

struct Block {
  int turn;

  __device__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }

  // Of values that are no NaN: the smallest of the lows and the largest of the highs.
  __device__ Range range(float low, float high) { return exchange_range(turn ^= 1, low, high); }
  __device__ float max(float value) { return range(value, value).high; }
  __device__ float min(float value) { return range(value, value).low; }

  __device__ int64_t sum(int64_t value) { return exchange_sum(turn ^= 1, value); }

  __device__ float total(float value) { return exchange_total(turn ^= 1, value); }

  // The largest, and the smallest, of 64 unsigned bits.
  __device__ uint64_t max_bits(uint64_t value) { return exchange_max(turn ^= 1, value); }
  __device__ uint64_t min_bits(uint64_t value) { return ~max_bits(~value); }

  // The sum of the values of all threads before this one; total: of all of them.
  template <class Integer>
  __device__ Integer sum_before(Integer value, Integer* total) {
    const Sums<Integer> sums = exchange_sums(turn ^= 1, value);
    *total = sums.total;
    return sums.before;
  }
  // The same of values that all lanes of a warp know, by the warps before.
  __device__ int sum_before_warp(int value, int* total) {
    const auto sums = sums_of_warps(exchanged(turn ^= 1, static_cast<uint64_t>(value)), 0);
    *total = sums.total;
    return sums.before;
  }
};

}  // namespace graphed_sampling
