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

__device__ inline int tile_first(int tile, int piece, int lane) {
  return tile * kTile + piece * (kWarp * kPiece) + lane * kPiece;
}

template <int kNumber, class Logits>
__device__ inline void renew_all(Pack<Logits> (&packs)[kNumber]) {
#pragma unroll
  for (int i = 0; i < kNumber; ++i) {
#pragma unroll
    for (int j = 0; j < 4 * Logits::kVectors; ++j) renew(packs[i].words[j]);
  }
}

// Pieces of a tile, from the first one on.
template <class Logits, int kNumber>
struct Packs {
  Pack<Logits> packs[kNumber];
};

template <class Logits, int kNumber>
__device__ inline Packs<Logits, kNumber> load_packs(const Source& source, int tile, int lane,
                                                    int first) {
  Packs<Logits, kNumber> loaded;
#pragma unroll
  for (int i = 0; i < kNumber; ++i) {
    loaded.packs[i] = load_whole_pack<Logits>(source, tile_first(tile, first + i, lane));
  }
  return loaded;
}

// So many pieces a lane works on at a time.
constexpr int kAtOnce = 4;

// Of values a lane, each the part of another group, the largest among the lanes that share them.
__device__ inline void maxima_of_groups(float (&maxima)[kAtOnce]) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      maxima[i] = fmaxf(maxima[i], __shfl_xor_sync(kAllLanes, maxima[i], step));
    }
  }
}

// The sum, over the 8 lanes that share groups, of the values that are numbered as the lane is: each
// exchange halves how many a lane still adds up.
__device__ inline float sum_of_groups(const float (&values)[kAtOnce], int lane) {
  float sums[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sums[i] = values[i];
#pragma unroll
  for (int half = kAtOnce / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? sums[i] : sums[i + half];
      const float kept = upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(kAllLanes, sent, half);
    }
  }
  // Two lanes have each: their parts are still to be added.
  return sums[0] + __shfl_xor_sync(kAllLanes, sums[0], 4);
}

// The one of the values that is numbered as the lane is.
__device__ inline float value_of_lane(const float (&values)[kAtOnce], int lane) {
  float value = values[0];
#pragma unroll
  for (int i = 1; i < kAtOnce; ++i) value = lane % kAtOnce == i ? values[i] : value;
  return value;
}

// The group whose value that is, where the pieces begin with `first`. Two lanes have each, and one
// of them writes it.
__device__ inline int group_of_lane(int tile, int first, int lane) {
  return tile * kGroupsOfTile + (first + lane % kAtOnce) * (kWarp / kPieces) + lane / kPieces;
}
__device__ inline bool lane_writes(int lane) { return lane % kPieces < kAtOnce; }

// NaN where a logit is NaN or +inf.
template <class Logits>
__device__ inline float sum_of_piece(const Pack<Logits>& pack, float maximum, float scale) {
  float x[kPiece];
  Logits::unpack(pack.words, x);
  const float base = finite_or_zero(maximum);
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) sums[i % 2] += ex2_approx(z_of(x[i], base, scale));
  return sums[0] + sums[1];
}

__device__ inline float moment_of_one(float y, float base, float scale) {
  const float z = z_of(y, base, scale);
  return z < -126.0f ? 0.0f : ex2_approx(z) * z;
}

// Pieces of a tile, from `first` on, of a row in which y is the logit.
template <class Logits, int kNumber>
__device__ inline void stream_pieces(const Wishes& wishes, float scale, int tile, int first_piece,
                                     int lane, const Packs<Logits, kNumber>& pieces,
                                     const Statistics& at) {
  const float first_scale = wishes.total ? scale : kLog2E;
#pragma unroll
  for (int begin = 0; begin < kNumber; begin += kAtOnce) {
    Pack<Logits> packs[kAtOnce];
    float maxima[kAtOnce], parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      packs[i] = pieces.packs[begin + i];
      maxima[i] = Logits::largest(packs[i].words);
    }
    maxima_of_groups(maxima);
    renew_all(packs);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) parts[i] = sum_of_piece(packs[i], maxima[i], first_scale);
    const float sum = sum_of_groups(parts, lane);
    const float maximum = value_of_lane(maxima, lane);
    const int group = group_of_lane(tile, first_piece + begin, lane);
    const bool writes = lane_writes(lane);
    if (writes) {
      at.maxima[group] = sum != sum ? kInf : maximum + 0.0f;
      at.sums[group] = sum;
    }
    if (wishes.both) {
      renew_all(packs);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) parts[i] = sum_of_piece(packs[i], maxima[i], kLog2E);
      const float raw_sum = sum_of_groups(parts, lane);
      if (writes) at.raw_sums[group] = raw_sum;
    }
    if (wishes.mean) {
      renew_all(packs);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float x[kPiece];
        Logits::unpack(packs[i].words, x);
        parts[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          parts[i] += moment_of_one(x[j], finite_or_zero(maxima[i]), first_scale);
        }
      }
      const float moment = sum_of_groups(parts, lane);
      if (writes) at.moments[group] = moment;
    }
  }
}

// A tile that ends after the row, or of a row that is not aligned.
template <class Logits>
__device__ __noinline__ void stream_ragged_tile(const Source& source, const Wishes& wishes,
                                                float scale, int tile, int lane,
                                                const Statistics& at) {
#pragma unroll 1
  for (int first = 0; first < kPieces; first += kAtOnce) {
    Packs<Logits, kAtOnce> loaded;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded.packs[i] = load_pack<Logits>(source, tile_first(tile, first + i, lane));
    }
    stream_pieces(wishes, scale, tile, first, lane, loaded, at);
  }
}

// A warp's tiles, `step` apart, of a row in which y is the logit: while it works on some pieces the
// next ones are on their way. whole: how many of the row's tiles lie inside it, all of them
// aligned; ahead: the first pieces, if those of the first tile do.
template <class Logits>
__device__ inline void stream_tiles(const Source& source, const Wishes& wishes, float scale,
                                    int tile, int step, int end, int whole, int lane,
                                    Packs<Logits, Logits::kPiecesAhead> ahead,
                                    const Statistics& at) {
  constexpr int kAhead = Logits::kPiecesAhead;
  int first = 0;
#pragma unroll 1
  while (tile < min(end, whole)) {
    const bool last_of_tile = first + kAhead == kPieces;
    const int next_tile = last_of_tile ? tile + step : tile;
    const int next_first = last_of_tile ? 0 : first + kAhead;
    Packs<Logits, kAhead> next = ahead;
    if (next_tile < min(end, whole)) {
      next = load_packs<Logits, kAhead>(source, next_tile, lane, next_first);
    }
    stream_pieces(wishes, scale, tile, first, lane, ahead, at);
    ahead = next;
    tile = next_tile;
    first = next_first;
  }
#pragma unroll 1
  for (; tile < end; tile += step) {
    stream_ragged_tile<Logits>(source, wishes, scale, tile, lane, at);
  }
}

// Tokens of a lane that were seen before, by piece: what they weigh relative to their largest.
struct Seen {
  float maxima[kAtOnce], sums[kAtOnce], moments[kAtOnce];
};

// The same of a row in which masks or penalties count, or whose y the lists will change later.
template <class Logits>
__device__ __noinline__ void stream_checked_tile(const Row& row, const Wishes wishes, int tile,
                                                 int lane, const Statistics at) {
#pragma unroll 1
  for (int first = 0; first < kPieces; first += kAtOnce) {
    Pack<Logits> packs[kAtOnce];
    uint32_t clear = 0, seen = 0, in_output = 0;  // of each piece 8 bits
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      packs[i] = load_pack<Logits>(row, tile_first(tile, first + i, lane));
      const PieceBits bits = piece_bits(row, tile_first(tile, first + i, lane));
      clear |= (bits.allowed & ~bits.seen) << (8 * i);
      seen |= (bits.allowed & bits.seen) << (8 * i);
      in_output |= bits.in_output << (8 * i);
    }
    float maxima[kAtOnce], parts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(packs[i].words);
    maxima_of_groups(maxima);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) parts[i] = sum_of_piece(packs[i], maxima[i], kLog2E);
    const float raw_sum = sum_of_groups(parts, lane);
    const float raw_maximum = value_of_lane(maxima, lane);
    renew_all(packs);

    // Tokens that were seen are few: each lane takes its own one after the other.
    Seen of_seen;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      of_seen.maxima[i] = kNegInf;
      of_seen.sums[i] = of_seen.moments[i] = 0.0f;
    }
    const bool any_seen = __any_sync(kAllLanes, seen != 0) != 0;
    for (uint32_t left = seen; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const int token = tile_first(tile, first + bit / 8, lane) + bit % 8;
      const float x = load_logit<Logits>(row, token);
      if (x == kNegInf) continue;
      const float y = settled(x, penalised(row, x, token, (in_output >> bit & 1) != 0));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (bit / 8 != i) continue;
        const float largest = fmaxf(of_seen.maxima[i], y);
        if (wishes.total) {
          const float z = z_of(of_seen.maxima[i], largest, row.scale);
          const float weight = ex2_approx(z), y_z = z_of(y, largest, row.scale);
          if (wishes.mean) {
            of_seen.moments[i] =
                (z < -126.0f ? 0.0f : (of_seen.moments[i] + of_seen.sums[i] * z) * weight) +
                moment_of_one(y, largest, row.scale);
          }
          of_seen.sums[i] = of_seen.sums[i] * weight + ex2_approx(y_z);
        }
        of_seen.maxima[i] = largest;
      }
    }

    float moments[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float y[kPiece];
      Logits::unpack(packs[i].words, y);
      maxima[i] = of_seen.maxima[i];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        if ((clear >> (8 * i + j) & 1) != 0) maxima[i] = fmaxf(maxima[i], y[j]);
      }
    }
    maxima_of_groups(maxima);
    const float maximum = value_of_lane(maxima, lane);
    const int group = group_of_lane(tile, first, lane);
    const bool writes = lane_writes(lane);
    if (writes) {
      at.maxima[group] = raw_sum != raw_sum ? kInf : maximum + 0.0f;
      at.raw_maxima[group] = raw_maximum + 0.0f;
      at.raw_sums[group] = raw_sum;
    }
    if (!wishes.total) continue;
    renew_all(packs);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float y[kPiece];
      Logits::unpack(packs[i].words, y);
      const float base = finite_or_zero(maxima[i]);
      parts[i] = moments[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        const float value = (clear >> (8 * i + j) & 1) != 0 ? y[j] : kNegInf;
        parts[i] += ex2_approx(z_of(value, base, row.scale));
        if (wishes.mean) moments[i] += moment_of_one(value, base, row.scale);
      }
      if (any_seen) {
        const float z = z_of(of_seen.maxima[i], base, row.scale);
        const float weight = ex2_approx(z);
        parts[i] += of_seen.sums[i] * weight;
        moments[i] += z < -126.0f ? 0.0f : (of_seen.moments[i] + of_seen.sums[i] * z) * weight;
      }
    }
    const float sum = sum_of_groups(parts, lane);
    if (writes) at.sums[group] = sum;
    if (wishes.mean) {
      const float moment = sum_of_groups(moments, lane);
      if (writes) at.moments[group] = moment;
    }
  }
}

}  // namespace graphed_sampling
