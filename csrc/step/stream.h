// The first pass: every logit once, of which it keeps maxima and sums of groups.
#pragma once

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

// The sum of a set's weights, from its base on, of the group that is the lane's. NaN where a logit
// of the group is NaN or +inf. kWide: whether exponents may be wide.
template <bool kWide, class Logits>
__device__ inline float set_weights(const Set<Logits>& set, const Exponents& exponents, int lane) {
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
  return sum_of_groups(parts, lane);
}

// The same from the group's own maximum on.
template <bool kWide, class Logits>
__device__ inline float group_sum(const Set<Logits>& set, const Exponents& exponents, float maximum,
                                  int lane) {
  return set_weights<kWide>(set, exponents, lane) * exponents.rebased(maximum).factor;
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

// What a warp keeps of the tiles that it works on, in the block's shared memory.
struct CheckedWarp {
  uint32_t clear[2][2 * kWarp];  // of two tiles in turns: as GroupBits::clear
  int32_t seen[kWarp];           // tokens: 2 * place in the tile + whether it is in the output
  float x[kWarp], y[kWarp];      // theirs
};

// The calling warp's.
__device__ inline CheckedWarp& the_checked_warp();

// Lane i has group i of a tile. The words of the bitmaps for it, as they lie in memory; where there
// is nothing to look at, what changes nothing.
struct GroupWords {
  uint32_t grammar[2], allowed[2], prompt[2], output[2];
};

__device__ inline GroupWords load_group_words(const Row& row, int tile, int lane) {
  GroupWords words;
  const int words_of_row = (row.vocab + 31) / 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int word = (tile * kWarp + lane) * 2 + i;
    const bool inside = word < words_of_row;
    const auto load = [&](int check, const uint8_t* bitmap, uint32_t other) {
      const bool wanted = inside && (row.checks & check) != 0;
      return wanted ? reinterpret_cast<const uint32_t*>(bitmap)[word] : other;
    };
    words.grammar[i] = load(kCheckGrammar, row.grammar, ~0u);
    words.allowed[i] = load(kCheckAllowed, row.allowed, ~0u);
    words.prompt[i] = load(kCheckPenalties, row.prompt, 0);
    words.output[i] = load(kCheckPenalties, row.output, 0);
  }
  return words;
}

// Of a group's tokens a bit each: those that no mask bans and that were not seen before, those that
// were, and which of all were in the output.
struct GroupBits {
  uint32_t clear[2], seen[2], in_output[2];
};

__device__ inline GroupBits group_bits(const GroupWords& words) {
  GroupBits bits;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t allowed = words.grammar[i] & words.allowed[i];
    const uint32_t seen = words.prompt[i] | words.output[i];
    bits.clear[i] = allowed & ~seen;
    bits.seen[i] = allowed & seen;
    bits.in_output[i] = words.output[i];
  }
  return bits;
}

// A tile's tokens that were seen before, in the order of the lanes that have their groups: a list
// of which the lane has `count` from `first` on. Of its first 32 a lane has one each, on its way:
// its logit, and how often it is in the output, or -1.
template <class Logits>
struct SeenTile {
  int first, count, total;
  typename Logits::Bits logit;
  int32_t in_output;
};

// Of a group's tokens that were seen before: the largest logit and y, and what they weigh relative
// to that y.
struct Seen {
  float raw_maximum, maximum, sum, moment;
};

// 32 of a tile's seen tokens from `begin` on, into the warp's list. The lane's next one is number
// `next`; those that are listed leave its bits.
__device__ inline void list_seen(CheckedWarp& memory, GroupBits& bits, int begin, int lane,
                                 int& next) {
  for (; (bits.seen[0] | bits.seen[1]) != 0 && next < begin + kWarp; ++next) {
    const bool second = bits.seen[0] == 0;
    const uint32_t left = second ? bits.seen[1] : bits.seen[0];
    const int bit = 31 - __clz(static_cast<int>(left));
    const uint32_t without = left ^ 1u << bit;
    const uint32_t in_output = (second ? bits.in_output[1] : bits.in_output[0]) >> bit & 1;
    const int place = lane * kGroup + (second ? 32 : 0) + bit;
    memory.seen[next - begin] = 2 * place + static_cast<int32_t>(in_output);
    bits.seen[0] = second ? 0 : without;
    bits.seen[1] = second ? without : bits.seen[1];
  }
  __syncwarp();
}

// Asks for the lane's token of the warp's list, of which there are `number`.
template <class Logits>
__device__ inline void load_seen(const Row& row, const CheckedWarp& memory, int tile, int number,
                                 int lane, SeenTile<Logits>& seen) {
  seen.in_output = -1;
  if (lane >= number) return;
  const int32_t listed = memory.seen[lane];
  const int token = tile * kTile + (listed >> 1);
  seen.logit = load_bits<Logits>(row, token);
  if ((listed & 1) != 0) seen.in_output = row.counts[token];
}

// Lists a tile's seen tokens and asks for the first ones. Leaves what is clear in `clear`.
template <class Logits>
__device__ inline SeenTile<Logits> begin_seen(const Row& row, CheckedWarp& memory, GroupBits& bits,
                                              int tile, int lane, uint32_t (&clear)[2 * kWarp]) {
  SeenTile<Logits> seen = {};
  __syncwarp();  // the tile before the last one is done with
  clear[2 * lane] = bits.clear[0];
  clear[2 * lane + 1] = bits.clear[1];
  if ((row.checks & kCheckPenalties) != 0) {
    seen.count = __popc(bits.seen[0]) + __popc(bits.seen[1]);
    const int up_to = sum_up_to_lane(seen.count, lane);
    seen.total = __shfl_sync(kAllLanes, up_to, kWarp - 1);
    seen.first = up_to - seen.count;
  }
  int next = seen.first;
  list_seen(memory, bits, 0, lane, next);
  load_seen(row, memory, tile, seen.total, lane, seen);
  return seen;
}

// Lets the warp know of y of 32 tokens, from `begin` on, and adds those of the lane's group.
template <class Logits>
__device__ inline void add_seen(const Penalties& penalties, const Wishes& wishes, float scale,
                                CheckedWarp& memory, const SeenTile<Logits>& tokens, int begin,
                                int lane, Seen& seen) {
  if (lane < tokens.total - begin) {
    const float x = sanitised(Logits::value(tokens.logit));
    const float y = settled(x, penalised(penalties, x, tokens.in_output >= 0, tokens.in_output));
    memory.x[lane] = x;
    memory.y[lane] = x == kNegInf ? kNegInf : y;
  }
  __syncwarp();
  const int end = min(tokens.first + tokens.count - begin, kWarp);
#pragma unroll 1
  for (int i = max(tokens.first - begin, 0); i < end; ++i) {
    seen.raw_maximum = fmaxf(seen.raw_maximum, memory.x[i]);
    const float y = memory.y[i];
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

// What a tile's seen tokens weigh, each lane its group's. half: the only half of the tile that
// counts, or -1.
template <class Logits>
__device__ inline Seen end_seen(const Row& row, const Penalties& penalties, const Wishes& wishes,
                                CheckedWarp& memory, SeenTile<Logits>& tokens, int tile, int half,
                                int lane) {
  Seen seen = {kNegInf, kNegInf, 0.0f, 0.0f};
  if (tokens.total == 0) return seen;
  add_seen(penalties, wishes, row.scale, memory, tokens, 0, lane, seen);
  if (tokens.total > kWarp) {
    // The others, 32 at a time. The first ones are listed again: they were not kept.
    GroupBits bits = group_bits(load_group_words(row, tile, lane));
    if (half >= 0 && lane / (kWarp / kSets) != half) bits.seen[0] = bits.seen[1] = 0;
    int next = tokens.first;
    list_seen(memory, bits, 0, lane, next);
#pragma unroll 1
    for (int begin = kWarp; begin < tokens.total; begin += kWarp) {
      list_seen(memory, bits, begin, lane, next);
      load_seen(row, memory, tile, tokens.total - begin, lane, tokens);
      add_seen(penalties, wishes, row.scale, memory, tokens, begin, lane, seen);
    }
  }
  return seen;
}

// A set without the tokens that are not clear, which become -inf. clear: of the tile.
template <class Logits>
__device__ inline void ban(Set<Logits>& set, const uint32_t (&clear)[2 * kWarp], int number,
                           int lane) {
  // Byte i has the bits of piece i.
  const auto* bytes = reinterpret_cast<const uint8_t*>(clear) + number * kAtOnce * kWarp + lane;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) bits |= static_cast<uint32_t>(bytes[i * kWarp]) << (8 * i);
  uint32_t at_sign[kPiece];  // of each byte the sign is token j's bit
#pragma unroll
  for (int j = 0; j < kPiece; ++j) at_sign[j] = bits << (kPiece - 1 - j);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (int k = 0; k < 4 * Logits::kVectors; ++k) {
      // Digits from 8 on take the sign alone of the byte that they name.
      const unsigned one = 0x11u * static_cast<unsigned>(i);
      uint32_t kept;
      if constexpr (Logits::kVectors == 2) {
        kept = __byte_perm(at_sign[k], at_sign[k], 0x8888u + (one << 8 | one));
      } else {
        kept = __byte_perm(at_sign[2 * k], at_sign[2 * k + 1], 0xCC88u + (one << 8 | one));
      }
      uint32_t& word = set.packs[i].words[k];
      word = (word & kept) | (Logits::kNegInfWord & ~kept);
    }
  }
}

// A set of a row in which masks or penalties count, or whose y the lists will change later. seen:
// each lane its group's of the tile; clear: of the tile; kAll: as above.
template <bool kAll, class Logits>
__device__ inline void stream_checked_set(const Wishes wishes, float scale, bool masked, int tile,
                                          int number, int lane, Set<Logits>& set, const Seen& seen,
                                          const uint32_t (&clear)[2 * kWarp],
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
  if (writes) {
    at.raw_maxima[group] = raw_maximum;
    at.raw_sums[group] = raw_sum;
  }
  const auto of_group = [&](float value) { return __shfl_sync(kAllLanes, value, group % kWarp); };
  // Where no mask bans, and no seen token is a group's largest, that one is the largest that is
  // clear.
  float maximum = raw_maximum;
  const float raw_of_seen = of_group(seen.raw_maximum);
  const bool is_seen = raw_of_seen > kNegInf && raw_of_seen == raw_maximum;
  if (wishes.total || masked || __any_sync(kAllLanes, is_seen) != 0) {
    ban(set, clear, number, lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) maxima[i] = Logits::largest(set.packs[i].words);
    maximum = max_of_groups(maxima, lane);
  }
  const float seen_maximum = of_group(seen.maximum);
  maximum = fmaxf(maximum, seen_maximum);
  if (writes) at.maxima[group] = raw_sum != raw_sum ? kInf : maximum;
  if (!wishes.total) return;
  // Groups that hold +inf are worked out anew. Lists may ban it yet, and the others then count.
  const float base = base_of_set(maximum < kInf ? maximum : kNegInf);
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
__device__ __noinline__ void stream_one_set(const Row& row, const Wishes wishes, int set, int lane,
                                            const Statistics at) {
  const int tile = set / kSets, number = set % kSets;
  Set<Logits> loaded = load_any_set<Logits>(row, tile, number, lane);
  if (!wishes.split) {
    stream_set<true>(wishes, row.scale, tile, number, lane, loaded, at);
    return;
  }
  CheckedWarp& memory = the_checked_warp();
  GroupBits bits = group_bits(load_group_words(row, tile, lane));
  if (lane / (kWarp / kSets) != number) bits.seen[0] = bits.seen[1] = 0;
  SeenTile<Logits> tokens = begin_seen<Logits>(row, memory, bits, tile, lane, memory.clear[0]);
  const Seen seen = end_seen(row, penalties_of(row), wishes, memory, tokens, tile, number, lane);
  stream_checked_set<true>(wishes, row.scale, row.masked(), tile, number, lane, loaded, seen,
                           memory.clear[0], at);
}

// As stream_loaded_tiles(), of such a row. What a tile's bits tell is asked for when the bits are
// there, a set ahead of it, and the bits a set ahead of that. kTotal: as wishes.total.
template <bool kTotal, class Logits>
__device__ inline int stream_loaded_checked_tiles(const Row& row, int tile, int step, int end,
                                                  int lane, const Statistics& at) {
  const Wishes wishes = {kTotal, false, true, true, false};
  CheckedWarp& memory = the_checked_warp();
  const Penalties penalties = penalties_of(row);
  const float scale = row.scale;
  const bool masked = row.masked();
  Set<Logits> sets[kSets];
#pragma unroll
  for (int i = 0; i < kSets; ++i) sets[i] = load_set<Logits>(row, tile, i, lane);
  GroupBits bits = group_bits(load_group_words(row, tile, lane));
  int turn = 0;
  SeenTile<Logits> tokens = begin_seen<Logits>(row, memory, bits, tile, lane, memory.clear[turn]);
#pragma unroll 1
  while (tile < end) {
    const int next = tile + step;
    const Seen seen = end_seen(row, penalties, wishes, memory, tokens, tile, -1, lane);
    GroupWords words = {};
    if (next < end) words = load_group_words(row, next, lane);
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      if (i == kSets - 1 && next < end) {
        bits = group_bits(words);
        tokens = begin_seen<Logits>(row, memory, bits, next, lane, memory.clear[turn ^ 1]);
      }
      stream_checked_set<false>(wishes, scale, masked, tile, i, lane, sets[i], seen,
                                memory.clear[turn], at);
      if (next < end) sets[i] = load_set<Logits>(row, next, i, lane);
    }
    turn ^= 1;
    tile = next;
  }
  return tile;
}

// A warp's tiles of such a row, `step` apart. whole: how many of the row's tiles load_set() is for.
template <class Logits>
__device__ __noinline__ void stream_checked_tiles(const Row& row, const Wishes wishes, int tile,
                                                  int step, int end, int whole, int lane,
                                                  const Statistics at) {
  if constexpr (!Logits::kSharded) {
    const int last = wishes.mean || row.scale < kLeastScale ? 0 : min(end, whole);
    if (tile < last) {
      tile = wishes.total
                 ? stream_loaded_checked_tiles<true, Logits>(row, tile, step, last, lane, at)
                 : stream_loaded_checked_tiles<false, Logits>(row, tile, step, last, lane, at);
    }
  }
#pragma unroll 1
  for (; tile < end; tile += step) {
#pragma unroll 1
    for (int i = 0; i < kSets; ++i) {
      stream_one_set<Logits>(row, wishes, tile * kSets + i, lane, at);
    }
  }
}

}  // namespace graphed_sampling
