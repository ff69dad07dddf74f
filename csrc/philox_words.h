// The random words of many draws.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace graphed_sampling {

// words[i * words_stride] = philox_word(seed[i * seed_stride], position[i * position_stride],
// stream) for i < count, on the device that is current. Strides in elements; 8-byte aligned device
// memory, not null unless count is 0; nothing is launched for 0. Returns the launch's error. Does
// not synchronise, so it can be captured.
cudaError_t launch_philox_words(const uint64_t* seed, int64_t seed_stride, const uint64_t* position,
                                int64_t position_stride, uint32_t stream, uint64_t* words,
                                int64_t words_stride, int64_t count, cudaStream_t cuda_stream);

}  // namespace graphed_sampling
