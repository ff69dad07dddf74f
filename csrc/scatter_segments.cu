// How the work is cut
//
// One packet mixes segments of one word (a token's count; hundreds of thousands of them when a long
// prompt is admitted) with records of tens of words and bitmap rows of thousands. Two numbers,
// chosen at launch, cover that range:
//
//   group    A warp takes `group` neighbouring segments, 1 to 32. Lane i reads descriptor i, so the
//            warp reads them in a few transactions. Segments of up to kLaneWords words are copied
//            by the lane that read them: one-word segments of a packet lie side by side in the
//            payload, so those reads are coalesced too. The others are copied one after the other
//            by the whole warp.
//   pieces   `pieces` warps (grid.y) share each group; every warp takes each `pieces`-th chunk of a
//            long segment. Warps beyond a segment's end leave at once.
//
// While there are more warps than segments, group is 1 and the spare warps become pieces: a few
// long rows then spread over the whole device. With more segments than warps the group grows, and
// long segments among them are hidden behind the many short ones.
#include <algorithm>

#include "scatter_segments.h"

namespace graphed_sampling {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 4;
// Loads that a lane has in flight: enough to hide the latency of memory within one warp.
constexpr int kUnroll = 8;
constexpr int kChunk = kWarp * kUnroll;
constexpr int kLaneWords = 4;
// Warps that are resident on an H200 (132 multiprocessors of 64). More would wait, fewer would
// leave it idle; smaller devices run the same grid in a few waves.
constexpr int64_t kTargetWarps = 8192;

struct Segment {
  int32_t* destination;
  const int32_t* source;
  uint32_t length;
};

__device__ Segment read_segment(const ScatterTargets& targets, const int32_t* __restrict__ packet,
                                int64_t index, int64_t num_segments, int64_t num_words) {
  const int32_t* descriptor = packet + index * kDescriptorWords;
  const uint32_t head = static_cast<uint32_t>(__ldg(descriptor));
  const uint32_t length = static_cast<uint32_t>(__ldg(descriptor + 1));
  const uint64_t low = static_cast<uint32_t>(__ldg(descriptor + 2));
  const uint64_t high = static_cast<uint32_t>(__ldg(descriptor + 3));
  const uint64_t offset = high << 32 | low;
  const uint32_t target = head & 3;
  const uint32_t start = head >> 2;

  // Selected, not indexed: an index known only at run time would move the arguments to memory.
  int32_t* data = target == 0 ? targets.data[0] : target == 1 ? targets.data[1] : targets.data[2];
  const uint64_t size = static_cast<uint64_t>(target == 0   ? targets.length[0]
                                              : target == 1 ? targets.length[1]
                                                            : targets.length[2]);
  // Unsigned, so negative numbers fail as well, and written so that no sum wraps.
  const bool valid = target < ScatterTargets::kCount && length <= size && offset <= size - length &&
                     static_cast<uint64_t>(start) + length <= static_cast<uint64_t>(num_words);
  if (!valid) __trap();
  return {data + offset, packet + num_segments * kDescriptorWords + start, length};
}

// Copies the chunks `piece`, `piece + pieces`, ... of one segment with the whole warp.
__device__ void copy_by_warp(const Segment& segment, uint32_t lane, uint32_t piece,
                             uint32_t pieces) {
  for (uint64_t chunk = static_cast<uint64_t>(piece) * kChunk; chunk < segment.length;
       chunk += static_cast<uint64_t>(pieces) * kChunk) {
    int32_t words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint64_t word = chunk + static_cast<uint32_t>(i) * kWarp + lane;
      words[i] = word < segment.length ? __ldg(segment.source + word) : 0;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint64_t word = chunk + static_cast<uint32_t>(i) * kWarp + lane;
      if (word < segment.length) segment.destination[word] = words[i];
    }
  }
}

__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    scatter_segments_kernel(ScatterTargets targets, const int32_t* __restrict__ packet,
                            int64_t num_segments, int64_t num_words, int group) {
  const uint32_t lane = threadIdx.x % kWarp;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t index = warp * group + lane;

  Segment mine = {nullptr, nullptr, 0};
  if (lane < static_cast<uint32_t>(group) && index < num_segments) {
    mine = read_segment(targets, packet, index, num_segments, num_words);
  }

  // With group 1 the warp copies even a short segment: its words then go out in one instruction.
  const bool by_lane = group > 1 && mine.length <= kLaneWords;
  if (by_lane && blockIdx.y == 0) {
    for (uint32_t i = 0; i < mine.length; ++i) mine.destination[i] = __ldg(mine.source + i);
  }

  uint32_t waiting = __ballot_sync(~0u, !by_lane && mine.length > 0);
  while (waiting != 0) {
    const int owner = __ffs(static_cast<int>(waiting)) - 1;
    waiting &= waiting - 1;
    Segment segment;
    segment.destination = reinterpret_cast<int32_t*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.destination), owner));
    segment.source = reinterpret_cast<const int32_t*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine.source), owner));
    segment.length = __shfl_sync(~0u, mine.length, owner);
    copy_by_warp(segment, lane, blockIdx.y, gridDim.y);
  }
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

cudaError_t launch_scatter_segments(const ScatterTargets& targets, const int32_t* packet,
                                    int64_t num_segments, int64_t num_words, cudaStream_t stream) {
  if (num_segments == 0) return cudaSuccess;
  const int64_t group = std::clamp<int64_t>(ceil_div(num_segments, kTargetWarps), 1, kWarp);
  const int64_t warps = ceil_div(num_segments, group);
  // No segment is longer than all of the payload, so more pieces would find nothing to do.
  const int64_t pieces =
      std::max<int64_t>(std::min(kTargetWarps / warps, ceil_div(num_words, kChunk)), 1);
  const dim3 grid(static_cast<unsigned>(ceil_div(warps, kWarpsPerBlock)),
                  static_cast<unsigned>(pieces));
  scatter_segments_kernel<<<grid, kWarp * kWarpsPerBlock, 0, stream>>>(
      targets, packet, num_segments, num_words, static_cast<int>(group));
  return cudaGetLastError();
}

}  // namespace graphed_sampling
