#include "common/philox.h"
#include "philox_words.h"

namespace graphed_sampling {
namespace {

constexpr int kThreads = 128;

__global__ void philox_words_kernel(const uint64_t* seed, int64_t seed_stride,
                                    const uint64_t* position, int64_t position_stride,
                                    uint32_t stream, uint64_t* words, int64_t words_stride,
                                    int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) {
    words[i * words_stride] =
        philox_word(seed[i * seed_stride], position[i * position_stride], stream);
  }
}

}  // namespace

cudaError_t launch_philox_words(const uint64_t* seed, int64_t seed_stride, const uint64_t* position,
                                int64_t position_stride, uint32_t stream, uint64_t* words,
                                int64_t words_stride, int64_t count, cudaStream_t cuda_stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  philox_words_kernel<<<blocks, kThreads, 0, cuda_stream>>>(
      seed, seed_stride, position, position_stride, stream, words, words_stride, count);
  return cudaGetLastError();
}

}  // namespace graphed_sampling
