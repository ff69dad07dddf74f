// What kernels and the declarations of their launches include in place of CUDA's headers, so that
// one source compiles twice: by nvcc for a GPU, and by a C++ compiler, with
// GRAPHED_SAMPLING_EMULATION defined, for the CPU. Inline PTX belongs here: each wrapper says the
// same on both sides. C++ files of the CUDA build, which only call launches, get the types of
// CUDA's runtime.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#elif defined(GRAPHED_SAMPLING_EMULATION)
#include "../emulation/emulation.h"
#else
#include <cuda_runtime_api.h>
#endif

#if defined(__CUDACC__) || defined(GRAPHED_SAMPLING_EMULATION)

// Declares `type* const name`, the launch's dynamic shared memory, aligned to 16 bytes. All names
// are of the same bytes: CUDA would not take one array declared with two types.
#ifdef __CUDACC__
#define DYNAMIC_SHARED(type, name)                                   \
  extern __shared__ __align__(16) unsigned char gs_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(gs_dynamic_shared)
#else
#define DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::emulation::dynamic_shared())
#endif

namespace graphed_sampling {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// 2 to the x: the GPU's approximation, within 2 ulp or so. Subnormal results are 0.
__device__ __forceinline__ float ex2_approx(float x) {
#ifdef __CUDACC__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;  // NaN compares false and stays
#endif
}

__device__ __forceinline__ float lg2_approx(float x) {
#ifdef __CUDACC__
  return __log2f(x);
#else
  return log2f(x);
#endif
}

__device__ __forceinline__ float half_to_float(uint16_t bits) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(bits));
#else
  return emulation::half_to_float(bits);
#endif
}

__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// To the compiler, another value from here on: what it worked out from the old one before is not
// kept in registers, but worked out again.
__device__ __forceinline__ void renew(uint32_t& word) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(word));
#else
  static_cast<void>(word);
#endif
}

// The next one takes the place of the first, and so on: for loops over values in registers, which
// cannot be numbered, whose instructions come once.
template <class T, int kNumber>
__device__ __forceinline__ void move_on(T (&values)[kNumber]) {
#pragma unroll
  for (int i = 0; i < kNumber - 1; ++i) values[i] = values[i + 1];
}

// The larger of two. Of NaN and a number that is NaN with kNan, else the number.
template <bool kNan>
__device__ __forceinline__ float max_f32(float a, float b) {
  if constexpr (!kNan) {
    return fmaxf(a, b);
  } else {
#ifdef __CUDACC__
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a != a ? a : b != b ? b : fmaxf(a, b);
#endif
  }
}

// The same of pairs of bf16 or fp16, each for itself.
template <bool kNan>
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  uint32_t result;
  if constexpr (kNan) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
#else
  const float low = max_f32<kNan>(__uint_as_float(a << 16), __uint_as_float(b << 16));
  const float high =
      max_f32<kNan>(__uint_as_float(a & 0xFFFF0000u), __uint_as_float(b & 0xFFFF0000u));
  return (__float_as_uint(high) & 0xFFFF0000u) | __float_as_uint(low) >> 16;
#endif
}

template <bool kNan>
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  uint32_t result;
  if constexpr (kNan) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
#else
  const auto larger = [](uint32_t x, uint32_t y) {
    const float fx = half_to_float(static_cast<uint16_t>(x & 0xFFFFu));
    const float fy = half_to_float(static_cast<uint16_t>(y & 0xFFFFu));
    const bool takes_y = kNan ? fx == fx && !(fy <= fx) : fx != fx || fy > fx;
    return (takes_y ? y : x) & 0xFFFFu;
  };
  return larger(a, b) | larger(a >> 16, b >> 16) << 16;
#endif
}

// Bytes that are all ones or all zeros, as the sign is of a byte of a, which have the numbers 0 to
// 3, or b: the lowest 3 bits of each digit of selector name it for one, from the lowest on. All 4
// digits are 8 or more. What __byte_perm() does not offer.
__device__ __forceinline__ uint32_t spread_signs(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#else
  return (__byte_perm(a, b, selector) >> 7 & 0x01010101u) * 0xFFu;
#endif
}

// What nobody writes while the kernel runs, and what passes: of the multiprocessor's cache it takes
// what is left by the words that a thread has no register for, and by lists in global memory. Else
// these are pushed out, and then wait behind what passes.
__device__ __forceinline__ uint4 load_passing(const uint4* place) {
#ifdef __CUDACC__
  uint4 loaded;
  // Volatile: a plain one is a function of its address, and might come before a wait for the grid
  // that writes what is there.
  asm volatile("ld.global.nc.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(loaded.x), "=r"(loaded.y), "=r"(loaded.z), "=r"(loaded.w)
               : "l"(__cvta_generic_to_global(place)));
  return loaded;
#else
  return __ldg(place);
#endif
}

// Brings what will be read closer. Nothing waits for it.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* place) {
#ifdef __CUDACC__
  asm volatile("prefetch.global.L2 [%0];" : : "l"(place));
#endif
}

// The same of many bytes, a multiple of 16 as `place` is; nothing where it takes an instruction for
// each line.
__device__ __forceinline__ void prefetch_bytes([[maybe_unused]] const void* place,
                                               [[maybe_unused]] int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(place)), "r"(bytes));
#endif
}

// Waits for so many cycles of the multiprocessor, or a little longer.
__device__ __forceinline__ void wait_cycles([[maybe_unused]] int cycles) {
#ifdef __CUDACC__
  const long long begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(100);
#endif
}

// What other blocks have left in global memory, or this one in shared memory: no older copy of it.
__device__ __forceinline__ float load_now(const float* place) {
#ifdef __CUDACC__
  return *static_cast<const volatile float*>(place);
#else
  return __ldcg(place);
#endif
}

__device__ __forceinline__ int32_t load_now(const int32_t* place) {
#ifdef __CUDACC__
  return *static_cast<const volatile int32_t*>(place);
#else
  return __ldcg(place);
#endif
}

__device__ __forceinline__ float4 load_now(const float4* place) {
#ifdef __CUDACC__
  float4 value;
  asm volatile("ld.volatile.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(place)
               : "memory");
  return value;
#else
  return __ldcg(place);
#endif
}

// Between devices that reach each other's memory: who reads by load_acquire() what another one has
// written by store_release() sees also what that one, and whoever it had synchronised with, wrote
// before.
__device__ __forceinline__ void store_release(uint64_t* place, uint64_t value) {
#ifdef __CUDACC__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
#else
  emulation::atomic_store(place, value);
#endif
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* place) {
#ifdef __CUDACC__
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
  return value;
#else
  return emulation::atomic_load(place);
#endif
}

// Nanoseconds since some moment, in steps of up to a microsecond or so.
__device__ __forceinline__ uint64_t nanoseconds() {
#ifdef __CUDACC__
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
#else
  return emulation::nanoseconds();
#endif
}

// Programmatic dependent launch. Wait: until the grids before this one have finished and what they
// wrote can be seen. Launch: the next grid may start (it waits in turn before it reads).
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Clusters: neighbours in grid.x, as many as the launch says, that run side by side and reach each
// other's shared memory. A kernel of a plain launch is a cluster of one block, and so is any that
// is compiled for devices before 9.0.
//
// A thread says by cluster_arrive() that what it has done so far may be relied on, and waits by
// cluster_wait() until all threads of the cluster have said so, or have exited; in between it may
// do other things. The two take turns, and all threads of a warp call them together. A block must
// not exit before the others are done with its shared memory.
#ifdef __CUDACC__
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the block of that rank has what this one has at `mine`, in shared memory. The address is a
// generic one, for ordinary loads, stores and atomics.
template <class T>
__device__ __forceinline__ T* of_block(T* mine, unsigned rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(mine)), "r"(rank));
  return reinterpret_cast<T*>(address);
}
#else
__device__ __forceinline__ unsigned cluster_size() { return 1; }
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
template <class T>
__device__ __forceinline__ T* of_block(T* mine, unsigned) {
  return mine;
}
#endif
#else
using emulation::cluster_arrive;
using emulation::cluster_rank;
using emulation::cluster_size;
using emulation::cluster_wait;
using emulation::of_block;
#endif

// A gate in a block's shared memory, for warps that wait for others without stopping all of them.
// Its phases follow each other: each ends when `count` threads have arrived, and what these did
// before may be relied on behind gate_wait() for it. A phase's parity is its number's lowest bit,
// from 0 on; a thread that waits must be there before the phase after ends. gate_end() comes before
// its memory is used for anything else.
#ifdef __CUDACC__
__device__ __forceinline__ unsigned gate_address(const uint64_t* gate) {
  return static_cast<unsigned>(__cvta_generic_to_shared(gate));
}

__device__ __forceinline__ void gate_init(uint64_t* gate, unsigned count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(gate_address(gate)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void gate_end(uint64_t* gate) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(gate_address(gate)) : "memory");
}

__device__ __forceinline__ void gate_arrive(uint64_t* gate) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(
                   gate_address(gate))
               : "memory");
}

__device__ __forceinline__ bool gate_passed(const uint64_t* gate, unsigned parity) {
  unsigned passed;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(passed)
      : "r"(gate_address(gate)), "r"(parity)
      : "memory");
  return passed != 0;
}
#else
using emulation::gate_arrive;
using emulation::gate_end;
using emulation::gate_init;
using emulation::gate_passed;
#endif

__device__ __forceinline__ void gate_wait(const uint64_t* gate, unsigned parity) {
  while (!gate_passed(gate, parity)) __nanosleep(20);
}

#ifdef __CUDACC__
// Larger clusters are not for every device, so CUDA wants to be asked for them.
template <class... P>
cudaError_t allow_cluster(void (*kernel)(P...), int cluster) {
  constexpr int kPortable = 8;
  if (cluster <= kPortable) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

inline cudaLaunchAttribute cluster_attribute(int cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}
#endif

// Launches may ask for as much dynamic shared memory; without this call for 48 KiB. The driver has
// one number for all threads, which is never lowered: others' launches may need what was allowed.
template <class... P>
cudaError_t allow_dynamic_shared(void (*kernel)(P...), int bytes) {
#ifdef __CUDACC__
  struct Allowed {
    int device;
    const void* kernel;
    int bytes;
  };
  static std::mutex mutex;
  static std::vector<Allowed> all;
  Allowed asked = {0, reinterpret_cast<const void*>(kernel), bytes};
  cudaError_t error = cudaGetDevice(&asked.device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  auto known = std::find_if(all.begin(), all.end(), [&](const Allowed& allowed) {
    return allowed.device == asked.device && allowed.kernel == asked.kernel;
  });
  if (known != all.end() && known->bytes >= bytes) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  if (known != all.end()) {
    known->bytes = bytes;
  } else {
    all.push_back(asked);
  }
  return cudaSuccess;
#else
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
#endif
}

// How many clusters of such blocks the device holds at once, in `number`: 0 with an error. The
// driver takes microseconds to tell, so each thread asks it once.
template <class... P>
cudaError_t most_clusters(int* number, void (*kernel)(P...), int threads, size_t dynamic_shared,
                          int cluster) {
  *number = 0;
#ifdef __CUDACC__
  struct Answer {
    int device;
    const void* kernel;
    int threads, cluster;
    size_t dynamic_shared;
    int number;
  };
  thread_local std::vector<Answer> answers;
  Answer asked = {0, reinterpret_cast<const void*>(kernel), threads, cluster, dynamic_shared, 0};
  cudaError_t error = cudaGetDevice(&asked.device);
  if (error != cudaSuccess) return error;
  for (const Answer& answer : answers) {
    if (answer.device == asked.device && answer.kernel == asked.kernel &&
        answer.threads == threads && answer.cluster == cluster &&
        answer.dynamic_shared == dynamic_shared) {
      *number = answer.number;
      return cudaSuccess;
    }
  }
  error = allow_cluster(kernel, cluster);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute = cluster_attribute(cluster);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = dynamic_shared;
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&asked.number, kernel, &config);
  }
  if (error == cudaSuccess) {
    *number = asked.number;
    answers.push_back(asked);
  } else {
    cudaGetLastError();  // it is told here, and no launch's
  }
  return error;
#else
  return emulation::most_clusters(number, kernel, threads, dynamic_shared, cluster);
#endif
}

// `programmatic`: the grid may start before the one in front of it on the stream has finished, so
// the kernel must call grid_dependency_wait(). `cluster`: how many blocks make one, which divides
// grid.x. Devices before 9.0 know neither: pass false and 1 there.
template <class... P, class... A>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, int threads, size_t dynamic_shared,
                          cudaStream_t stream, bool programmatic, int cluster, A... arguments) {
#ifdef __CUDACC__
  if (const cudaError_t error = allow_cluster(kernel, cluster); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = dynamic_shared;
  config.stream = stream;
  config.attrs = attributes;
  if (programmatic) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) attributes[config.numAttrs++] = cluster_attribute(cluster);
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
#else
  static_cast<void>(stream), static_cast<void>(programmatic);
  return emulation::launch(kernel, grid, threads, dynamic_shared, cluster, arguments...);
#endif
}

}  // namespace graphed_sampling

#endif
