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
  bool split;  // whether y and logits may differ, and have statistics each
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

// A tile is what a warp reads at a time: two sets, of which a lane has 4 pieces each. A set's
// windows are 4 lanes' each, of which those 2 apart share a group.
constexpr int kGroupsOfTile = 32;
constexpr int kTile = kGroup * kGroupsOfTile;
constexpr int kAtOnce = 4;  // pieces of a lane
constexpr int kSets = kPieces / kAtOnce;
constexpr int kGroupsOfSet = kGroupsOfTile / kSets;
constexpr int kLanesOfWindow = kWindow / (kPiece * kAtOnce);
constexpr int kApart = kLanesOfWindow * kPiece;  // the lane's pieces, in tokens
static_assert(kLanesOfWindow == 2 * kGroupsOfWindow);

// Of a row, whose last tile may have less tokens.
GS_HOST_DEVICE constexpr int tiles_of(int vocab) { return (vocab + kTile - 1) / kTile; }
GS_HOST_DEVICE constexpr int groups_of(int vocab) { return tiles_of(vocab) * kGroupsOfTile; }

// The first token of a lane's piece.
__device__ inline int set_first(int tile, int set, int piece, int lane) {
  return (tile * kSets + set) * (kTile / kSets) + lane / kLanesOfWindow * kWindow + piece * kApart +
         lane % kLanesOfWindow * kPiece;
}

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
    const auto* first =
        static_cast<const typename Logits::Bits*>(source.logits) + set_first(tile, set, 0, lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded.packs[i] = load_whole_pack<Logits, true>(first, i * kApart);
    }
    return loaded;
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int first = set_first(tile, set, i, lane);
#pragma unroll
    for (int j = 0; j < 4 * Logits::kVectors; ++j) loaded.packs[i].words[j] = Logits::kNegInfWord;
    if (first < source.vocab) loaded.packs[i] = load_whole_pack<Logits, true>(source.logits, first);
  }
  return loaded;
}

template <class Logits>
__device__ inline void load_tile(const Source& source, int tile, int lane,
                                 Set<Logits> (&sets)[kSets]) {
#pragma unroll
  for (int i = 0; i < kSets; ++i) sets[i] = load_set<Logits>(source, tile, i, lane);
}

// A set of any row.
template <class Logits>
__device__ inline Set<Logits> load_any_set(const Source& source, int tile, int set, int lane) {
  Set<Logits> loaded;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    loaded.packs[i] = load_pack<Logits>(source, set_first(tile, set, i, lane));
  }
  return loaded;
}

// Of the two lanes that share a group.
__device__ inline float sum_of_group(float of_lane) {
  return of_lane + __shfl_xor_sync(kAllLanes, of_lane, kGroupsOfWindow);
}

// The lane's group of a set. One of the two lanes writes of it.
__device__ inline int group_of_lane(int tile, int set, int lane) {
  return (tile * kSets + set) * kGroupsOfSet + lane / kLanesOfWindow * kGroupsOfWindow +
         lane % kGroupsOfWindow;
}
__device__ inline bool lane_writes(int lane) { return lane % kLanesOfWindow < kGroupsOfWindow; }

__device__ inline float moment_of_one(float y, float base, float scale) {
  const float z = z_of(y, base, scale);
  return z < -126.0f ? 0.0f : ex2_approx(z) * z;
}

// Below it differences that fp32 does not hold have exponents that count.
constexpr float kLeastScale = 1e-30f;

// Exponents of weights at one temperature, from a base. Its equals weigh 1, so that rows of equals
// add up to whole numbers.
struct Exponents {
  float base, scale;

  __device__ bool wide() const { return scale < kLeastScale; }
  __device__ float narrow_z(float x) const { return (x - base) * scale; }
  __device__ float z(float x) const { return wide() ? z_of(x, base, scale) : narrow_z(x); }
};

// The sum of 2**exponent_of(logit) over the lane's group of a set.
template <class Logits, class ExponentOf>
__device__ inline float sum_of_powers(const Set<Logits>& set, ExponentOf exponent_of) {
  constexpr int kSums = 4;
  float sums[kSums] = {};
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float x[kPiece];
    Logits::unpack(set.packs[i].words, x);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float weight = ex2_approx(exponent_of(x[j]));
      sums[j % kSums] = i == 0 && j < kSums ? weight : sums[j % kSums] + weight;
    }
  }
  return sum_of_group((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The sum of a group's weights. NaN where one of its logits is NaN or +inf. kWide: whether
// exponents may be wide.
template <bool kWide, class Logits>
__device__ inline float group_sum(const Set<Logits>& set, const Exponents& exponents) {
  return sum_of_powers(set,
                       [&](float x) { return kWide ? exponents.z(x) : exponents.narrow_z(x); });
}

// The sum of weight * z.
template <bool kWide, class Logits>
__device__ inline float group_moment(const Set<Logits>& set, const Exponents& exponents) {
  float moment = 0.0f;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float x[kPiece];
    Logits::unpack(set.packs[i].words, x);
    float of_piece = 0.0f;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float z = kWide ? exponents.z(x[j]) : exponents.narrow_z(x[j]);
      of_piece += z < -126.0f ? 0.0f : ex2_approx(z) * z;
    }
    moment += of_piece;
  }
  return sum_of_group(moment);
}

// The largest logit of the lane's group of a set. NaN counts with kNan, else only where there is
// nothing else.
template <bool kNan, class Logits>
__device__ inline float group_maximum(const Set<Logits>& set) {
  constexpr int kWords = 4 * Logits::kVectors;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = set.packs[0].words[i];
#pragma unroll
    for (int j = 1; j < kAtOnce; ++j) {
      words[i] = Logits::template larger<kNan>(words[i], set.packs[j].words[i]);
    }
  }
#pragma unroll
  for (int half = kWords / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      words[i] = Logits::template larger<kNan>(words[i], words[i + half]);
    }
  }
  const float largest = Logits::template largest<kNan>(words[0]);
  const float of_other = __shfl_xor_sync(kAllLanes, largest, kGroupsOfWindow);
  return max_f32<kNan>(largest, of_other) + 0.0f;
}

// Raw weights, at temperature 1, of which none is cut, take one instruction for an exponent. Those
// of a group start from its largest token, but from no lower logit than kLeastStart: so the sums of
// a row whose largest is below kFarLogit are not to be used, and its groups are repaired; and so
// are groups with a larger one than kMostStart.
constexpr float kLeastStart = -1e6f, kFarLogit = -5e5f, kMostStart = 5e8f;

// The sum of a group's raw weights, from its maximum on. NaN where one of its logits is NaN or
// +inf, or that one is NaN or above kMostStart.
template <class Logits>
__device__ inline float raw_group_sum(const Set<Logits>& set, float maximum) {
  const float start = fmaxf(maximum, kLeastStart) * -kLog2E;
  const auto exponent_of = [&](float x) { return __fmaf_rn(x, kLog2E, start); };
  // The maximum's own exponent is what rounding has left.
  const float factor = ex2_approx(fminf(-exponent_of(maximum), 126.0f));
  const float sum = sum_of_powers(set, exponent_of) * factor;
  return maximum <= kMostStart ? sum : nan_f32();
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

// A set, of a row in which y is the logit. kWide: whether exponents may be wide; kMoments: whether
// means may be wanted.
template <bool kWide, bool kMoments, class Logits>
__device__ inline void stream_set(const Wishes wishes, float scale, int tile, int number, int lane,
                                  Set<Logits>& set, const Statistics& at, Best& best) {
  const float maximum = group_maximum<false>(set);
  const int group = group_of_lane(tile, number, lane);
  const bool writes = lane_writes(lane);
  renew_all(set);
  const Exponents exponents = {finite_or_zero(maximum), wishes.own ? scale : kLog2E};
  const float sum = wishes.own ? group_sum<kWide>(set, exponents) : raw_group_sum(set, maximum);
  bool repairs = sum != sum;
  if (writes) at.sums[group] = sum;
  if (wishes.both) {
    renew_all(set);
    const float raw_sum = raw_group_sum(set, maximum);
    repairs = repairs || raw_sum != raw_sum;
    if (writes) at.raw_sums[group] = raw_sum;
  }
  const float left = repairs ? kInf : maximum;
  if (writes) at.maxima[group] = left;
  best.see(left, group);
  if (kMoments && wishes.mean) {
    renew_all(set);
    const float moment = group_moment<kWide>(set, exponents);
    if (writes) at.moments[group] = moment;
  }
}

// A set's maxima alone, of such a row in which nobody asks what tokens weigh.
template <class Logits>
__device__ inline void stream_maxima(int tile, int number, int lane, const Set<Logits>& set,
                                     const Statistics& at, Best& best) {
  const float largest = group_maximum<true>(set);
  const float maximum = largest != largest ? kInf : largest;
  const int group = group_of_lane(tile, number, lane);
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
      stream_set<true, true>(wishes, scale, tile, number, lane, set, at, best);
    }
  }
  return best;
}

// A warp's tiles up to `end`, `step` apart, which load_set() is for and whose first one is in
// `sets`. The place of a set that is done is where the next tile's is loaded to. ahead: whether the
// one after that is brought closer, where registers hold few bytes. Returns the tile after. Each
// kind of weights has its own loop: one for all keeps more in registers than there are.
enum class Weights { kNone, kRawOnly, kOwn };
template <Weights kWeights, bool kMoments, class Logits>
__device__ inline int stream_loaded_tiles(const Source& source, const Wishes& wishes, float scale,
                                          int tile, int step, int end, int lane,
                                          Set<Logits> (&sets)[kSets], const Statistics& at,
                                          Best& best, bool ahead) {
  constexpr bool kOwn = kWeights == Weights::kOwn;
  const Wishes known = {wishes.total, kMoments, wishes.raw, false, kOwn, kOwn && wishes.both};
#pragma unroll 1
  while (tile < end) {
    const int next = tile + step;
    if constexpr (Logits::kVectors == 1) {
      if (ahead && lane == 0 && next + step < end - 1) {  // the last tile may have less
        constexpr int kBytes = kTile * static_cast<int>(sizeof(typename Logits::Bits));
        prefetch_bytes(static_cast<const char*>(source.logits) + (next + step) * kBytes, kBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      if constexpr (kWeights == Weights::kNone) {
        stream_maxima(tile, i, lane, sets[i], at, best);
      } else {
        stream_set<false, kMoments>(known, scale, tile, i, lane, sets[i], at, best);
      }
      if (next < end) sets[i] = load_set<Logits>(source, next, i, lane);
    }
    tile = next;
  }
  return tile;
}

// A warp's tiles, `step` apart, of a row in which y is the logit. whole: how many of the row's
// tiles load_set() is for; sets: the first tile's, if it is one of those. kMoments: whether tiles
// are loaded ahead also where means are wanted, which are rare in a step: there loops for them
// would cost all rows 1 %.
template <bool kMoments, class Logits>
__device__ inline Best stream_tiles(const Source& source, const Wishes wishes, float scale,
                                    int tile, int step, int end, int whole, int lane,
                                    Set<Logits> (&sets)[kSets], const Statistics& at,
                                    bool ahead = false) {
  const bool one_by_one = (wishes.mean && !kMoments) || scale < kLeastScale;
  const int last = one_by_one ? 0 : min(end, whole);
  Best best;
  const auto stream_loaded = [&](auto weights, auto moments) {
    return stream_loaded_tiles<decltype(weights)::value, decltype(moments)::value>(
        source, wishes, scale, tile, step, last, lane, sets, at, best, ahead);
  };
  constexpr std::integral_constant<Weights, Weights::kOwn> kOwn;
  constexpr std::integral_constant<Weights, Weights::kRawOnly> kRawOnly;
  if (kMoments && wishes.mean) {
    constexpr std::bool_constant<kMoments> kWanted;
    tile = wishes.own ? stream_loaded(kOwn, kWanted) : stream_loaded(kRawOnly, kWanted);
  } else if (wishes.own) {
    tile = stream_loaded(kOwn, std::false_type());
  } else if (wishes.total || wishes.raw) {
    tile = stream_loaded(kRawOnly, std::false_type());
  } else {
    tile = stream_loaded(std::integral_constant<Weights, Weights::kNone>(), std::false_type());
  }
  if (tile < end) {
    best = stream_any_tiles<Logits>(source, wishes, scale, tile, step, end, lane, at, best);
  }
  return best;
}

// Of a tile a bit a token: two words a group, of which the first has pieces 0, 2, 4 and 6, a byte
// each, the second one the others; so each has what one lane has of a set.
using TileBits = uint32_t[2 * kWarp];

// The token of such a bit, by its number.
__device__ inline int token_of_bit(int tile, int number) {
  const int piece = number % 32 / kPiece * 2 + number / 32 % 2;
  return piece_first(tile * kGroupsOfTile + number / kGroup, piece) + number % kPiece;
}

// What a warp keeps of the tiles that it works on, in the block's shared memory.
struct CheckedWarp {
  TileBits clear[2];  // that no mask bans and that were not seen before; by turns
  // Of the tile that is next, its tokens that masks allow and that were seen before, numbered in
  // the order of the lanes that have their groups: each lane's first number, and how many they are.
  int32_t first[kWarp + 1];
  int32_t seen[kWarp];   // 32 of them: their numbers among the tile's bits
  float2 values[kWarp];  // their logits, sanitised, and y
  TileBits in_output;
  Penalties penalties;
};

// The calling warp's.
__device__ inline CheckedWarp& the_checked_warp();

// A lane's words of the bitmaps: as they lie in memory, two neighbours; then its group's, as in
// TileBits. Where there is nothing to look at, what changes nothing. masks: the one that there is.
struct GroupWords {
  uint32_t masks[2], prompt[2], output[2];
};

// Of a window's four words two lanes have two each. Each gets those of its group.
__device__ inline void gather_words(uint32_t (&words)[2], int lane) {
  // Bytes of a group of the two words: its pieces with even numbers, then the others.
  const auto of_group = [&](int group) {
    return __byte_perm(words[0], words[1], group == 0 ? 0x6240 : 0x7351);
  };
  const int group = lane % kGroupsOfWindow;
  const uint32_t kept = of_group(group);
  const uint32_t other = __shfl_xor_sync(kAllLanes, of_group(group ^ 1), 1);
  const uint32_t first = group == 0 ? kept : other, second = group == 0 ? other : kept;
  words[0] = __byte_perm(first, second, 0x5410);
  words[1] = __byte_perm(first, second, 0x7632);
}

__device__ inline void gather_words(const Row& row, GroupWords& words, int lane) {
  if (row.masked()) gather_words(words.masks, lane);
  if ((row.checks & kCheckPenalties) != 0) {
    gather_words(words.prompt, lane);
    gather_words(words.output, lane);
  }
}

// As they lie in memory, a tile's by a warp.
__device__ inline GroupWords load_group_words(const Row& row, int tile, int lane) {
  GroupWords words = {{~0u, ~0u}, {0, 0}, {0, 0}};
  // Behind the row's end there is nothing.
  const int first = (tile * kGroupsOfTile + lane) * 2, end = (row.vocab + 31) / 32;
  const auto load = [&](const uint8_t* bitmap, uint32_t (&loaded)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      loaded[i] =
          first + i < end ? reinterpret_cast<const uint32_t*>(bitmap)[first + i] : uint32_t{0};
    }
  };
  const int checks = row.checks;
  if (row.masked()) {
    load((checks & kCheckGrammar) != 0 ? row.grammar : row.allowed, words.masks);
    if ((checks & kCheckGrammar) != 0 && (checks & kCheckAllowed) != 0) {
      uint32_t allowed[2];
      load(row.allowed, allowed);
#pragma unroll
      for (int i = 0; i < 2; ++i) words.masks[i] &= allowed[i];
    }
  }
  if ((checks & kCheckPenalties) != 0) {
    load(row.prompt, words.prompt);
    load(row.output, words.output);
  }
  return words;
}

// A group's tokens that masks allow and that were seen before, a bit each.
struct SeenBits {
  uint32_t left[2];

  __device__ explicit SeenBits(const GroupWords& words) {
#pragma unroll
    for (int i = 0; i < 2; ++i) left[i] = words.masks[i] & (words.prompt[i] | words.output[i]);
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
    const int number_of_bit = memory.seen[lane], id = token_of_bit(tile, number_of_bit);
    token.logit = load_bits<Logits>(row, id);
    if ((memory.in_output[number_of_bit / 32] >> number_of_bit % 32 & 1) != 0) {
      token.in_output = row.counts[id];
    }
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
                                               GroupWords words, int tile, int half, int lane,
                                               TileBits& clear) {
  gather_words(row, words, lane);
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
  SeenBits bits(words);
  if (half >= 0 && lane / kGroupsOfSet != half) bits.left[0] = bits.left[1] = 0;
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
    GroupWords words = load_group_words(row, tile, lane);
    gather_words(row, words, lane);
    SeenBits bits(words);
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
  return of_tile[2 * group_of_lane(0, number, lane) + lane % kLanesOfWindow / kGroupsOfWindow];
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
  const int group = group_of_lane(tile, number, lane);
  const float maximum = group_maximum<false>(set);
  renew_all(set);
  const float sum = raw_group_sum(set, maximum);
  renew_all(set);
  if (lane_writes(lane)) {
    at.raw_maxima[group] = maximum;
    at.raw_sums[group] = sum;
  }
  return {maximum, sum};
}

// Then those of its y. seen: each lane its group's of the tile; clear: of the tile; masked: whether
// masks ban; kAll: whether exponents may be wide, and means wanted.
template <bool kAll, class Logits>
__device__ inline void stream_y(const Wishes wishes, float scale, bool masked, int tile, int number,
                                int lane, const RawGroup& raw, Set<Logits>& set, const Seen& seen,
                                const TileBits& clear, const Statistics& at, Best& best) {
  const int group = group_of_lane(tile, number, lane);
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
      maximum = group_maximum<false>(set);
    }
  }
  maximum = fmaxf(maximum, seen_maximum);
  const float left = raw.sum != raw.sum ? kInf : maximum;
  if (writes) at.maxima[group] = left;
  best.see(left, group);
  if (!wishes.total) return;
  renew_all(set);
  const Exponents exponents = {finite_or_zero(maximum), scale};
  const float z_of_seen = exponents.z(seen_maximum);
  const float of_seen = ex2_approx(z_of_seen), seen_sum = of_group(seen.sum);
  const float sum = group_sum<kAll>(set, exponents) + seen_sum * of_seen;
  if (writes) at.sums[group] = sum;
  if (kAll && wishes.mean) {
    renew_all(set);
    const float seen_moment = of_group(seen.moment);
    const float moment =
        group_moment<kAll>(set, exponents) +
        (z_of_seen < -126.0f ? 0.0f : (seen_moment + seen_sum * z_of_seen) * of_seen);
    if (writes) at.moments[group] = moment;
  }
}

// One set by itself, of any row: what its tile's would be.
template <class Logits>
__device__ __noinline__ Best stream_one_set(const Row& row, const Wishes wishes, int set, int lane,
                                            const Statistics at, Best best) {
  const int tile = set / kSets, number = set % kSets;
  Set<Logits> loaded = load_any_set<Logits>(row, tile, number, lane);
  if (!wishes.split) {
    stream_set<true, true>(wishes, row.scale, tile, number, lane, loaded, at, best);
    return best;
  }
  CheckedWarp& memory = the_checked_warp();
  keep_penalties(row, memory, lane);
  const GroupWords words = load_group_words(row, tile, lane);
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
  GroupWords words = load_group_words(row, tile, lane);
  Set<Logits> sets[kSets];
  load_tile(row, tile, lane, sets);
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
        if (next < end) words = load_group_words(row, next, lane);
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
