// Where everything lies in the device records: graphed_sampling/layout.py in C++. A test compares
// the two.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace graphed_sampling {

// Bits of kParamFlags.
constexpr int kAdmitted = 1, kGreedy = 2, kFiltered = 4, kLogprobs = 8, kProcessed = 16, kRank = 32,
              kAllowed = 64, kPenalties = 128, kTotal = 256, kMean = 512, kRaw = 1024,
              kLists = 2048, kLowered = 4096;

// Words of a parameter record's header.
constexpr int kParamFlags = 0, kParamTemperature = 1, kParamTopK = 2, kParamTopP = 3,
              kParamMinP = 4, kParamTopNSigma = 5, kParamTypicalP = 6, kParamEpsilonCutoff = 7,
              kParamEtaCutoff = 8, kParamRepetitionPenalty = 9, kParamFrequencyPenalty = 10,
              kParamPresencePenalty = 11, kParamMinTokens = 12, kParamMaxTokens = 13,
              kParamSeed = 14, kParamMinPOffset = 16, kParamTopLogprobs = 18, kParamNumBias = 19,
              kParamNumStop = 20, kParamNumBadWords = 21, kParamNumGiven = 22, kParamScale = 23,
              kParamWideScale = 24;
constexpr int kHeaderWords = 32;

// Words of a state record.
constexpr int kStatePosition = 0, kStateLastToken = 2, kStateNumGenerated = 4,
              kStateFinishReason = 5, kStateGeneration = 6, kStateRecent = 8;

// Words of an output record.
constexpr int kOutputTokenId = 0, kOutputLogprob = 2, kOutputRank = 3, kOutputNumKept = 4,
              kOutputFinishReason = 5, kOutputFlags = 6, kOutputGeneration = 7, kOutputLists = 8;

// Words of the record of a position whose token is given; the lists are as in an output record.
constexpr int kPositionLargest = 0, kPositionLogNormaliser = 1, kPositionLogprob = 2,
              kPositionRank = 3, kPositionNumKept = 4, kPositionEntropy = 5, kPositionFlags = 6,
              kPositionLists = 8;

constexpr int kFinishNone = 0, kFinishStop = 1, kFinishLength = 2;

constexpr int kRowPadding = 1, kRowNan = 2, kRowPosInf = 4, kRowEmpty = 8, kRowFinished = 16;

// TableLayout.to_ints(), and the offsets that follow from it.
struct TableLayout {
  int vocab_size, max_requests, max_logprobs, max_logit_bias, max_stop_ids, max_bad_words,
      max_bad_word_length, max_logprob_ids, penalties;

  static constexpr int kInts = 9;

  GS_HOST_DEVICE static constexpr int round_up(int value) { return (value + 3) / 4 * 4; }
  GS_HOST_DEVICE constexpr int bias_ids() const { return kHeaderWords; }
  GS_HOST_DEVICE constexpr int bias_values() const { return bias_ids() + max_logit_bias; }
  GS_HOST_DEVICE constexpr int stop_ids() const { return bias_values() + max_logit_bias; }
  GS_HOST_DEVICE constexpr int bad_words() const { return stop_ids() + max_stop_ids; }
  GS_HOST_DEVICE constexpr int given_ids() const {
    return bad_words() + max_bad_words * max_bad_word_length;
  }
  GS_HOST_DEVICE constexpr int params_words() const {
    return round_up(given_ids() + max_logprob_ids);
  }
  GS_HOST_DEVICE constexpr int recent_tokens() const {
    return max_bad_word_length > 0 ? max_bad_word_length - 1 : 0;
  }
  GS_HOST_DEVICE constexpr int state_words() const {
    return round_up(kStateRecent + recent_tokens());
  }
  GS_HOST_DEVICE constexpr int bitmap_words() const { return (vocab_size + 31) / 32; }
  GS_HOST_DEVICE constexpr int64_t rows() const { return int64_t{max_requests} + 1; }
  GS_HOST_DEVICE constexpr int64_t prompt_bits() const { return rows() * bitmap_words(); }
  GS_HOST_DEVICE constexpr int64_t output_bits() const { return 2 * rows() * bitmap_words(); }
  GS_HOST_DEVICE constexpr int64_t counts() const { return 3 * rows() * bitmap_words(); }
  GS_HOST_DEVICE constexpr int64_t tables_words() const {
    return penalties ? counts() + rows() * vocab_size : rows() * bitmap_words();
  }
  GS_HOST_DEVICE constexpr int top_logprobs() const { return kOutputLists + 2 * max_logprobs; }
  GS_HOST_DEVICE constexpr int given_logprobs() const { return top_logprobs() + max_logprobs; }
  GS_HOST_DEVICE constexpr int output_words() const {
    return round_up(given_logprobs() + max_logprob_ids);
  }
};

}  // namespace graphed_sampling
