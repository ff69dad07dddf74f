// Floats, their order, and masses.
#pragma once

#include <cstdint>

#include "../common/device.h"

namespace graphed_sampling {

constexpr float kInf = __builtin_inff(), kNegInf = -__builtin_inff();
constexpr float kFltMax = 3.4028234663852886e38f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.69314718055994530942;
constexpr int kMassBits = 40;
constexpr double kOne = 1099511627776.0;  // the mass of a row's largest probability: 2**kMassBits

__device__ inline int64_t load_i64(const int32_t* words) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(words[1])) << 32 |
                              static_cast<uint32_t>(words[0]));
}

__device__ inline void store_i64(int32_t* words, int64_t value) {
  words[0] = static_cast<int32_t>(value);
  words[1] = static_cast<int32_t>(value >> 32);
}

__device__ inline float nan_f32() { return __int_as_float(0x7FC00000); }

__device__ inline float load_f32(const int32_t* word) { return __int_as_float(*word); }
__device__ inline double load_f64(const int32_t* words) {
  return __longlong_as_double(load_i64(words));
}

// An integer in the order of the floats, none of them NaN or -0.0.
__device__ inline int32_t key_of(float y) {
  const int32_t bits = __float_as_int(y);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

__device__ inline float from_key(int32_t key) {
  return __int_as_float(key ^ ((key >> 31) & 0x7FFFFFFF));
}

// 64 bits in the order (y descending, id ascending), larger first; above 0 for every token.
__device__ inline uint64_t order_of(float y, int32_t id) {
  const uint32_t key = static_cast<uint32_t>(key_of(y)) ^ 0x80000000u;
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(0x7FFFFFFF - id);
}

__device__ inline float y_of_order(uint64_t order) {
  return from_key(static_cast<int32_t>(static_cast<uint32_t>(order >> 32) ^ 0x80000000u));
}

__device__ inline int32_t id_of_order(uint64_t order) {
  return 0x7FFFFFFF - static_cast<int32_t>(order & 0xFFFFFFFFu);
}

// (y - base) * scale, where the difference may exceed what fp32 holds.
__device__ inline float z_of(float y, float base, float scale) {
  return __fmaf_rn(y, 0.5f, base * -0.5f) * (scale * 2.0f);
}

// 2**z: relative error below 2**-36. z is at most 0 but where given statistics are wrong, where
// larger ones count as 0, so that masses stay masses; and below -1000 it counts as -1000. Taylor's
// series on
// [-1/2, 1/2]; its coefficients are ln(2)**k / k!.
__device__ inline double exp2_wide(double z) {
  z = fmin(fmax(z, -1000.0), 0.0);
  const double whole = rint(z);
  const double f = z - whole;
  double r = 1.0178086009239699e-7;
  r = __fma_rn(r, f, 1.3215486790144307e-6);
  r = __fma_rn(r, f, 1.5252733804059840e-5);
  r = __fma_rn(r, f, 1.5403530393381609e-4);
  r = __fma_rn(r, f, 1.3333558146428443e-3);
  r = __fma_rn(r, f, 9.6181291076284772e-3);
  r = __fma_rn(r, f, 5.5504108664821580e-2);
  r = __fma_rn(r, f, 2.4022650695910071e-1);
  r = __fma_rn(r, f, 6.9314718055994531e-1);
  r = __fma_rn(r, f, 1.0);
  return r * __longlong_as_double((static_cast<int64_t>(whole) + 1023) << 52);
}

// The mass of a weight in [0, 1].
__device__ inline int64_t mass_of(double weight) { return __double2ll_rn(weight * kOne); }

// The mass of y where that of `largest` is kOne. scale: log2(e) / temperature.
__device__ inline int64_t mass_of_y(float y, double largest, double scale) {
  return mass_of(exp2_wide((static_cast<double>(y) - largest) * scale));
}

// ln of a mass in units of the largest weight, within 2**-22; of none, that of the smallest.
__device__ inline double log_mass(int64_t mass) {
  const int64_t bits = __double_as_longlong(static_cast<double>(mass < 1 ? int64_t{1} : mass));
  const int64_t exponent = (bits >> 52) - (1023 + kMassBits);
  const double mantissa = __longlong_as_double((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
  return (static_cast<double>(exponent) +
          static_cast<double>(lg2_approx(static_cast<float>(mantissa)))) *
         kLn2;
}

// The largest fp32 <= value, and the smallest >= value.
__device__ inline float round_down(double value) { return __double2float_rd(value) + 0.0f; }
__device__ inline float round_up(double value) { return __double2float_ru(value) + 0.0f; }

// The mass that a share of a total takes.
__device__ inline int64_t target_of(float share, int64_t total) {
  return static_cast<int64_t>(ceil(static_cast<double>(share) * static_cast<double>(total)));
}

// floor(word * total / 2**64).
__device__ inline int64_t position_of(uint64_t word, int64_t total) {
  return static_cast<int64_t>(__umul64hi(word, static_cast<uint64_t>(total)));
}

// How far a word reaches into a part of a total, which begins at `before` and has that mass: a
// share in [0, 1).
__device__ inline double share_of(uint64_t word, int64_t total, int64_t before, int64_t mass) {
  // The first bits of what the multiplication leaves over: all of them would round up to a whole.
  const double fraction =
      static_cast<double>((word * static_cast<uint64_t>(total)) >> 58) * 0.015625;
  const double inside = static_cast<double>(position_of(word, total) - before);
  return (inside + fraction) / static_cast<double>(mass);
}

}  // namespace graphed_sampling
