// What the ranks of a sharded step send each other, and how they wait for it.
#pragma once

#include "../sharded_step.h"
#include "finish.h"

namespace graphed_sampling {

// Why a rank has given up: another one did not come in time, or came with another step.
constexpr int kMissing = 1, kMismatch = 2;

// Of a rank's exchange buffer, in words: a header; by rank, signals that it is through with a step;
// then of each row, by rank, signals that its statistics are there, and the statistics.
struct ExchangeLayout {
  // How many steps the rank has closed, and how many rows of the present one are through.
  static constexpr int kClosed = 0, kTicket = 1;
  // Why the rank has given up, 0 if it has not, and above that, waiting for whom and in which
  // phase; then at which row. The two are written at once, since the host may look at any time.
  static constexpr int kFailure = 2, kFailedRow = 3;
  static constexpr int kFailedRankBit = 8, kFailedPhaseBit = 16;
  // Whether it has done so in an earlier step. All blocks of a step find the same here, so that a
  // row is sent whole or not at all.
  static constexpr int kSilent = 4;
  static constexpr int kDone = 32;
  static constexpr int kSignals = 2 * kMostShards;
  static constexpr int kHeader = kDone + kSignals;
  int groups, row_words;

  GS_HOST_DEVICE explicit ExchangeLayout(const TableLayout& layout)
      : groups(groups_of(layout.vocab_size)), row_words(kSignals + kStatistics * groups) {}
  GS_HOST_DEVICE int64_t row(int64_t index) const { return kHeader + index * row_words; }
};

// A signal is the number of a step, from 1 on, and above it how many rows the step has: ranks that
// do not agree about what they step find that out.
__device__ inline uint64_t signal_of(uint32_t step, int rows) {
  return static_cast<uint64_t>(static_cast<uint32_t>(rows)) << 32 | step;
}

__device__ inline uint64_t* signal_of_rank(int32_t* signals, int rank) {
  return reinterpret_cast<uint64_t*>(signals) + rank;
}

__device__ inline bool has_failed(const int32_t* exchange) {
  return load_now(exchange + ExchangeLayout::kFailure) != 0;
}

__device__ inline bool is_other_step(uint64_t seen, uint64_t expected) {
  // Not one before it, from which the signal is until the new one comes.
  return seen != expected &&
         static_cast<int32_t>(static_cast<uint32_t>(seen) - static_cast<uint32_t>(expected)) >= 0;
}

// A thread waits until a rank has sent a signal, or the rank that waits has given up. False if it
// has, with the reason in the exchange buffer. first: where the same rank's signal of the first row
// would be.
__device__ inline bool wait_for(const ShardedArguments& s, const uint64_t* place,
                                const uint64_t* first, uint64_t expected, int rank, int phase,
                                int row) {
  int32_t* exchange = s.exchange[s.rank];
  const uint64_t start = nanoseconds();
  int failure = 0;
  for (unsigned turn = 1; failure == 0; ++turn) {
    // In this order both are on their way at once.
    const bool failed = has_failed(exchange);
    const uint64_t seen = load_acquire(place);
    if (failed) return false;
    if (seen == expected) return true;
    if (is_other_step(seen, expected)) {
      failure = kMismatch;
      break;
    }
    // The clock is not looked at each time, which could take longer than the signal.
    if (turn % 16 == 0 && nanoseconds() - start >= static_cast<uint64_t>(s.limit_ns)) {
      failure = kMissing;
    }
  }
  // Rows that the other rank does not step are never signalled.
  if (is_other_step(load_acquire(first), expected)) failure = kMismatch;
  const int why =
      failure | rank << ExchangeLayout::kFailedRankBit | phase << ExchangeLayout::kFailedPhaseBit;
  atomicCAS(reinterpret_cast<unsigned long long*>(exchange + ExchangeLayout::kFailure), 0ull,
            static_cast<unsigned long long>(row) << 32 | static_cast<unsigned>(why));
  return false;
}

// The block sends what it has of groups [first, end), multiples of 4, to all ranks, whose records
// of the row begin at `record` in their buffers.
__device__ inline void send_statistics(const ShardedArguments& s, int64_t record, int groups,
                                       int first, int end, const Wishes& wishes,
                                       const Statistics& at) {
  const auto send = [&](const float* values, int kind) {
    const int64_t place = record + ExchangeLayout::kSignals + int64_t{kind} * groups;
    for (int i = first / 4 + static_cast<int>(threadIdx.x); i < end / 4; i += kThreads) {
      const float4 four = load_now(reinterpret_cast<const float4*>(values) + i);
      // Each rank begins with another one, so that they do not all wait for one.
      for (int k = 1; k <= s.ranks; ++k) {
        const int rank = (s.rank + k) % s.ranks;
        auto* to = reinterpret_cast<float*>(s.exchange[rank] + place);
        if (to != values) reinterpret_cast<float4*>(to)[i] = four;
      }
    }
  };
  send(at.maxima, 0);
  if (wishes.total || (wishes.raw && !wishes.split)) send(at.sums, 1);
  if (wishes.split) send(at.raw_maxima, 2);
  if (wishes.split || wishes.both) send(at.raw_sums, 3);
  if (wishes.mean) send(at.moments, 4);
}

}  // namespace graphed_sampling
