// What all threads of a block work out together.
#pragma once

#include <cstdint>

#include "../common/device.h"

namespace graphed_sampling {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// The block's place for exchanges between warps. Two buffers take turns, so that one barrier an
// exchange suffices: before a buffer is written again all threads have passed another barrier.
struct Exchange {
  uint64_t words[2][kWarps];
};

struct Block {
  Exchange* exchange;
  int turn;

  __device__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }

  __device__ uint64_t* next_words() {
    turn ^= 1;
    return exchange->words[turn];
  }

  __device__ float max(float value) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    uint64_t* words = next_words();
    if (lane() == 0) words[warp()] = static_cast<uint64_t>(__float_as_uint(value));
    __syncthreads();
    value = __uint_as_float(static_cast<uint32_t>(words[0]));
    for (int i = 1; i < kWarps; ++i) {
      value = fmaxf(value, __uint_as_float(static_cast<uint32_t>(words[i])));
    }
    return value;
  }

  __device__ float min(float value) { return -max(-value); }

  __device__ int64_t sum(int64_t value) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      value += __shfl_xor_sync(kAllLanes, static_cast<long long>(value), step);
    }
    uint64_t* words = next_words();
    if (lane() == 0) words[warp()] = static_cast<uint64_t>(value);
    __syncthreads();
    uint64_t total = 0;
    for (int i = 0; i < kWarps; ++i) total += words[i];
    return static_cast<int64_t>(total);
  }

  // The largest of 64 unsigned bits.
  __device__ uint64_t max_bits(uint64_t value) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const uint64_t other =
          __shfl_xor_sync(kAllLanes, static_cast<unsigned long long>(value), step);
      value = other > value ? other : value;
    }
    uint64_t* words = next_words();
    if (lane() == 0) words[warp()] = value;
    __syncthreads();
    value = words[0];
    for (int i = 1; i < kWarps; ++i) value = words[i] > value ? words[i] : value;
    return value;
  }

  __device__ uint64_t min_bits(uint64_t value) { return ~max_bits(~value); }

  // The sum of the values of all threads before this one; total: of all of them.
  __device__ int64_t sum_before(int64_t value, int64_t* total) {
    int64_t up_to = value;
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, static_cast<long long>(up_to), step);
      if (lane() >= step) up_to += other;
    }
    uint64_t* words = next_words();
    if (lane() == kWarp - 1) words[warp()] = static_cast<uint64_t>(up_to);
    __syncthreads();
    int64_t before = 0, all = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp()) before = all;
      all += static_cast<int64_t>(words[i]);
    }
    *total = all;
    return before + up_to - value;
  }

  __device__ int sum_before(int value, int* total) {
    int up_to = value;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, up_to, step);
      if (lane() >= step) up_to += other;
    }
    uint64_t* words = next_words();
    if (lane() == kWarp - 1) words[warp()] = static_cast<uint64_t>(static_cast<uint32_t>(up_to));
    __syncthreads();
    int before = 0, all = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp()) before = all;
      all += static_cast<int>(words[i]);
    }
    *total = all;
    return before + up_to - value;
  }
};

}  // namespace graphed_sampling
