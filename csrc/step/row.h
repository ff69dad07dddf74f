// A row: its logits, its parameters, and what processing makes of its logits.
#pragma once

#include <cstdint>

#include "../common/layout.h"
#include "../logits_type.h"
#include "numbers.h"

namespace graphed_sampling {

// The geometry that results rest on. A piece is 8 neighbouring tokens, which a lane reads at a
// time. Of a window of 16 pieces one group has those with even numbers, the other one the rest: so
// two lanes have a group of their own, and four that read a window read whole sectors of memory.
constexpr int kPiece = 8;
constexpr int kPieces = 8;  // of a group
constexpr int kGroup = kPiece * kPieces;
constexpr int kGroupsOfWindow = 2;
constexpr int kWindow = kGroup * kGroupsOfWindow;

GS_HOST_DEVICE constexpr int group_of(int token) {
  return token / kWindow * kGroupsOfWindow + token / kPiece % kGroupsOfWindow;
}

// The first token of a group's piece.
GS_HOST_DEVICE constexpr int piece_first(int group, int piece) {
  return group / kGroupsOfWindow * kWindow +
         (piece * kGroupsOfWindow + group % kGroupsOfWindow) * kPiece;
}

// A group's tokens in the order of their ids.
GS_HOST_DEVICE constexpr int token_of_group(int group, int place) {
  return piece_first(group, place / kPiece) + place % kPiece;
}
static_assert(group_of(piece_first(5, 3) + 7) == 5 && piece_first(5, 3) == 312);

// The types of logits: how many 16-byte vectors a piece takes, what is in them, and the bits of
// -inf.
struct Float32 {
  static constexpr bool kSharded = false, kInformed = false;
  static constexpr int kVectors = 2;
  static constexpr uint32_t kNegInfBits = 0xFF800000u, kNegInfWord = 0xFF800000u;
  using Bits = uint32_t;
  __device__ static float value(Bits bits) { return __uint_as_float(bits); }
  // Two neighbours, of which the first has an even place in a row that is aligned.
  __device__ static void load_pair(const void* logits, int64_t i, float (&x)[2]) {
    const auto* pair = reinterpret_cast<const float2*>(static_cast<const float*>(logits) + i);
    const float2 loaded = __ldg(pair);
    x[0] = loaded.x;
    x[1] = loaded.y;
  }
  __device__ static void unpack(const uint32_t (&words)[8], float (&x)[kPiece]) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = __uint_as_float(words[i]);
  }
  // Of what two words hold, each for itself, and of what one does. NaN counts with kNan, else only
  // where there is nothing else.
  template <bool kNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    return __float_as_uint(max_f32<kNan>(__uint_as_float(a), __uint_as_float(b)));
  }
  template <bool kNan>
  __device__ static float largest(uint32_t word) {
    return __uint_as_float(word);
  }
};

struct BFloat16 {
  static constexpr bool kSharded = false, kInformed = false;
  static constexpr int kVectors = 1;
  static constexpr uint32_t kNegInfBits = 0xFF80u, kNegInfWord = 0xFF80FF80u;
  using Bits = uint16_t;
  __device__ static float value(Bits bits) { return bf16_to_float(bits); }
  __device__ static void load_pair(const void* logits, int64_t i, float (&x)[2]) {
    const auto* pair = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(logits) + i);
    const uint32_t word = __ldg(pair);
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xFFFF0000u);
  }
  __device__ static void unpack(const uint32_t (&words)[4], float (&x)[kPiece]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  template <bool kNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    return max_bf16x2<kNan>(a, b);
  }
  template <bool kNan>
  __device__ static float largest(uint32_t word) {
    return max_f32<kNan>(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  }
};

struct Float16 {
  static constexpr bool kSharded = false, kInformed = false;
  static constexpr int kVectors = 1;
  static constexpr uint32_t kNegInfBits = 0xFC00u, kNegInfWord = 0xFC00FC00u;
  using Bits = uint16_t;
  __device__ static float value(Bits bits) { return half_to_float(bits); }
  __device__ static void load_pair(const void* logits, int64_t i, float (&x)[2]) {
    const auto* pair = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(logits) + i);
    const uint32_t word = __ldg(pair);
    x[0] = half_to_float(static_cast<uint16_t>(word & 0xFFFFu));
    x[1] = half_to_float(static_cast<uint16_t>(word >> 16));
  }
  __device__ static void unpack(const uint32_t (&words)[4], float (&x)[kPiece]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = half_to_float(static_cast<uint16_t>(words[i] & 0xFFFFu));
      x[2 * i + 1] = half_to_float(static_cast<uint16_t>(words[i] >> 16));
    }
  }
  template <bool kNan>
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    return max_f16x2<kNan>(a, b);
  }
  template <bool kNan>
  __device__ static float largest(uint32_t word) {
    return max_f32<kNan>(half_to_float(static_cast<uint16_t>(word & 0xFFFFu)),
                         half_to_float(static_cast<uint16_t>(word >> 16)));
  }
};

// The same of rows whose groups' statistics somebody else has worked out, and may have got wrong.
template <class Base>
struct Informed : Base {
  static constexpr bool kInformed = true;
};

// The same of rows whose logits lie in shards, each in its owner's memory: whoever reads them finds
// out where. A row's `logits` are not used then.
template <class Base>
struct Sharded : Base {
  static constexpr bool kSharded = true;
};

// Where a row's shards lie. Shard i has the tokens from starts[i] to before starts[i + 1], of which
// there may be none; rows[i] is the address at which it would have token 0.
struct Shards {
  int starts[kMostShards + 1];
  uintptr_t rows[kMostShards];

  // Of a token of the vocabulary.
  __device__ int owner(int token) const {
    int i = 0;
    while (token >= starts[i + 1]) ++i;
    return i;
  }
};

// Those of the row that the block finishes, in its shared memory.
__device__ inline const Shards& the_shards();

// A piece as it lies in memory.
template <class Logits>
struct Pack {
  uint32_t words[4 * Logits::kVectors];
};

// What of a row's processing there is to look at.
constexpr int kCheckGrammar = 1, kCheckAllowed = 2, kCheckPenalties = 4;

// Rows whose processed logits the contract replaces.
constexpr int kNormal = 0, kPositiveInfinity = 1, kEmptyRow = 2;

// Where a row's logits lie.
struct Source {
  const void* logits;
  int vocab;
  bool aligned;  // to 16 bytes
};

struct Row : Source {
  const int32_t* params;
  int32_t* state;
  // Bit i of byte b stands for token 8 b + i.
  const uint8_t* grammar;
  const uint8_t* allowed;
  const uint8_t* prompt;
  const uint8_t* output;
  const int32_t* counts;
  const int32_t* bias_ids;
  const int32_t* bias_values;
  const int32_t* bans;
  int flags;
  int checks;
  int num_bias;
  int num_bans;
  int special;
  int fallback;  // of an empty row: the token that it gets
  float scale;   // log2(e) / temperature

  __device__ bool has(int flag) const { return (flags & flag) != 0; }
  __device__ bool masked() const { return (checks & (kCheckGrammar | kCheckAllowed)) != 0; }
  // Whether y is the logit.
  __device__ bool plain() const {
    return checks == 0 && num_bias + num_bans == 0 && special == kNormal;
  }
};

// What other devices write before they say that it may be read is not read by __ldg(), whose
// promise is that nobody writes it while the kernel runs.
template <class Logits, class T>
__device__ inline T load_at(const T* place) {
  if constexpr (Logits::kSharded) {
    return *place;
  } else {
    return __ldg(place);
  }
}

// Whether all pieces of a row may be loaded by load_whole_pack().
template <class Logits>
__device__ inline bool is_in_whole_pieces(const Source& source) {
  return !Logits::kSharded && source.aligned && source.vocab % kPiece == 0;
}

// A piece that is known to be aligned, and to lie inside the row, or inside one shard, of which
// `logits` would be token 0. kPassing: whether few of its tokens will be looked at again.
template <class Logits, bool kPassing = false>
__device__ inline Pack<Logits> load_whole_pack(const void* logits, int first) {
  Pack<Logits> pack;
  const auto* vectors =
      reinterpret_cast<const uint4*>(static_cast<const typename Logits::Bits*>(logits) + first);
#pragma unroll
  for (int i = 0; i < Logits::kVectors; ++i) {
    const uint4 vector =
        kPassing && !Logits::kSharded ? load_passing(vectors + i) : load_at<Logits>(vectors + i);
    pack.words[4 * i] = vector.x;
    pack.words[4 * i + 1] = vector.y;
    pack.words[4 * i + 2] = vector.z;
    pack.words[4 * i + 3] = vector.w;
  }
  return pack;
}

// The bits of a logit, of a token of the vocabulary.
template <class Logits>
__device__ inline typename Logits::Bits load_bits(const Source& source, int token) {
  const void* logits = source.logits;
  if constexpr (Logits::kSharded) {
    const Shards& shards = the_shards();
    logits = reinterpret_cast<const void*>(shards.rows[shards.owner(token)]);
  }
  return load_at<Logits>(static_cast<const typename Logits::Bits*>(logits) + token);
}

// A piece that is not aligned, or not whole: everything after the row is -inf.
template <class Logits>
__device__ __noinline__ Pack<Logits> load_ragged_pack(const Source& source, int first) {
  using Bits = typename Logits::Bits;
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
  Pack<Logits> pack;
#pragma unroll
  for (int i = 0; i < 4 * Logits::kVectors; ++i) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int token = first + i * kPerWord + j;
      const uint32_t bits = token < source.vocab
                                ? static_cast<uint32_t>(load_bits<Logits>(source, token))
                                : Logits::kNegInfBits;
      word |= bits << (j * 16);
    }
    pack.words[i] = word;
  }
  return pack;
}

template <class Logits>
__device__ inline Pack<Logits> load_pack(const Source& source, int first) {
  const void* logits = source.logits;
  bool whole = source.aligned && first + kPiece <= source.vocab;
  if constexpr (Logits::kSharded) {
    whole = first + kPiece <= source.vocab;
    if (whole) {
      const Shards& shards = the_shards();
      const int owner = shards.owner(first);
      whole = first + kPiece <= shards.starts[owner + 1] && shards.rows[owner] % 16 == 0;
      logits = reinterpret_cast<const void*>(shards.rows[owner]);
    }
  }
  return whole ? load_whole_pack<Logits>(logits, first) : load_ragged_pack<Logits>(source, first);
}

// NaN counts as -inf, -0.0 as 0.0.
__device__ inline float sanitised(float x) { return (x != x ? kNegInf : x) + 0.0f; }

template <class Logits>
__device__ inline float load_logit(const Row& row, int token) {
  return sanitised(Logits::value(load_bits<Logits>(row, token)));
}

struct Penalties {
  float repetition, frequency, presence;
};

__device__ inline Penalties penalties_of(const Row& row) {
  return {load_f32(row.params + kParamRepetitionPenalty),
          load_f32(row.params + kParamFrequencyPenalty),
          load_f32(row.params + kParamPresencePenalty)};
}

// y of a token seen in the prompt or, in_output, so many times in the output: each operation
// rounded once.
__device__ inline float penalised(const Penalties& penalties, float y, bool in_output, int count) {
  y = y > 0.0f ? __fdiv_rn(y, penalties.repetition) : __fmul_rn(y, penalties.repetition);
  if (in_output) {
    y = __fsub_rn(y, __fmul_rn(static_cast<float>(count), penalties.frequency));
    y = __fsub_rn(y, penalties.presence);
  }
  return y;
}

__device__ inline float penalised(const Row& row, float y, int token, bool in_output) {
  return penalised(penalties_of(row), y, in_output, in_output ? row.counts[token] : 0);
}

__device__ inline bool bit_of(const uint8_t* bitmap, int token) {
  return (bitmap[token >> 3] >> (token & 7) & 1) != 0;
}

// y in its range, and where it does not come from what was worked out.
__device__ inline float settled(float x, float y) {
  y = fminf(fmaxf(y, -kFltMax), kFltMax) + 0.0f;
  return x == kInf ? kInf : y;
}

// y of a token with sanitised logit x: +inf where an unbanned x is, -inf where banned. listed:
// whether lists may name it.
__device__ inline float processed(const Row& row, float x, int token, bool listed = true) {
  if (x == kNegInf) return kNegInf;
  if ((row.checks & kCheckGrammar) != 0 && !bit_of(row.grammar, token)) return kNegInf;
  if ((row.checks & kCheckAllowed) != 0 && !bit_of(row.allowed, token)) return kNegInf;
  float y = x;
  if (listed) {
    for (int i = 0; i < row.num_bans; ++i) {
      if (row.bans[i] == token) return kNegInf;
    }
    for (int i = 0; i < row.num_bias; ++i) {
      if (row.bias_ids[i] == token) {
        const float bias = load_f32(row.bias_values + i);
        if (bias == kNegInf) return kNegInf;
        y = __fadd_rn(y, bias);
      }
    }
  }
  if ((row.checks & kCheckPenalties) != 0) {
    const bool in_output = bit_of(row.output, token);
    if (in_output || bit_of(row.prompt, token)) y = penalised(row, y, token, in_output);
  }
  return settled(x, y);
}

// The same, where the row holds +inf or nothing: the entries that alone survive count as 0.
__device__ inline float special_or(const Row& row, float y, int token) {
  if (row.special == kPositiveInfinity) return y == kInf ? 0.0f : kNegInf;
  if (row.special == kEmptyRow) return token == row.fallback ? 0.0f : kNegInf;
  return y;
}

// Of a piece: which of its tokens no mask bans, and which were seen: bits.
struct PieceBits {
  uint32_t allowed, seen, in_output;
};

__device__ inline PieceBits piece_bits(const Row& row, int first) {
  PieceBits bits = {0xFFu, 0, 0};
  if (first >= row.vocab) return {0, 0, 0};
  const int byte = first >> 3;
  if ((row.checks & kCheckGrammar) != 0) bits.allowed &= __ldg(row.grammar + byte);
  if ((row.checks & kCheckAllowed) != 0) bits.allowed &= __ldg(row.allowed + byte);
  if ((row.checks & kCheckPenalties) != 0) {
    bits.in_output = row.output[byte];
    bits.seen = bits.in_output | row.prompt[byte];
  }
  if (first + kPiece > row.vocab) bits.allowed &= (1u << (row.vocab - first)) - 1;
  return bits;
}

// A piece's tokens, in registers: what is passed by its address lies in memory.
struct Piece {
  float y[kPiece];
};

// Which of a piece's tokens are among so many ids: bits.
__device__ inline uint32_t bits_of_ids(const int32_t* ids, int count, int first) {
  uint32_t bits = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const auto place = static_cast<uint32_t>(ids[i] - first);
    bits |= place < kPiece ? 1u << place : 0u;
  }
  return bits;
}

// Which of the tokens from `first` on lists name.
__device__ inline uint32_t listed_bits(const Row& row, int first) {
  return bits_of_ids(row.bans, row.num_bans, first) |
         bits_of_ids(row.bias_ids, row.num_bias, first);
}

// What processing makes of a piece's sanitised logits.
__device__ inline __noinline__ Piece process_piece(const Row& row, int first, Piece piece) {
  const PieceBits bits = piece_bits(row, first);
  uint32_t listed = 0xFFu;
  if (row.special == kNormal) {
    listed = listed_bits(row, first);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if ((bits.allowed >> i & 1) == 0) piece.y[i] = kNegInf;
    }
  }
  // One after the other: they are few, or all of a piece of a row that the contract replaces.
#pragma unroll 1
  for (uint32_t left = listed | bits.seen; left != 0; left &= left - 1) {
    const int place = __ffs(static_cast<int>(left)) - 1, token = first + place;
    if (token >= row.vocab) break;
    float y = piece.y[0];
#pragma unroll
    for (int i = 1; i < kPiece; ++i) y = place == i ? piece.y[i] : y;
    if ((listed >> place & 1) != 0) {
      y = special_or(row, processed(row, y, token), token);
    } else if (y > kNegInf) {
      y = settled(y, penalised(row, y, token, (bits.in_output >> place & 1) != 0));
    }
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.y[i] = place == i ? y : piece.y[i];
  }
  return piece;
}

// A piece's sanitised logits.
template <class Logits>
__device__ inline void logits_of_pack(const Pack<Logits>& pack, float (&x)[kPiece]) {
  Logits::unpack(pack.words, x);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = sanitised(x[i]);
}

// y of a piece's tokens, from `first` on; -inf past the row's end.
template <class Logits>
__device__ inline void y_of_pack(const Row& row, const Pack<Logits>& pack, int first,
                                 float (&y)[kPiece]) {
  Piece piece;
  logits_of_pack(pack, piece.y);
  if (!row.plain()) piece = process_piece(row, first, piece);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) y[i] = piece.y[i];
}

template <class Logits>
__device__ inline void piece_y(const Row& row, int first, float (&y)[kPiece]) {
  y_of_pack<Logits>(row, load_pack<Logits>(row, first), first, y);
}

// Whether a token with processed logit y is among those from `highest` down to `lowest`, of whose
// equals only those up to lowest_id count.
struct Kept {
  float highest, lowest;
  int lowest_id;

  __device__ bool holds(float y, int token) const {
    return y > kNegInf && y <= highest && (y > lowest || (y == lowest && token <= lowest_id));
  }
};

}  // namespace graphed_sampling
