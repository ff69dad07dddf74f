// The first pass: every logit once, of which it keeps maxima and sums of groups.
#pragma once

#include <type_traits>

#include "block.h"
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
  bool own;    // whether the row's own weights are not the raw ones
  bool both;   // whether the same maxima have sums of both
};

__device__ inline Wishes wishes_of(int flags, bool split, float scale) {
  Wishes wishes = {};
  wishes.total = (flags & kTotal) != 0;
  wishes.mean = (flags & kMean) != 0;
  wishes.raw = (flags & kRaw) != 0;
  wishes.split = split;
  // What filters cut has weights of which equals add up to whole numbers.
  wishes.own = wishes.total && ((flags & kFiltered) != 0 || scale != kLog2E);
  wishes.both = !split && wishes.own && wishes.raw;
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
template <class Logits>
__device__ inline int tiles_to_load(const Source& source) {
  return is_in_whole_pieces<Logits>(source) ? tiles_of(source.vocab) : 0;
}

// A set of a row that is aligned and ends with a whole piece. What lies after it is -inf.
template <class Logits>
__device__ inline Set<Logits> load_set(const Source& source, int tile, int set, int lane) {
  Set<Logits> loaded;
  if ((tile + 1) * kTile <= source.vocab) {
    const auto* first = static_cast<const typename Logits::Bits*>(source.logits) +
                        tile_first(tile, set * kAtOnce, lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded.packs[i] = load_whole_pack<Logits>(first, i * (kWarp * kPiece));
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
  template <bool kWide = true>
  __device__ Rebased rebased(float maximum) const {
    const float of_maximum = maximum == kNegInf ? 0.0f : kWide ? z(maximum) : narrow_z(maximum);
    return {ex2_approx(fminf(-of_maximum, 126.0f)), of_maximum};
  }
};

// The sum of 2**exponent_of(logit) over a set's tokens of the group that is the lane's.
template <class Logits, class ExponentOf>
__device__ inline float sum_of_powers(const Set<Logits>& set, int lane, ExponentOf exponent_of) {
  float parts[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float x[kPiece];
    Logits::unpack(set.packs[i].words, x);
    float sums[2];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float weight = ex2_approx(exponent_of(x[j]));
      sums[j % 2] = j < 2 ? weight : sums[j % 2] + weight;
    }
    parts[i] = sums[0] + sums[1];
  }
  return sum_of_groups(parts, lane);
}

// The sum of a set's weights, from its base on, of the group that is the lane's. NaN where a logit
// of the group is NaN or +inf. kWide: whether exponents may be wide.
template <bool kWide, class Logits>
__device__ inline float set_weights(const Set<Logits>& set, const Exponents& exponents, int lane) {
  return sum_of_powers(set, lane,
                       [&](float x) { return kWide ? exponents.z(x) : exponents.narrow_z(x); });
}

// The same from the group's own maximum on.
template <bool kWide, class Logits>
__device__ inline float group_sum(const Set<Logits>& set, const Exponents& exponents, float maximum,
                                  int lane) {
  return set_weights<kWide>(set, exponents, lane) *
         exponents.template rebased<kWide>(maximum).factor;
}

// The sum of weight * z, likewise.
template <class Logits>
__device__ inline float set_moments(const Set<Logits>& set, const Exponents& exponents, int lane) {
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
  return sum_of_groups(parts, lane);
}

template <class Logits>
__device__ inline float group_moment(const Set<Logits>& set, const Exponents& exponents,
                                     float maximum, float sum, int lane) {
  const Rebased rebased = exponents.rebased(maximum);
  return set_moments(set, exponents, lane) * rebased.factor - rebased.z * sum;
}

// From each lane's largest token.
__device__ inline float largest_of_set(float largest) {
  return from_key(__reduce_max_sync(kAllLanes, key_of(largest + 0.0f)));
}

__device__ inline float largest_in(const float (&values)[kAtOnce]) {
  return fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3]));
}

__device__ inline float max_of_groups(const float (&values)[kAtOnce], int lane) {
  return over_groups(values, lane, [](float a, float b) { return fmaxf(a, b); }) + 0.0f;
}

// Raw weights, at temperature 1, of which none is cut, take one instruction for an exponent. Those
// of a set start from its largest token, but from no lower logit than kLeastStart: so the sums of a
// row whose largest is below kFarLogit are not to be used, and its groups are repaired; and so are
// those of a set that has a larger one than kMostStart.
constexpr float kLeastStart = -1e6f, kFarLogit = -5e5f, kMostStart = 5e8f;

// The sum of a set's raw weights, of the group that is the lane's, from that group's maximum on.
// NaN where a logit of the group is NaN or +inf, or the set's largest is NaN or above kMostStart.
template <class Logits>
__device__ inline float raw_group_sum(const Set<Logits>& set, float largest_of_set, float maximum,
                                      int lane) {
  const float start = fmaxf(largest_of_set, kLeastStart) * -kLog2E;
  const auto exponent_of = [&](float x) { return __fmaf_rn(x, kLog2E, start); };
  const float factor = ex2_approx(fminf(-exponent_of(maximum), 126.0f));
  const float sum = sum_of_powers(set, lane, exponent_of) * factor;
  // The largest is NaN where a lane has nothing else.
  return largest_of_set <= kMostStart ? sum : nan_f32();
}

// The largest of the maxima that a lane has seen, and its group: the first one.
struct Best {
  float maximum = kNegInf;
  int group = 0;

  __device__ void see(float of_group, int group_) {
    if (of_group > maximum) {
      maximum = of_group;
      group = group_;
    }
  }
};

// A set, of a row in which y is the logit. kAll: whether exponents may be wide, and means wanted.
template <bool kAll, class Logits>
__device__ inline void stream_set(const Wishes wishes, float scale, int tile, int number, int lane,
                                  Set<Logits>& set, const Statistics& at, Best& best) {
  float maxima[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(set.packs[i].words);
  const float largest = largest_of_set(largest_in(maxima));
  const float maximum = max_of_groups(maxima, lane);
  const int group = group_of_lane(tile, number * kAtOnce, lane);
  const bool writes = lane_writes(lane);
  renew_all(set);
  const Exponents exponents = {finite_or_zero(largest), wishes.own ? scale : kLog2E};
  const float sum = wishes.own ? group_sum<kAll>(set, exponents, maximum, lane)
                               : raw_group_sum(set, largest, maximum, lane);
  bool repairs = sum != sum;
  if (writes) at.sums[group] = sum;
  if (wishes.both) {
    renew_all(set);
    const float raw_sum = raw_group_sum(set, largest, maximum, lane);
    repairs = repairs || raw_sum != raw_sum;
    if (writes) at.raw_sums[group] = raw_sum;
  }
  const float left = repairs ? kInf : maximum;
  if (writes) at.maxima[group] = left;
  best.see(left, group);
  if (kAll && wishes.mean) {
    renew_all(set);
    const float moment = group_moment(set, exponents, maximum, sum, lane);
    if (writes) at.moments[group] = moment;
  }
}

// A set's maxima alone, of such a row in which nobody asks what tokens weigh.
template <class Logits>
__device__ inline void stream_maxima(int tile, int number, int lane, const Set<Logits>& set,
                                     const Statistics& at, Best& best) {
  float maxima[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const float largest = Logits::template largest<true>(set.packs[i].words);
    maxima[i] = largest != largest ? kInf : largest;
  }
  const float maximum = max_of_groups(maxima, lane);
  const int group = group_of_lane(tile, number * kAtOnce, lane);
  if (lane_writes(lane)) at.maxima[group] = maximum;
  best.see(maximum, group);
}

// Any tiles of a warp, `step` apart.
template <class Logits>
__device__ __noinline__ Best stream_any_tiles(const Source source, const Wishes wishes, float scale,
                                              int tile, int step, int end, int lane,
                                              const Statistics at, Best best) {
#pragma unroll 1
  for (; tile < end; tile += step) {
#pragma unroll 1
    for (int number = 0; number < kSets; ++number) {
      Set<Logits> set = load_any_set<Logits>(source, tile, number, lane);
      stream_set<true>(wishes, scale, tile, number, lane, set, at, best);
    }
  }
  return best;
}

// A warp's tiles up to `end`, `step` apart, which load_set() is for and whose first one is in
// `sets`. The place of a set that is done is where the next tile's is loaded to. Returns the tile
// after. Each kind of weights has its own loop: one for all keeps more in registers than there are.
enum class Weights { kNone, kRawOnly, kOwn };
template <Weights kWeights, class Logits>
__device__ inline int stream_loaded_tiles(const Source& source, const Wishes& wishes, float scale,
                                          int tile, int step, int end, int lane,
                                          Set<Logits> (&sets)[kSets], const Statistics& at,
                                          Best& best) {
  constexpr bool kOwn = kWeights == Weights::kOwn;
  const Wishes known = {wishes.total, false, wishes.raw, false, kOwn, kOwn && wishes.both};
#pragma unroll 1
  while (tile < end) {
    const int next = tile + step;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      if constexpr (kWeights == Weights::kNone) {
        stream_maxima(tile, i, lane, sets[i], at, best);
      } else {
        stream_set<false>(known, scale, tile, i, lane, sets[i], at, best);
      }
      if (next < end) sets[i] = load_set<Logits>(source, next, i, lane);
    }
    tile = next;
  }
  return tile;
}

// A warp's tiles, `step` apart, of a row in which y is the logit. whole: how many of the row's
// tiles load_set() is for; sets: the first tile's, if it is one of those.
template <class Logits>
__device__ inline Best stream_tiles(const Source& source, const Wishes wishes, float scale,
                                    int tile, int step, int end, int whole, int lane,
                                    Set<Logits> (&sets)[kSets], const Statistics& at) {
  const int last = wishes.mean || scale < kLeastScale ? 0 : min(end, whole);
  Best best;
  const auto stream_loaded = [&](auto weights) {
    return stream_loaded_tiles<decltype(weights)::value>(source, wishes, scale, tile, step, last,
                                                         lane, sets, at, best);
  };
  if (wishes.own) {
    tile = stream_loaded(std::integral_constant<Weights, Weights::kOwn>());
  } else if (wishes.total || wishes.raw) {
    tile = stream_loaded(std::integral_constant<Weights, Weights::kRawOnly>());
  } else {
    tile = stream_loaded(std::integral_constant<Weights, Weights::kNone>());
  }
  if (tile < end) {
    best = stream_any_tiles<Logits>(source, wishes, scale, tile, step, end, lane, at, best);
  }
  return best;
}

// Of a tile a bit a token, lane i's two words those of group i.
using TileBits = uint32_t[2 * kWarp];

// What a warp keeps of the tiles that it works on, in the block's shared memory.
struct CheckedWarp {
  TileBits clear[2];  // that no mask bans and that were not seen before; by turns
  // Of the tile that is next, its tokens that masks allow and that were seen before, numbered in
  // the order of the lanes that have their groups: each lane's first number, and how many they are.
  int32_t first[kWarp + 1];
  int32_t seen[kWarp];   // 32 of them: their places in the tile
  float2 values[kWarp];  // their logits, sanitised, and y
  TileBits in_output;
  Penalties penalties;
};

// The calling warp's.
__device__ inline CheckedWarp& the_checked_warp();

// The words of the bitmaps for a group, as they lie in memory; where there is nothing to look at,
// what changes nothing. masks: the one that there is.
struct GroupWords {
  uint32_t masks[2], prompt[2], output[2];
};

__device__ inline int words_of(const Row& row) { return (row.vocab + 31) / 32; }

__device__ inline GroupWords load_group_words(const Row& row, int group) {
  GroupWords words = {{~0u, ~0u}, {0, 0}, {0, 0}};
  // Of groups past the row's end the last word, which is not used.
  const int last = words_of(row) - 1;
  const int places[2] = {min(2 * group, last), min(2 * group + 1, last)};
  const auto word = [&](const uint8_t* bitmap, int i) {
    return reinterpret_cast<const uint32_t*>(bitmap)[places[i]];
  };
  const int checks = row.checks;
  if (row.masked()) {
    const uint8_t* mask = (checks & kCheckGrammar) != 0 ? row.grammar : row.allowed;
#pragma unroll
    for (int i = 0; i < 2; ++i) words.masks[i] = word(mask, i);
    if ((checks & kCheckGrammar) != 0 && (checks & kCheckAllowed) != 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) words.masks[i] &= word(row.allowed, i);
    }
  }
  if ((checks & kCheckPenalties) != 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words.prompt[i] = word(row.prompt, i);
      words.output[i] = word(row.output, i);
    }
  }
  return words;
}

// A group's tokens that masks allow and that were seen before, a bit each.
struct SeenBits {
  uint32_t left[2];

  __device__ SeenBits(const Row& row, const GroupWords& words, int group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      left[i] = words.masks[i] & (words.prompt[i] | words.output[i]);
      if (2 * group + i >= words_of(row)) left[i] = 0;
    }
  }
};

// 32 of a tile's seen tokens from number `begin` on, into the warp's list. The lane's next one is
// number `next`; those that are listed leave its bits.
__device__ inline void list_seen(CheckedWarp& memory, SeenBits& bits, int begin, int lane,
                                 int& next) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll 1
    for (; bits.left[i] != 0 && next < begin + kWarp; ++next) {
      const int bit = 31 - __clz(static_cast<int>(bits.left[i]));
      bits.left[i] ^= 1u << bit;
      memory.seen[next - begin] = lane * kGroup + 32 * i + bit;
    }
  }
  __syncwarp();
}

// A lane's token of the list, on its way: its logit, and how often it is in the output, or -1.
template <class Logits>
struct SeenToken {
  typename Logits::Bits logit;
  int32_t in_output;
};

// number: of tokens in the list.
template <class Logits>
__device__ inline SeenToken<Logits> load_seen(const Row& row, const CheckedWarp& memory, int tile,
                                              int number, int lane) {
  SeenToken<Logits> token = {0, -1};
  if (lane < number) {
    const int place = memory.seen[lane], id = tile * kTile + place;
    token.logit = load_bits<Logits>(row, id);
    if ((memory.in_output[place / 32] >> place % 32 & 1) != 0) token.in_output = row.counts[id];
  }
  return token;
}

// For the tiles that begin_tile() begins with.
__device__ inline void keep_penalties(const Row& row, CheckedWarp& memory, int lane) {
  __syncwarp();  // All lanes are done with what is overwritten.
  if (lane == 0) memory.penalties = penalties_of(row);
}

// Begins with a tile whose words are there: leaves what is clear in `clear`, numbers the seen
// tokens and asks for the first ones. half: the only one whose seen tokens count, or -1.
template <class Logits>
__device__ inline SeenToken<Logits> begin_tile(const Row& row, CheckedWarp& memory,
                                               const GroupWords& words, int tile, int half,
                                               int lane, TileBits& clear) {
  __syncwarp();  // All lanes are done with what is overwritten.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    clear[2 * lane + i] = words.masks[i] & ~(words.prompt[i] | words.output[i]);
  }
  if ((row.checks & kCheckPenalties) == 0) {
    if (lane == 0) memory.first[kWarp] = 0;
    __syncwarp();
    return {0, -1};
  }
  SeenBits bits(row, words, tile * kGroupsOfTile + lane);
  if (half >= 0 && lane / (kWarp / kSets) != half) bits.left[0] = bits.left[1] = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) memory.in_output[2 * lane + i] = words.output[i];
  const int count = __popc(bits.left[0]) + __popc(bits.left[1]);
  const int up_to = sum_up_to_lane(count, lane);
  if (lane == 0) memory.first[0] = 0;
  memory.first[lane + 1] = up_to;
  int next = up_to - count;
  list_seen(memory, bits, 0, lane, next);
  return load_seen<Logits>(row, memory, tile, memory.first[kWarp], lane);
}

// Of a group's tokens that were seen before: the largest logit and y, and what they weigh relative
// to that y.
struct Seen {
  float raw_maximum, maximum, sum, moment;
};

// Lets the warp know of y of 32 tokens, from number `begin` on, and adds those of the lane's group.
template <class Logits>
__device__ inline void add_seen(const Wishes& wishes, float scale, CheckedWarp& memory,
                                const SeenToken<Logits>& token, int begin, int lane, Seen& seen) {
  if (lane < memory.first[kWarp] - begin) {
    const float x = sanitised(Logits::value(token.logit));
    const float y =
        settled(x, penalised(memory.penalties, x, token.in_output >= 0, token.in_output));
    memory.values[lane] = {x, x == kNegInf ? kNegInf : y};
  }
  __syncwarp();
  const int end = min(memory.first[lane + 1] - begin, kWarp);
#pragma unroll 1
  for (int i = max(memory.first[lane] - begin, 0); i < end; ++i) {
    const float2 value = memory.values[i];
    seen.raw_maximum = fmaxf(seen.raw_maximum, value.x);
    const float y = value.y;
    const float largest = fmaxf(seen.maximum, y);
    if (wishes.total && y > kNegInf) {
      const float z = z_of(seen.maximum, largest, scale);
      const float weight = ex2_approx(z);
      if (wishes.mean) {
        seen.moment = (z < -126.0f ? 0.0f : (seen.moment + seen.sum * z) * weight) +
                      moment_of_one(y, largest, scale);
      }
      seen.sum = seen.sum * weight + ex2_approx(z_of(y, largest, scale));
    }
    seen.maximum = largest;
  }
}

// What a tile's seen tokens weigh, each lane its group's. token: as begin_tile() has it.
template <class Logits>
__device__ inline Seen weigh_seen(const Row& row, const Wishes& wishes, float scale,
                                  CheckedWarp& memory, const SeenToken<Logits>& token, int tile,
                                  int lane) {
  Seen seen = {kNegInf, kNegInf, 0.0f, 0.0f};
  const int total = memory.first[kWarp];
  if (total == 0) return seen;
  add_seen(wishes, scale, memory, token, 0, lane, seen);
  if (total > kWarp) {
    // The others, 32 at a time. Which were listed was not kept, so the first ones are once more.
    const int group = tile * kGroupsOfTile + lane;
    SeenBits bits(row, load_group_words(row, group), group);
    int next = memory.first[lane];
    if (memory.first[lane + 1] == next) bits.left[0] = bits.left[1] = 0;
    list_seen(memory, bits, 0, lane, next);
#pragma unroll 1
    for (int begin = kWarp; begin < total; begin += kWarp) {
      list_seen(memory, bits, begin, lane, next);
      const auto other = load_seen<Logits>(row, memory, tile, total - begin, lane);
      add_seen(wishes, scale, memory, other, begin, lane, seen);
    }
  }
  return seen;
}

// A lane's tokens of a set a bit each: byte i has piece i.
__device__ inline uint32_t bits_of_set(const TileBits& of_tile, int number, int lane) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(of_tile) + number * kAtOnce * kWarp + lane;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) bits |= static_cast<uint32_t>(bytes[i * kWarp]) << (8 * i);
  return bits;
}

// Makes -inf of the tokens that are not kept.
template <class Logits>
__device__ inline void ban(Set<Logits>& set, uint32_t kept) {
  uint32_t at_sign[kPiece];  // the sign of byte i is token j of piece i
#pragma unroll
  for (int j = 0; j < kPiece; ++j) at_sign[j] = kept << (kPiece - 1 - j);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (int k = 0; k < 4 * Logits::kVectors; ++k) {
      // Digits from 8 on take of a byte the sign alone, those from 12 on of one of the second word.
      const unsigned piece = 0x1111u * static_cast<unsigned>(i);
      const uint32_t mask = Logits::kVectors == 2
                                ? spread_signs(at_sign[k], 0, 0x8888u + piece)
                                : spread_signs(at_sign[2 * k % kPiece],
                                               at_sign[(2 * k + 1) % kPiece], 0xCC88u + piece);
      uint32_t& word = set.packs[i].words[k];
      word = (word & mask) | (Logits::kNegInfWord & ~mask);
    }
  }
}

// A set's raw statistics, of the group that is the lane's.
struct RawGroup {
  float maximum, sum;
};

// Of a row in which masks or penalties count, or whose y the lists will change later.
template <class Logits>
__device__ inline RawGroup stream_raw(int tile, int number, int lane, Set<Logits>& set,
                                      const Statistics& at) {
  const int group = group_of_lane(tile, number * kAtOnce, lane);
  float maxima[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(set.packs[i].words);
  const float maximum = max_of_groups(maxima, lane);
  renew_all(set);
  const float sum = raw_group_sum(set, largest_of_set(largest_in(maxima)), maximum, lane);
  renew_all(set);
  if (lane_writes(lane)) {
    at.raw_maxima[group] = maximum;
    at.raw_sums[group] = sum;
  }
  return {maximum, sum};
}

// Then those of its y. seen: each lane its group's of the tile; clear: of the tile; masked: whether
// masks ban; kAll: as above.
template <bool kAll, class Logits>
__device__ inline void stream_y(const Wishes wishes, float scale, bool masked, int tile, int number,
                                int lane, const RawGroup& raw, Set<Logits>& set, const Seen& seen,
                                const TileBits& clear, const Statistics& at, Best& best) {
  const int group = group_of_lane(tile, number * kAtOnce, lane);
  const bool writes = lane_writes(lane);
  const auto of_group = [&](float value) { return __shfl_sync(kAllLanes, value, group % kWarp); };
  const float raw_of_seen = of_group(seen.raw_maximum), seen_maximum = of_group(seen.maximum);
  // Of what is clear. Where no mask bans, and no seen token is its group's largest, it is that one.
  float maximum = raw.maximum;
  const bool is_seen = raw_of_seen > kNegInf && raw_of_seen == raw.maximum;
  if (wishes.total || masked || __any_sync(kAllLanes, is_seen) != 0) {
    const uint32_t bits = bits_of_set(clear, number, lane);
    if (__any_sync(kAllLanes, ~bits != 0) != 0) {
      ban(set, bits);
      float maxima[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(set.packs[i].words);
      maximum = max_of_groups(maxima, lane);
    }
  }
  maximum = fmaxf(maximum, seen_maximum);
  const float left = raw.sum != raw.sum ? kInf : maximum;
  if (writes) at.maxima[group] = left;
  best.see(left, group);
  if (!wishes.total) return;
  // Groups that hold +inf are worked out anew. Lists may ban it yet, and the others then count.
  const float base = finite_or_zero(largest_of_set(maximum < kInf ? maximum : kNegInf));
  renew_all(set);
  const Exponents exponents = {base, scale};
  const Rebased rebased = exponents.rebased(maximum);
  const float z_of_seen = exponents.z(seen_maximum);
  const float of_seen = ex2_approx(z_of_seen), seen_sum = of_group(seen.sum);
  const float sum = set_weights<kAll>(set, exponents, lane) + seen_sum * of_seen;
  if (writes) at.sums[group] = sum * rebased.factor;
  if (kAll && wishes.mean) {
    renew_all(set);
    const float seen_moment = of_group(seen.moment);
    const float moment =
        set_moments(set, exponents, lane) +
        (z_of_seen < -126.0f ? 0.0f : (seen_moment + seen_sum * z_of_seen) * of_seen);
    if (writes) at.moments[group] = (moment - rebased.z * sum) * rebased.factor;
  }
}

// One set by itself, of any row: what its tile's would be.
template <class Logits>
__device__ __noinline__ Best stream_one_set(const Row& row, const Wishes wishes, int set, int lane,
                                            const Statistics at, Best best) {
  const int tile = set / kSets, number = set % kSets;
  Set<Logits> loaded = load_any_set<Logits>(row, tile, number, lane);
  if (!wishes.split) {
    stream_set<true>(wishes, row.scale, tile, number, lane, loaded, at, best);
    return best;
  }
  CheckedWarp& memory = the_checked_warp();
  keep_penalties(row, memory, lane);
  const GroupWords words = load_group_words(row, tile * kGroupsOfTile + lane);
  const auto token = begin_tile<Logits>(row, memory, words, tile, number, lane, memory.clear[0]);
  const RawGroup raw = stream_raw(tile, number, lane, loaded, at);
  const Seen seen = weigh_seen<Logits>(row, wishes, row.scale, memory, token, tile, lane);
  stream_y<true>(wishes, row.scale, row.masked(), tile, number, lane, raw, loaded, seen,
                 memory.clear[0], at, best);
  return best;
}

// As stream_loaded_tiles(), of such a row. The words of a tile's bitmaps are asked for more than a
// set ahead, and so are the seen tokens of which they tell. kTotal: as wishes.total.
template <bool kTotal, class Logits>
__device__ inline int stream_loaded_checked_tiles(const Row& row, int tile, int step, int end,
                                                  int lane, const Statistics& at, Best& best) {
  const Wishes wishes = {kTotal, false, true, true, kTotal, false};
  CheckedWarp& memory = the_checked_warp();
  GroupWords words = load_group_words(row, tile * kGroupsOfTile + lane);
  Set<Logits> sets[kSets];
#pragma unroll
  for (int i = 0; i < kSets; ++i) sets[i] = load_set<Logits>(row, tile, i, lane);
  keep_penalties(row, memory, lane);
  const float scale = row.scale;
  const bool masked = row.masked();
  int turn = 0;
  auto token = begin_tile<Logits>(row, memory, words, tile, -1, lane, memory.clear[turn]);
#pragma unroll 1
  while (tile < end) {
    const int next = tile + step;
    Seen seen;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const RawGroup raw = stream_raw(tile, i, lane, sets[i], at);
      if (i == 0) {
        if (next < end) words = load_group_words(row, next * kGroupsOfTile + lane);
        seen = weigh_seen<Logits>(row, wishes, scale, memory, token, tile, lane);
      } else if (next < end) {
        token = begin_tile<Logits>(row, memory, words, next, -1, lane, memory.clear[turn ^ 1]);
      }
      stream_y<false>(wishes, scale, masked, tile, i, lane, raw, sets[i], seen, memory.clear[turn],
                      at, best);
      if (next < end) sets[i] = load_set<Logits>(row, next, i, lane);
    }
    turn ^= 1;
    tile = next;
  }
  return tile;
}

// A warp's tiles of such a row, `step` apart. whole: how many of the row's tiles load_set() is for.
template <class Logits>
__device__ __noinline__ Best stream_checked_tiles(const Row& row, const Wishes wishes, int tile,
                                                  int step, int end, int whole, int lane,
                                                  const Statistics at) {
  Best best;
  if constexpr (!Logits::kSharded) {
    const int last = wishes.mean || row.scale < kLeastScale ? 0 : min(end, whole);
    if (tile < last) {
      tile =
          wishes.total
              ? stream_loaded_checked_tiles<true, Logits>(row, tile, step, last, lane, at, best)
              : stream_loaded_checked_tiles<false, Logits>(row, tile, step, last, lane, at, best);
    }
  }
#pragma unroll 1
  for (; tile < end; tile += step) {
#pragma unroll 1
    for (int i = 0; i < kSets; ++i) {
      best = stream_one_set<Logits>(row, wishes, tile * kSets + i, lane, at, best);
    }
  }
  return best;
}

}  // namespace graphed_sampling
