// Scatter of packed segments: how the rows that the host has changed reach the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace graphed_sampling {

// Where segments go. Contiguous arrays of 32-bit words; lengths in words.
// A pointer may be null when its length is 0.
struct ScatterTargets {
  static constexpr int kCount = 3;  // params, state, tables: in this order in a descriptor's target
  int32_t* data[kCount];
  int64_t length[kCount];
};

// A packet is `num_segments` descriptors of kDescriptorWords words each, then `num_words` words of
// payload. A descriptor:
//   word 0      target | payload start << 2, unsigned; the start counts words from the payload's
//               first word
//   word 1      length in words
//   words 2, 3  destination in words from the target's start: int64, low word first
constexpr int kDescriptorWords = 4;

// Copies each segment's payload to its destination, on the device that is current.
//
// packet         device memory, 4-byte aligned; not null unless num_segments is 0
// num_segments   0 .. 2^31 - 1; nothing is launched for 0
// num_words      0 .. 2^29 - 1
//
// Destinations must not overlap: the order of the copies is not defined. A descriptor that points
// outside its target or the payload stops the kernel (the context is in error then, as after a
// failed device-side assert of torch), so a wrong packet never writes to a stranger's memory.
// Returns the launch's error. Does not synchronise, so it can be captured.
cudaError_t launch_scatter_segments(const ScatterTargets& targets, const int32_t* packet,
                                    int64_t num_segments, int64_t num_words, cudaStream_t stream);

}  // namespace graphed_sampling
