// The first pass: every logit once, of which it keeps maxima and sums of groups.
#pragma once

#include "row.h"

namespace graphed_sampling {

// Of a row's groups, one value each. Weights are 2**z with z relative to the group's maximum.
struct Statistics {
  float* maxima;  // of y; +inf marks a group that holds NaN or +inf
  float* sums;    // of the weights of y at the row's temperature, where that is wanted; else raw
  float* raw_maxima;  // of the sanitised logits, where they may differ from y
  float* raw_sums;    // of their weights at temperature 1, where `sums` do not hold them
  float* moments;     // of weight * z of y at the row's temperature
};

constexpr int kStatistics = 5;

// What the statistics of a row have to hold.
struct Wishes {
  bool total, mean, raw;
  bool split;  // whether y and logits may differ
  bool both;   // whether the same maxima have sums at two temperatures
};

__device__ inline Wishes wishes_of(const Row& row) {
  Wishes wishes = {row.has(kTotal), row.has(kMean), row.has(kRaw),
                   row.checks != 0 || row.has(kLists), false};
  wishes.both = !wishes.split && wishes.total && wishes.raw && row.scale != kLog2E;
  return wishes;
}

// Of some tokens: the maximum, and what their weights relative to it add up to.
struct Weights {
  float maximum, sum, moment;
};

__device__ inline float finite_or_zero(float maximum) {
  return maximum == kNegInf ? 0.0f : maximum;
}

__device__ inline Weights merged(const Weights& a, const Weights& b, float scale) {
  Weights both;
  both.maximum = fmaxf(a.maximum, b.maximum);
  const float base = finite_or_zero(both.maximum);
  const float a_z = z_of(a.maximum, base, scale), b_z = z_of(b.maximum, base, scale);
  const float a_weight = ex2_approx(a_z), b_weight = ex2_approx(b_z);
  both.sum = a.sum * a_weight + b.sum * b_weight;
  both.moment = (a_z < -126.0f ? 0.0f : (a.moment + a.sum * a_z) * a_weight) +
                (b_z < -126.0f ? 0.0f : (b.moment + b.sum * b_z) * b_weight);
  return both;
}

constexpr int kHalf = kGroup / 2;

__device__ inline float maximum_of(const float (&values)[kHalf]) {
  float maximum = values[0];
#pragma unroll
  for (int i = 1; i < kHalf; ++i) maximum = fmaxf(maximum, values[i]);
  return maximum;
}

// NaN where a value is NaN or +inf.
__device__ inline float sum_of(const float (&values)[kHalf], float maximum, float scale) {
  const float base = finite_or_zero(maximum);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kHalf; ++i) sums[i % 4] += ex2_approx(z_of(values[i], base, scale));
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ inline float moment_of(const float (&values)[kHalf], float maximum, float scale) {
  const float base = finite_or_zero(maximum);
  float moment = 0.0f;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float z = z_of(values[i], base, scale);
    moment += z < -126.0f ? 0.0f : ex2_approx(z) * z;
  }
  return moment;
}

// Pieces of a group as they lie in memory: a half of it, or both.
template <class Logits, int kHalves>
struct Packs {
  Pack<Logits> packs[kHalves * kPieces / 2];
};

template <class Logits, int kHalves>
__device__ inline Packs<Logits, kHalves> load_halves(const Source& source, int group, int half) {
  Packs<Logits, kHalves> loaded;
#pragma unroll
  for (int i = 0; i < kHalves * kPieces / 2; ++i) {
    loaded.packs[i] = load_pack<Logits, true>(source, piece_first(group, half * (kPieces / 2) + i));
  }
  return loaded;
}

template <class Logits, int kHalves>
__device__ inline void unpack_half(const Packs<Logits, kHalves>& loaded, int half,
                                   float (&x)[kHalf]) {
#pragma unroll
  for (int i = 0; i < kPieces / 2; ++i) {
    float piece[kPiece];
    Logits::unpack(loaded.packs[half * (kPieces / 2) + i].words, piece);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) x[i * kPiece + j] = piece[j];
  }
}

// A group of a row in which masks or penalties count, or whose y the lists will change later.
template <class Logits>
__device__ __noinline__ void stream_checked_group(const Row& row, const Wishes wishes, int group,
                                                  const Statistics at) {
  Weights raw = {kNegInf, 0.0f, 0.0f}, y = raw;
  uint64_t seen = 0, in_output = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[kHalf];
    unpack_half(load_halves<Logits, 1>(row, group, half), 0, x);
    Weights part = {maximum_of(x), 0.0f, 0.0f};
    part.sum = sum_of(x, part.maximum, kLog2E);
    raw = merged(raw, part, kLog2E);
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      const int piece = half * (kPieces / 2) + i;
      const PieceBits bits = piece_bits(row, piece_first(group, piece));
      // Tokens that were seen are few: they are taken one after the other below.
      const uint32_t here = bits.seen & bits.allowed, clear = bits.allowed & ~bits.seen;
      seen |= uint64_t{here} << (piece * kPiece);
      in_output |= uint64_t{bits.in_output} << (piece * kPiece);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if ((clear >> j & 1) == 0) x[i * kPiece + j] = kNegInf;
      }
    }
    part.maximum = maximum_of(x);
    part.sum = wishes.total ? sum_of(x, part.maximum, row.scale) : 0.0f;
    part.moment = wishes.mean ? moment_of(x, part.maximum, row.scale) : 0.0f;
    y = merged(y, part, row.scale);
  }
  while (seen != 0) {
    const int place = __ffsll(static_cast<long long>(seen)) - 1;
    seen &= seen - 1;
    const int token = token_at(group, place);
    const float x = load_logit<Logits>(row, token);
    if (x > kNegInf) {
      const bool was_output = (in_output >> place & 1) != 0;
      y = merged(y, {settled(x, penalised(row, x, token, was_output)), 1.0f, 0.0f}, row.scale);
    }
  }
  at.maxima[group] = raw.sum != raw.sum ? kInf : y.maximum + 0.0f;
  if (wishes.total) at.sums[group] = y.sum;
  if (wishes.mean) at.moments[group] = y.moment;
  at.raw_maxima[group] = raw.maximum + 0.0f;
  at.raw_sums[group] = raw.sum;
}

template <class Logits, int kHalves>
__device__ inline float maximum_of(const Packs<Logits, kHalves>& loaded, int half) {
  uint32_t word = loaded.packs[half * (kPieces / 2)].words[0];
#pragma unroll
  for (int i = 0; i < kPieces / 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4 * Logits::kVectors; ++j) {
      word = Logits::larger(word, loaded.packs[half * (kPieces / 2) + i].words[j]);
    }
  }
  return Logits::largest(word);
}

// A group of a row in which y is the logit. ahead: what is loaded of it.
template <class Logits>
__device__ inline void stream_group(const Source& source, const Wishes& wishes, float scale,
                                    int group, const Packs<Logits, Logits::kHalvesAhead>& ahead,
                                    const Statistics& at) {
  const float first_scale = wishes.total ? scale : kLog2E;
  Weights first = {kNegInf, 0.0f, 0.0f}, raw = first;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Packs<Logits, 1> loaded;
    if (half < Logits::kHalvesAhead) {
#pragma unroll
      for (int i = 0; i < kPieces / 2; ++i) {
        loaded.packs[i] = ahead.packs[(half * (kPieces / 2) + i) % (Logits::kHalvesAhead * 4)];
      }
    } else {
      loaded = load_halves<Logits, 1>(source, group, half);
    }
    Weights part = {maximum_of(loaded, 0), 0.0f, 0.0f};
    float x[kHalf];
    unpack_half(loaded, 0, x);
    if (wishes.both) {
      part.sum = sum_of(x, part.maximum, kLog2E);
      raw = merged(raw, part, kLog2E);
    }
    part.sum = sum_of(x, part.maximum, first_scale);
    if (wishes.mean) part.moment = moment_of(x, part.maximum, first_scale);
    first = merged(first, part, first_scale);
  }
  at.maxima[group] = first.sum != first.sum ? kInf : first.maximum + 0.0f;
  at.sums[group] = first.sum;
  if (wishes.mean) at.moments[group] = first.moment;
  if (wishes.both) at.raw_sums[group] = raw.sum;
}

}  // namespace graphed_sampling
