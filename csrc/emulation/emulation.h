// CUDA's kernel language as plain C++, so that kernels run, slowly, where there is no GPU.
//
// Each thread of a block is a fiber, which runs until it waits at a collective or ends. The blocks
// of a cluster run side by side, each with dynamic shared memory of its own; clusters (a block each
// where a launch asks for none) run one after the other, and so do launches. What that can show:
//
//   - values: the arithmetic is IEEE's, as nvcc's is with -fmad=false (compile this side with
//     -ffp-contract=off). ex2_approx and lg2_approx are exact here and approximate on a GPU.
//   - barriers that are missing: `set_order` shuffles who runs next, `__shared__` memory is the
//     last block's, and dynamic shared memory starts as all ones.
//   - blocks that exit too early: to touch the shared memory of one that has exited raises.
//   - collectives that CUDA leaves undefined: threads that never come, masks that disagree, lanes
//     that have exited (CUDA would overlook those) raise std::runtime_error. So do
//     cluster_arrive() and cluster_wait() that do not take turns.
//
// What it cannot show: races between two collectives that come out right in either order (races.cpp
// does, in a build of its own), clusters that run side by side (a kernel that spins on what another
// one writes never returns), the order of memory operations, lanes that come to a cluster's barrier
// at various places (its instructions are .aligned), and times. A `__shared__` variable is a static
// one and thus, in a cluster, one for all blocks: kernels in clusters of several must do without
// (races.cpp finds those that do not), and reach of other blocks dynamic shared memory alone. A
// float out of an integer's range must be converted by __float2int_rz() and its like, which
// saturate: a cast is undefined in C++. PTX, <<<>>>, `extern __shared__`, cooperative groups and
// textures are not there: see common/device.h.
#pragma once

#ifdef __CUDACC__
#error "nvcc needs no emulation"
#endif

// Some of the macros below are names that the standard library gives attributes (__noinline__), so
// its headers must have been read before.
#include <math.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "races.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static
#ifndef __clang__
#define __builtin_assume(condition) static_cast<void>(0)
#endif

// Types.

#define EMULATED_VECTORS(type, name, align2, align4)                          \
  struct name##1 { type x; };                                                 \
  struct alignas(align2) name##2 { type x, y; };                              \
  struct name##3 { type x, y, z; };                                           \
  struct alignas(align4) name##4 { type x, y, z, w; };                        \
  inline name##1 make_##name##1(type x) { return {x}; }                       \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATED_VECTORS(signed char, char, 2, 4)
EMULATED_VECTORS(unsigned char, uchar, 2, 4)
EMULATED_VECTORS(short, short, 4, 8)
EMULATED_VECTORS(unsigned short, ushort, 4, 8)
EMULATED_VECTORS(int, int, 8, 16)
EMULATED_VECTORS(unsigned, uint, 8, 16)
EMULATED_VECTORS(long long, longlong, 16, 16)
EMULATED_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATED_VECTORS(float, float, 8, 16)
EMULATED_VECTORS(double, double, 16, 16)
#undef EMULATED_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// The runtime, as far as launching needs it.

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
};
using cudaStream_t = struct EmulatedStream*;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t count, cudaStream_t stream = nullptr);

// The emulator.

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace emulation {

// 0: threads, warps, blocks and clusters in ascending order. Otherwise clusters, and their blocks,
// warps and lanes anew at every turn, are shuffled by a generator that starts from the seed.
void set_order(uint64_t seed);

// Waits at collectives, as ever more threads arrive.
enum class Collective : uint8_t {
  kNone,
  kSyncThreads,
  kSyncThreadsCount,
  kSyncThreadsOr,
  kSyncThreadsAnd,
  kClusterWait,
  kSyncWarp,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kMatchAll,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceMinSigned,
  kReduceMaxSigned,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
};
using Site = std::source_location;

int wait_for_block(Collective kind, bool predicate, Site site);
// bytes: of the operand, which all lanes must agree on. argument and width: a shuffle's.
uint64_t wait_for_warp(Collective kind, uint32_t mask, uint64_t value, int bytes, int argument,
                       int width, Site site);
// Lets the others run: for a thread that spins until another of its block has written something.
void yield();
[[noreturn]] void trap(const char* message, Site site);
void* dynamic_shared();

unsigned cluster_size();
unsigned cluster_rank();
void cluster_arrive(Site site = Site::current());
void cluster_wait(Site site = Site::current());
void* address_of_block(const volatile void* mine, unsigned rank, Site site);
template <class T>
T* of_block(T* mine, unsigned rank, Site site = Site::current()) {
  return static_cast<T*>(address_of_block(mine, rank, site));
}

// As in common/device.h; the word has the count, what is missing of it, and the phase.
void gate_init(uint64_t* gate, unsigned count);
// How many have been made, ever.
int64_t count_gates();
// How often threads of clusters' first blocks have waited at the cluster's barrier, ever.
int64_t count_first_block_waits();
void gate_end(uint64_t* gate);
void gate_arrive(uint64_t* gate);
bool gate_passed(const uint64_t* gate, unsigned parity);

using Invoke = void (*)(const void* closure);
cudaError_t run_grid(const void* kernel, Invoke invoke, const void* closure, dim3 grid, int threads,
                     size_t dynamic_shared_bytes, int cluster);
cudaError_t set_dynamic_shared_limit(const void* kernel, int bytes);

// Returns what a launch with such numbers would return; raises what the kernel does wrong.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, int threads, size_t dynamic_shared_bytes,
                   int cluster, A... arguments) {
  struct Closure {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
  } closure = {kernel, std::tuple<P...>(static_cast<P>(arguments)...)};
  const Invoke invoke = [](const void* bound) {
    const auto* self = static_cast<const Closure*>(bound);
    std::apply(self->kernel, self->arguments);
  };
  return run_grid(reinterpret_cast<const void*>(kernel), invoke, &closure, grid, threads,
                  dynamic_shared_bytes, cluster);
}

// What most_clusters() says of every shape that a launch may have.
void set_most_clusters(int number);
cudaError_t count_clusters(int* number, const void* kernel, int threads,
                           size_t dynamic_shared_bytes, int cluster);
template <class... P>
cudaError_t most_clusters(int* number, void (*kernel)(P...), int threads,
                          size_t dynamic_shared_bytes, int cluster) {
  return count_clusters(number, reinterpret_cast<const void*>(kernel), threads,
                        dynamic_shared_bytes, cluster);
}

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T shuffle(Collective kind, uint32_t mask, T value, int argument, int width, Site site) {
  return from_bits<T>(wait_for_warp(kind, mask, to_bits(value), sizeof(T), argument, width, site));
}

inline uint32_t reduce(Collective kind, uint32_t mask, uint32_t value, Site site) {
  return static_cast<uint32_t>(wait_for_warp(kind, mask, value, 4, 0, 32, site));
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  const float magnitude = exponent == 0
                              ? static_cast<float>(mantissa) * 0x1p-24f
                              : std::bit_cast<float>((exponent + 112) << 23 | mantissa << 13);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

// A whole number to an integer, as PTX has it: saturated, and NaN to what the types say.
template <class Integer, class Float>
Integer saturate(Float whole) {
  using Limits = std::numeric_limits<Integer>;
  if (whole != whole) {
    if (sizeof(Float) == 4 && sizeof(Integer) == 4) return 0;
    return static_cast<Integer>(uint64_t{1} << (sizeof(Integer) * 8 - 1));
  }
  const Float end = std::ldexp(Float{1}, Limits::digits);
  if (whole >= end) return Limits::max();
  if (whole <= (Limits::is_signed ? -end : Float{0})) return Limits::min();
  return static_cast<Integer>(whole);
}

// A value that the compiler does not know, read where this is called.
template <class T>
T opaque(T value) {
  volatile T fresh = value;
  return fresh;
}

// What `operation` makes of its operands in the rounding mode. Opaque values keep the arithmetic
// between the two changes of mode, which the compiler does not know to matter to it.
template <class Result, class Operation, class... T>
Result rounded(int mode, Operation operation, T... operands) {
  const int before = std::fegetround();
  std::fesetround(mode);
  const Result result = opaque(operation(opaque(operands)...));
  std::fesetround(before);
  return result;
}

}  // namespace emulation

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int value) {
  return emulation::set_dynamic_shared_limit(reinterpret_cast<const void*>(kernel), value);
}

// Collectives.

#define EMULATED_SITE emulation::Site site = emulation::Site::current()

inline void __syncthreads(EMULATED_SITE) {
  emulation::wait_for_block(emulation::Collective::kSyncThreads, false, site);
}
inline int __syncthreads_count(int predicate, EMULATED_SITE) {
  return emulation::wait_for_block(emulation::Collective::kSyncThreadsCount, predicate != 0, site);
}
inline int __syncthreads_or(int predicate, EMULATED_SITE) {
  return emulation::wait_for_block(emulation::Collective::kSyncThreadsOr, predicate != 0, site);
}
inline int __syncthreads_and(int predicate, EMULATED_SITE) {
  return emulation::wait_for_block(emulation::Collective::kSyncThreadsAnd, predicate != 0, site);
}
inline void __syncwarp(unsigned mask = ~0u, EMULATED_SITE) {
  emulation::wait_for_warp(emulation::Collective::kSyncWarp, mask, 0, 0, 0, 32, site);
}

// Overloads, not templates: a call that is ambiguous or converts in CUDA does so here.
#define EMULATED_SHUFFLES(type)                                                                  \
  inline type __shfl_sync(unsigned mask, type value, int lane, int width = 32, EMULATED_SITE) {  \
    return emulation::shuffle(emulation::Collective::kShuffle, mask, value, lane, width, site);  \
  }                                                                                              \
  inline type __shfl_up_sync(unsigned mask, type value, unsigned delta, int width = 32,          \
                             EMULATED_SITE) {                                                    \
    return emulation::shuffle(emulation::Collective::kShuffleUp, mask, value,                    \
                              static_cast<int>(delta), width, site);                             \
  }                                                                                              \
  inline type __shfl_down_sync(unsigned mask, type value, unsigned delta, int width = 32,        \
                               EMULATED_SITE) {                                                  \
    return emulation::shuffle(emulation::Collective::kShuffleDown, mask, value,                  \
                              static_cast<int>(delta), width, site);                             \
  }                                                                                              \
  inline type __shfl_xor_sync(unsigned mask, type value, int lane_mask, int width = 32,          \
                              EMULATED_SITE) {                                                   \
    return emulation::shuffle(emulation::Collective::kShuffleXor, mask, value, lane_mask, width, \
                              site);                                                             \
  }
EMULATED_SHUFFLES(int)
EMULATED_SHUFFLES(unsigned)
EMULATED_SHUFFLES(long)
EMULATED_SHUFFLES(unsigned long)
EMULATED_SHUFFLES(long long)
EMULATED_SHUFFLES(unsigned long long)
EMULATED_SHUFFLES(float)
EMULATED_SHUFFLES(double)
#undef EMULATED_SHUFFLES

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATED_SITE) {
  return emulation::reduce(emulation::Collective::kBallot, mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, EMULATED_SITE) {
  return emulation::reduce(emulation::Collective::kAny, mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATED_SITE) {
  return emulation::reduce(emulation::Collective::kAll, mask, predicate != 0, site) != 0;
}

#define EMULATED_MATCHES(type)                                                                     \
  inline unsigned __match_any_sync(unsigned mask, type value, EMULATED_SITE) {                     \
    return static_cast<unsigned>(emulation::wait_for_warp(emulation::Collective::kMatchAny, mask,  \
                                                          emulation::to_bits(value), sizeof(type), \
                                                          0, 32, site));                           \
  }                                                                                                \
  inline unsigned __match_all_sync(unsigned mask, type value, int* predicate, EMULATED_SITE) {     \
    const auto matches = static_cast<unsigned>(                                                    \
        emulation::wait_for_warp(emulation::Collective::kMatchAll, mask,                           \
                                 emulation::to_bits(value), sizeof(type), 0, 32, site));           \
    *predicate = matches != 0;                                                                     \
    return matches;                                                                                \
  }
EMULATED_MATCHES(int)
EMULATED_MATCHES(unsigned)
EMULATED_MATCHES(long)
EMULATED_MATCHES(unsigned long)
EMULATED_MATCHES(long long)
EMULATED_MATCHES(unsigned long long)
EMULATED_MATCHES(float)
EMULATED_MATCHES(double)
#undef EMULATED_MATCHES

#define EMULATED_REDUCTION(name, type, kind)                                               \
  inline type __reduce_##name##_sync(unsigned mask, type value, EMULATED_SITE) {           \
    return static_cast<type>(emulation::reduce(emulation::Collective::kReduce##kind, mask, \
                                               static_cast<unsigned>(value), site));       \
  }
EMULATED_REDUCTION(add, unsigned, Add)
EMULATED_REDUCTION(add, int, Add)
EMULATED_REDUCTION(min, unsigned, Min)
EMULATED_REDUCTION(min, int, MinSigned)
EMULATED_REDUCTION(max, unsigned, Max)
EMULATED_REDUCTION(max, int, MaxSigned)
EMULATED_REDUCTION(and, unsigned, And)
EMULATED_REDUCTION(or, unsigned, Or)
EMULATED_REDUCTION(xor, unsigned, Xor)
#undef EMULATED_REDUCTION

inline void __nanosleep(unsigned) { emulation::yield(); }
[[noreturn]] inline void __trap(EMULATED_SITE) { emulation::trap("__trap()", site); }
#undef EMULATED_SITE

inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}

// Memory. Nothing runs beside a fiber, so every access is atomic. The types are CUDA's: uint64_t is
// unsigned long, which atomics do not take.

#ifdef GRAPHED_SAMPLING_RACES
#define EMULATED_ACCESS __forceinline__  // so that races are at lines of the kernel
#else
#define EMULATED_ACCESS inline
#endif
#define EMULATED_ATOMIC(name, type, result)                                 \
  EMULATED_ACCESS type name(type* address, type value) {                    \
    const emulation::races::Accesses here(emulation::races::Kind::kAtomic); \
    const type old = *address;                                              \
    *address = result;                                                      \
    return old;                                                             \
  }                                                                         \
  EMULATED_ACCESS type name##_block(type* address, type value) { return name(address, value); }
#define EMULATED_ATOMICS(type, wide)                                                    \
  EMULATED_ATOMIC(atomicAdd, type,                                                      \
                  static_cast<type>(static_cast<wide>(old) + static_cast<wide>(value))) \
  EMULATED_ATOMIC(atomicExch, type, value)
#define EMULATED_INTEGER_ATOMICS(type, wide)                                 \
  EMULATED_ATOMICS(type, wide)                                               \
  EMULATED_ATOMIC(atomicMin, type, value < old ? value : old)                \
  EMULATED_ATOMIC(atomicMax, type, value > old ? value : old)                \
  EMULATED_ATOMIC(atomicAnd, type, old& value)                               \
  EMULATED_ATOMIC(atomicOr, type, old | value)                               \
  EMULATED_ATOMIC(atomicXor, type, old ^ value)                              \
  EMULATED_ACCESS type atomicCAS(type* address, type expected, type value) { \
    const emulation::races::Accesses here(emulation::races::Kind::kAtomic);  \
    const type old = *address;                                               \
    if (old == expected) *address = value;                                   \
    return old;                                                              \
  }
EMULATED_INTEGER_ATOMICS(int, unsigned)
EMULATED_INTEGER_ATOMICS(unsigned, unsigned)
EMULATED_INTEGER_ATOMICS(unsigned long long, unsigned long long)
EMULATED_ATOMICS(float, float)
EMULATED_ATOMIC(atomicAdd, double, old + value)
EMULATED_ATOMIC(atomicSub, int,
                static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(value)))
EMULATED_ATOMIC(atomicSub, unsigned, old - value)
EMULATED_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATED_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
EMULATED_ATOMIC(atomicMin, long long, value < old ? value : old)
EMULATED_ATOMIC(atomicMax, long long, value > old ? value : old)
#undef EMULATED_INTEGER_ATOMICS
#undef EMULATED_ATOMICS
#undef EMULATED_ATOMIC

#define EMULATED_LOAD(name, kind)                                        \
  template <class T>                                                     \
  EMULATED_ACCESS T name(const T* address) {                             \
    const emulation::races::Accesses here(emulation::races::Kind::kind); \
    return *address;                                                     \
  }
#define EMULATED_STORE(name)                                             \
  template <class T>                                                     \
  EMULATED_ACCESS void name(T* address, std::type_identity_t<T> value) { \
    *address = value;                                                    \
  }
namespace emulation {
EMULATED_ACCESS void atomic_store(uint64_t* place, uint64_t value) {
  const races::Accesses here(races::Kind::kAtomic);
  *place = value;
}
EMULATED_ACCESS uint64_t atomic_load(const uint64_t* place) {
  const races::Accesses here(races::Kind::kAtomic);
  return *place;
}
inline uint64_t nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}
}  // namespace emulation

EMULATED_LOAD(__ldg, kConstant)
EMULATED_LOAD(__ldca, kPlain)
EMULATED_LOAD(__ldcg, kCoherent)
EMULATED_LOAD(__ldcs, kPlain)
EMULATED_LOAD(__ldcv, kCoherent)
EMULATED_LOAD(__ldlu, kPlain)
EMULATED_STORE(__stwb)
EMULATED_STORE(__stcg)
EMULATED_STORE(__stcs)
EMULATED_STORE(__stwt)
#undef EMULATED_LOAD
#undef EMULATED_STORE
#undef EMULATED_ACCESS

// Integers.

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline unsigned long long __brevll(unsigned long long x) {
  x = (x >> 1 & 0x5555555555555555) | (x & 0x5555555555555555) << 1;
  x = (x >> 2 & 0x3333333333333333) | (x & 0x3333333333333333) << 2;
  x = (x >> 4 & 0x0F0F0F0F0F0F0F0F) | (x & 0x0F0F0F0F0F0F0F0F) << 4;
  return __builtin_bswap64(x);
}
inline unsigned __brev(unsigned x) { return static_cast<unsigned>(__brevll(x) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned chosen = selector >> (4 * i);
    result |= (static_cast<unsigned>(both >> (8 * (chosen & 7))) & 255) << (8 * i);
  }
  return result;
}

// Floats.

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 |
                               static_cast<unsigned>(low));
}
inline int __double2hiint(double x) { return static_cast<int>(std::bit_cast<int64_t>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(std::bit_cast<int64_t>(x)); }

// Every operation in the four rounding modes: to nearest, towards zero, down and up.
#define EMULATED_ROUNDED(name, type, parameters, operation, ...)            \
  inline type name##_rn parameters { return (operation)(__VA_ARGS__); }     \
  inline type name##_rz parameters {                                        \
    return emulation::rounded<type>(FE_TOWARDZERO, operation, __VA_ARGS__); \
  }                                                                         \
  inline type name##_rd parameters {                                        \
    return emulation::rounded<type>(FE_DOWNWARD, operation, __VA_ARGS__);   \
  }                                                                         \
  inline type name##_ru parameters {                                        \
    return emulation::rounded<type>(FE_UPWARD, operation, __VA_ARGS__);     \
  }
#define EMULATED_ARITHMETIC(type, add, sub, mul, div, fma_, root)                           \
  EMULATED_ROUNDED(add, type, (type a, type b), [](type x, type y) { return x + y; }, a, b) \
  EMULATED_ROUNDED(sub, type, (type a, type b), [](type x, type y) { return x - y; }, a, b) \
  EMULATED_ROUNDED(mul, type, (type a, type b), [](type x, type y) { return x * y; }, a, b) \
  EMULATED_ROUNDED(div, type, (type a, type b), [](type x, type y) { return x / y; }, a, b) \
  EMULATED_ROUNDED(                                                                         \
      fma_, type, (type a, type b, type c),                                                 \
      [](type x, type y, type z) { return std::fma(x, y, z); }, a, b, c)                    \
  EMULATED_ROUNDED(root, type, (type a), [](type x) { return std::sqrt(x); }, a)
EMULATED_ARITHMETIC(float, __fadd, __fsub, __fmul, __fdiv, __fmaf, __fsqrt)
EMULATED_ARITHMETIC(double, __dadd, __dsub, __dmul, __ddiv, __fma, __dsqrt)
EMULATED_ROUNDED(__frcp, float, (float a), [](float x) { return 1.0f / x; }, a)
EMULATED_ROUNDED(__drcp, double, (double a), [](double x) { return 1.0 / x; }, a)
#undef EMULATED_ARITHMETIC

#define EMULATED_TO_FLOAT(name, from, to) \
  EMULATED_ROUNDED(name, to, (from a), [](from x) { return static_cast<to>(x); }, a)
EMULATED_TO_FLOAT(__double2float, double, float)
EMULATED_TO_FLOAT(__int2float, int, float)
EMULATED_TO_FLOAT(__uint2float, unsigned, float)
EMULATED_TO_FLOAT(__ll2float, long long, float)
EMULATED_TO_FLOAT(__ull2float, unsigned long long, float)
EMULATED_TO_FLOAT(__ll2double, long long, double)
EMULATED_TO_FLOAT(__ull2double, unsigned long long, double)
#undef EMULATED_TO_FLOAT
#undef EMULATED_ROUNDED
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }

#define EMULATED_TO_INTEGER(name, from, to)                                          \
  inline to name##_rn(from x) { return emulation::saturate<to>(std::nearbyint(x)); } \
  inline to name##_rz(from x) { return emulation::saturate<to>(std::trunc(x)); }     \
  inline to name##_rd(from x) { return emulation::saturate<to>(std::floor(x)); }     \
  inline to name##_ru(from x) { return emulation::saturate<to>(std::ceil(x)); }
EMULATED_TO_INTEGER(__float2int, float, int)
EMULATED_TO_INTEGER(__float2uint, float, unsigned)
EMULATED_TO_INTEGER(__float2ll, float, long long)
EMULATED_TO_INTEGER(__float2ull, float, unsigned long long)
EMULATED_TO_INTEGER(__double2int, double, int)
EMULATED_TO_INTEGER(__double2uint, double, unsigned)
EMULATED_TO_INTEGER(__double2ll, double, long long)
EMULATED_TO_INTEGER(__double2ull, double, unsigned long long)
#undef EMULATED_TO_INTEGER

inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }

#define EMULATED_EXTREMES(a_type, b_type, type)                                \
  inline type min(a_type a, b_type b) {                                        \
    return static_cast<type>(b) < static_cast<type>(a) ? static_cast<type>(b)  \
                                                       : static_cast<type>(a); \
  }                                                                            \
  inline type max(a_type a, b_type b) {                                        \
    return static_cast<type>(a) < static_cast<type>(b) ? static_cast<type>(b)  \
                                                       : static_cast<type>(a); \
  }
#define EMULATED_INTEGER_EXTREMES(type)                          \
  EMULATED_EXTREMES(type, type, type)                            \
  EMULATED_EXTREMES(unsigned type, unsigned type, unsigned type) \
  EMULATED_EXTREMES(type, unsigned type, unsigned type)          \
  EMULATED_EXTREMES(unsigned type, type, unsigned type)
EMULATED_INTEGER_EXTREMES(int)
EMULATED_INTEGER_EXTREMES(long)
EMULATED_INTEGER_EXTREMES(long long)
#undef EMULATED_INTEGER_EXTREMES
#undef EMULATED_EXTREMES
// As the GPU's: the other one, where one is NaN.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }
inline double min(float a, double b) { return ::fmin(static_cast<double>(a), b); }
inline double max(float a, double b) { return ::fmax(static_cast<double>(a), b); }
inline double min(double a, float b) { return ::fmin(a, static_cast<double>(b)); }
inline double max(double a, float b) { return ::fmax(a, static_cast<double>(b)); }
