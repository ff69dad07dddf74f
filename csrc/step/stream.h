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

__device__ inline Wishes wishes_of(int flags, bool split, float scale) {
  Wishes wishes = {(flags & kTotal) != 0, (flags & kMean) != 0, (flags & kRaw) != 0, split, false};
  wishes.both = !split && wishes.total && wishes.raw && scale != kLog2E;
  return wishes;
}

__device__ inline float finite_or_zero(float maximum) {
  return maximum == kNegInf ? 0.0f : maximum;
}

// A tile is what a warp reads at a time: 8 pieces a lane, 256 tokens apart, so that its loads are
// contiguous. Lanes 8 i to 8 i + 7 have, as their piece p, the tile's group 4 p + i.
constexpr int kGroupsOfTile = 32;
constexpr int kTile = kGroup * kGroupsOfTile;

// Of a row, whose last tile may have less tokens.
GS_HOST_DEVICE constexpr int tiles_of(int vocab) { return (vocab + kTile - 1) / kTile; }
GS_HOST_DEVICE constexpr int groups_of(int vocab) { return tiles_of(vocab) * kGroupsOfTile; }

__device__ inline int tile_first(int tile, int piece, int lane) {
  return tile * kTile + piece * (kWarp * kPiece) + lane * kPiece;
}

// So many pieces a lane works on at a time: a set.
constexpr int kAtOnce = 4;
constexpr int kSets = kPieces / kAtOnce;

template <class Logits>
struct Set {
  Pack<Logits> packs[kAtOnce];
};

template <class Logits>
__device__ inline void renew_all(Set<Logits>& set) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (int j = 0; j < 4 * Logits::kVectors; ++j) renew(set.packs[i].words[j]);
  }
}

// How many of a row's tiles load_set() is for: all or none. It is for none of shards.
__device__ inline int tiles_to_load(const Source& source) {
  return source.aligned && source.vocab % kPiece == 0 ? tiles_of(source.vocab) : 0;
}

// A set of a row that is aligned and ends with a whole piece. What lies after it is -inf.
template <class Logits>
__device__ inline Set<Logits> load_set(const Source& source, int tile, int set, int lane) {
  Set<Logits> loaded;
  if ((tile + 1) * kTile <= source.vocab) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded.packs[i] =
          load_whole_pack<Logits>(source.logits, tile_first(tile, set * kAtOnce + i, lane));
    }
    return loaded;
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int first = tile_first(tile, set * kAtOnce + i, lane);
#pragma unroll
    for (int j = 0; j < 4 * Logits::kVectors; ++j) loaded.packs[i].words[j] = Logits::kNegInfWord;
    if (first < source.vocab) loaded.packs[i] = load_whole_pack<Logits>(source.logits, first);
  }
  return loaded;
}

// A set of any row.
template <class Logits>
__device__ inline Set<Logits> load_any_set(const Source& source, int tile, int set, int lane) {
  Set<Logits> loaded;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    loaded.packs[i] = load_pack<Logits>(source, tile_first(tile, set * kAtOnce + i, lane));
  }
  return loaded;
}

// Over the 8 lanes that share groups, of the values that are numbered as the lane is, what
// combine(a, b) makes of them: each exchange halves how many a lane still has.
template <class Combine>
__device__ inline float over_groups(const float (&values)[kAtOnce], int lane, Combine combine) {
  float left[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) left[i] = values[i];
#pragma unroll
  for (int half = kAtOnce / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? left[i] : left[i + half];
      const float kept = upper ? left[i + half] : left[i];
      left[i] = combine(kept, __shfl_xor_sync(kAllLanes, sent, half));
    }
  }
  // Two lanes have each, from parts of it.
  return combine(left[0], __shfl_xor_sync(kAllLanes, left[0], 4));
}

__device__ inline float sum_of_groups(const float (&values)[kAtOnce], int lane) {
  return over_groups(values, lane, [](float a, float b) { return a + b; });
}

// The group whose value that is, where the pieces begin with `first`. Two lanes have each, and one
// of them writes it.
__device__ inline int group_of_lane(int tile, int first, int lane) {
  return tile * kGroupsOfTile + (first + lane % kAtOnce) * (kWarp / kPieces) + lane / kPieces;
}
__device__ inline bool lane_writes(int lane) { return lane % kPieces < kAtOnce; }

__device__ inline float moment_of_one(float y, float base, float scale) {
  const float z = z_of(y, base, scale);
  return z < -126.0f ? 0.0f : ex2_approx(z) * z;
}

// Of weights from a set's base on, what they are from a group's own maximum on: a factor, and by
// how much z is less.
struct Rebased {
  float factor, z;
};

// Below it differences that fp32 does not hold have exponents that count.
constexpr float kLeastScale = 1e-30f;

// Exponents of a set's weights at one temperature. They start from the largest token of the whole
// set: a group far below it has weights that are nothing to the row either, unless a list takes
// that token away (`repair_listed`). Equals of the largest weigh 1, so that rows of equals add up
// to whole numbers.
struct Exponents {
  float base, scale;

  __device__ bool wide() const { return scale < kLeastScale; }
  __device__ float narrow_z(float x) const { return (x - base) * scale; }
  __device__ float z(float x) const { return wide() ? z_of(x, base, scale) : narrow_z(x); }
  __device__ Rebased rebased(float maximum) const {
    const float of_maximum = maximum == kNegInf ? 0.0f : z(maximum);
    return {ex2_approx(fminf(-of_maximum, 126.0f)), of_maximum};
  }
};

// The sum of a set's weights, of the group that is the lane's. NaN where a logit of the group is
// NaN or +inf. kWide: whether exponents may be wide.
template <bool kWide, class Logits>
__device__ inline float group_sum(const Set<Logits>& set, const Exponents& exponents, float maximum,
                                  int lane) {
  float parts[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float x[kPiece];
    Logits::unpack(set.packs[i].words, x);
    float sums[2];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float weight = ex2_approx(kWide ? exponents.z(x[j]) : exponents.narrow_z(x[j]));
      sums[j % 2] = j < 2 ? weight : sums[j % 2] + weight;
    }
    parts[i] = sums[0] + sums[1];
  }
  return sum_of_groups(parts, lane) * exponents.rebased(maximum).factor;
}

// The sum of weight * z, likewise.
template <class Logits>
__device__ inline float group_moment(const Set<Logits>& set, const Exponents& exponents,
                                     float maximum, float sum, int lane) {
  float parts[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float x[kPiece];
    Logits::unpack(set.packs[i].words, x);
    parts[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float z = exponents.z(x[j]);
      parts[i] += z < -126.0f ? 0.0f : ex2_approx(z) * z;
    }
  }
  const Rebased rebased = exponents.rebased(maximum);
  return sum_of_groups(parts, lane) * rebased.factor - rebased.z * sum;
}

// Where a set's exponents start, from each lane's largest token.
__device__ inline float base_of_set(float largest) {
  return finite_or_zero(from_key(__reduce_max_sync(kAllLanes, key_of(largest + 0.0f))));
}

__device__ inline float largest_in(const float (&values)[kAtOnce]) {
  return fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3]));
}

__device__ inline float max_of_groups(const float (&values)[kAtOnce], int lane) {
  return over_groups(values, lane, [](float a, float b) { return fmaxf(a, b); }) + 0.0f;
}

// A set, of a row in which y is the logit. kAll: whether exponents may be wide, and means wanted.
template <bool kAll, class Logits>
__device__ inline void stream_set(const Wishes wishes, float scale, int tile, int number, int lane,
                                  Set<Logits>& set, const Statistics& at) {
  float maxima[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(set.packs[i].words);
  const float base = base_of_set(largest_in(maxima));
  const float maximum = max_of_groups(maxima, lane);
  const int group = group_of_lane(tile, number * kAtOnce, lane);
  const bool writes = lane_writes(lane);
  renew_all(set);
  const Exponents exponents = {base, wishes.total ? scale : kLog2E};
  const float sum = group_sum<kAll>(set, exponents, maximum, lane);
  if (writes) {
    at.maxima[group] = sum != sum ? kInf : maximum;
    at.sums[group] = sum;
  }
  if (wishes.both) {
    renew_all(set);
    const float raw_sum = group_sum<false>(set, Exponents{base, kLog2E}, maximum, lane);
    if (writes) at.raw_sums[group] = raw_sum;
  }
  if (kAll && wishes.mean) {
    renew_all(set);
    const float moment = group_moment(set, exponents, maximum, sum, lane);
    if (writes) at.moments[group] = moment;
  }
}

// Any tiles of a warp, `step` apart.
template <class Logits>
__device__ __noinline__ void stream_any_tiles(const Source source, const Wishes wishes, float scale,
                                              int tile, int step, int end, int lane,
                                              const Statistics at) {
#pragma unroll 1
  for (; tile < end; tile += step) {
#pragma unroll 1
    for (int number = 0; number < kSets; ++number) {
      Set<Logits> set = load_any_set<Logits>(source, tile, number, lane);
      stream_set<true>(wishes, scale, tile, number, lane, set, at);
    }
  }
}

// A warp's tiles up to `end`, `step` apart, which load_set() is for and whose first one is in
// `sets`. The place of a set that is done is where the next tile's is loaded to. Returns the tile
// after. kBoth: as wishes.both. Each has its own loop: one for both keeps more in registers than
// there are.
template <bool kBoth, class Logits>
__device__ inline int stream_loaded_tiles(const Source& source, const Wishes& wishes, float scale,
                                          int tile, int step, int end, int lane,
                                          Set<Logits> (&sets)[kSets], const Statistics& at) {
  const Wishes own = {wishes.total, false, wishes.raw, false, kBoth};
#pragma unroll 1
  while (tile < end) {
    const int next = tile + step;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      stream_set<false>(own, scale, tile, i, lane, sets[i], at);
      if (next < end) sets[i] = load_set<Logits>(source, next, i, lane);
    }
    tile = next;
  }
  return tile;
}

// A warp's tiles, `step` apart, of a row in which y is the logit. whole: how many of the row's
// tiles load_set() is for; sets: the first tile's, if it is one of those.
template <class Logits>
__device__ inline void stream_tiles(const Source& source, const Wishes wishes, float scale,
                                    int tile, int step, int end, int whole, int lane,
                                    Set<Logits> (&sets)[kSets], const Statistics& at) {
  const int last = wishes.mean || scale < kLeastScale ? 0 : min(end, whole);
  if (wishes.both) {
    tile = stream_loaded_tiles<true>(source, wishes, scale, tile, step, last, lane, sets, at);
  } else {
    tile = stream_loaded_tiles<false>(source, wishes, scale, tile, step, last, lane, sets, at);
  }
  if (tile < end) stream_any_tiles<Logits>(source, wishes, scale, tile, step, end, lane, at);
}

// Of a lane's tokens of a set a bit each: those that no mask bans and that were not seen before,
// those that were, and which of all were in the output.
struct SetBits {
  uint32_t clear, seen, in_output;
};

template <class Logits>
__device__ inline void load_checked_set(const Row& row, int tile, int number, int whole, int lane,
                                        Set<Logits>& set, SetBits& bits) {
  bool in_one_piece = false;
  if constexpr (!Logits::kSharded) in_one_piece = tile < whole;
  if (in_one_piece) {
    set = load_set<Logits>(row, tile, number, lane);
  } else {
    set = load_any_set<Logits>(row, tile, number, lane);
  }
  bits = {0, 0, 0};
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const PieceBits piece = piece_bits(row, tile_first(tile, number * kAtOnce + i, lane));
    bits.clear |= (piece.allowed & ~piece.seen) << (kPiece * i);
    bits.seen |= (piece.allowed & piece.seen) << (kPiece * i);
    bits.in_output |= piece.in_output << (kPiece * i);
  }
}

// Tokens of a lane that were seen before, by piece: what they weigh relative to their largest.
struct Seen {
  float maxima[kAtOnce], sums[kAtOnce], moments[kAtOnce];
};

// They are few: each lane takes its own one after the other.
template <class Logits>
__device__ inline Seen weigh_seen(const Row& row, const Wishes wishes, const SetBits& bits,
                                  int tile, int number, int lane) {
  Seen seen;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    seen.maxima[i] = kNegInf;
    seen.sums[i] = seen.moments[i] = 0.0f;
  }
#pragma unroll 1
  for (uint32_t left = bits.seen; left != 0; left &= left - 1) {
    const int bit = __ffs(static_cast<int>(left)) - 1;
    const int token = tile_first(tile, number * kAtOnce + bit / kPiece, lane) + bit % kPiece;
    const float x = load_logit<Logits>(row, token);
    if (x == kNegInf) continue;
    const float y = settled(x, penalised(row, x, token, (bits.in_output >> bit & 1) != 0));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (bit / kPiece != i) continue;
      const float largest = fmaxf(seen.maxima[i], y);
      if (wishes.total) {
        const float z = z_of(seen.maxima[i], largest, row.scale);
        const float weight = ex2_approx(z);
        if (wishes.mean) {
          seen.moments[i] = (z < -126.0f ? 0.0f : (seen.moments[i] + seen.sums[i] * z) * weight) +
                            moment_of_one(y, largest, row.scale);
        }
        seen.sums[i] = seen.sums[i] * weight + ex2_approx(z_of(y, largest, row.scale));
      }
      seen.maxima[i] = largest;
    }
  }
  return seen;
}

// A set of a row in which masks or penalties count, or whose y the lists will change later.
template <class Logits>
__device__ inline void stream_checked_set(const Row& row, const Wishes wishes, int tile, int number,
                                          int lane, Set<Logits>& set, const SetBits& bits,
                                          const Statistics& at) {
  const int group = group_of_lane(tile, number * kAtOnce, lane);
  const bool writes = lane_writes(lane);
  float maxima[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(set.packs[i].words);
  const float raw_base = base_of_set(largest_in(maxima));
  const float raw_maximum = max_of_groups(maxima, lane);
  renew_all(set);
  const float raw_sum = group_sum<false>(set, Exponents{raw_base, kLog2E}, raw_maximum, lane);
  renew_all(set);

  const Seen seen = weigh_seen<Logits>(row, wishes, bits, tile, number, lane);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float y[kPiece];
    Logits::unpack(set.packs[i].words, y);
    maxima[i] = seen.maxima[i];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      maxima[i] = fmaxf(maxima[i], (bits.clear >> (kPiece * i + j) & 1) != 0 ? y[j] : kNegInf);
    }
  }
  float base = base_of_set(largest_in(maxima));
  if (base == kInf) {
    // Lists may ban that token yet, and the other groups' weights then count.
    float finite = kNegInf;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float y[kPiece];
      Logits::unpack(set.packs[i].words, y);
      if (seen.maxima[i] < kInf) finite = fmaxf(finite, seen.maxima[i]);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if ((bits.clear >> (kPiece * i + j) & 1) != 0 && y[j] < kInf) finite = fmaxf(finite, y[j]);
      }
    }
    base = base_of_set(finite);
  }
  const float maximum = max_of_groups(maxima, lane);
  if (writes) {
    at.maxima[group] = raw_sum != raw_sum ? kInf : maximum;
    at.raw_maxima[group] = raw_maximum;
    at.raw_sums[group] = raw_sum;
  }
  if (!wishes.total) return;
  renew_all(set);
  const Exponents exponents = {base, row.scale};
  float parts[kAtOnce], moments[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float y[kPiece];
    Logits::unpack(set.packs[i].words, y);
    const float z_of_seen = exponents.z(seen.maxima[i]);
    const float of_seen = ex2_approx(z_of_seen);
    parts[i] = seen.sums[i] * of_seen;
    moments[i] =
        z_of_seen < -126.0f ? 0.0f : (seen.moments[i] + seen.sums[i] * z_of_seen) * of_seen;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const bool clear = (bits.clear >> (kPiece * i + j) & 1) != 0;
      const float z = clear ? exponents.z(y[j]) : kNegInf;
      const float weight = ex2_approx(z);
      parts[i] += weight;
      if (wishes.mean) moments[i] += z < -126.0f ? 0.0f : weight * z;
    }
  }
  const Rebased rebased = exponents.rebased(maximum);
  const float sum = sum_of_groups(parts, lane);
  if (writes) at.sums[group] = sum * rebased.factor;
  if (wishes.mean) {
    const float moment = sum_of_groups(moments, lane);
    if (writes) at.moments[group] = (moment - rebased.z * sum) * rebased.factor;
  }
}

// A warp's tiles of such a row, each set on its way while it works on the one before. whole: as
// above.
template <class Logits>
__device__ __noinline__ void stream_checked_tiles(const Row& row, const Wishes wishes, int tile,
                                                  int step, int end, int whole, int lane,
                                                  const Statistics at) {
  if (tile >= end) return;
  Set<Logits> set, next_set;
  SetBits bits, next_bits;
  int number = 0;
  load_checked_set(row, tile, number, whole, lane, set, bits);
#pragma unroll 1
  while (tile < end) {
    const bool last = number == kSets - 1;
    const int next_tile = last ? tile + step : tile, next_number = last ? 0 : number + 1;
    if (next_tile < end) {
      load_checked_set(row, next_tile, next_number, whole, lane, next_set, next_bits);
    }
    stream_checked_set(row, wishes, tile, number, lane, set, bits, at);
    set = next_set;
    bits = next_bits;
    tile = next_tile;
    number = next_number;
  }
}

// One set by itself, of any row: what its tile's would be.
template <class Logits>
__device__ __noinline__ void stream_one_set(const Row& row, const Wishes wishes, int set, int lane,
                                            const Statistics at) {
  const int tile = set / kSets, number = set % kSets;
  Set<Logits> loaded;
  if (wishes.split) {
    SetBits bits;
    load_checked_set(row, tile, number, 0, lane, loaded, bits);
    stream_checked_set(row, wishes, tile, number, lane, loaded, bits, at);
  } else {
    loaded = load_any_set<Logits>(row, tile, number, lane);
    stream_set<true>(wishes, row.scale, tile, number, lane, loaded, at);
  }
}

}  // namespace graphed_sampling
