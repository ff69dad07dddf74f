// What tells the detector of data races (races.cpp) what the emulator does. Without
// GRAPHED_SAMPLING_RACES nothing here does anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct uint3;

namespace emulation::races {

// How an access is meant, which its address does not tell.
enum class Kind : uint8_t {
  kPlain,
  kAtomic,
  kCoherent,  // a load from where all multiprocessors see the same
  kConstant,  // a load that promises that nothing of the launch writes there
};

#ifdef GRAPHED_SAMPLING_RACES

// Stacks belong to their fibers, so accesses to them are nobody else's business.
void start_launch(const std::byte* stacks_begin, const std::byte* stacks_end);
// Accesses count between start_cluster() and end_cluster(). In between its blocks start, in order
// of their ranks, and then take turns; each exits once all its threads have ended.
void start_cluster(int blocks);
void start_block(const uint3& index, const std::byte* shared_begin, const std::byte* shared_end);
void enter_block(unsigned rank);
void exit_block();
void end_cluster();
// All threads of the block have come, or have ended.
void meet_at_barrier();
// The lanes of the mask have.
void meet_at_syncwarp(int warp, uint32_t mask);
// The running thread has, and others may rely on what it did before.
void arrive_at_cluster();
// The cluster's threads had arrived, or have ended, and the running one may rely on that.
void wait_for_cluster();
// Of a gate: the running thread has arrived; all that its phase is for have; the running one may
// rely on what those of the phase before did.
void init_gate(const uint64_t* gate);
void arrive_at_gate(const uint64_t* gate);
void end_phase_of_gate(const uint64_t* gate);
void pass_gate(const uint64_t* gate);

// The races found since the last call, each pair of places in the code once. An address of the
// code is written +0x1234: for `addr2line` with this library.
std::vector<std::string> take();

void set_kind(Kind kind);

#else

inline void start_launch(const std::byte*, const std::byte*) {}
inline void start_cluster(int) {}
inline void start_block(const uint3&, const std::byte*, const std::byte*) {}
inline void enter_block(unsigned) {}
inline void exit_block() {}
inline void end_cluster() {}
inline void meet_at_barrier() {}
inline void meet_at_syncwarp(int, uint32_t) {}
inline void arrive_at_cluster() {}
inline void wait_for_cluster() {}
inline void init_gate(const uint64_t*) {}
inline void arrive_at_gate(const uint64_t*) {}
inline void end_phase_of_gate(const uint64_t*) {}
inline void pass_gate(const uint64_t*) {}
inline void set_kind(Kind) {}

#endif

// The accesses while it lives are of that kind. set_kind() lies in a file of its own, lest the
// kind itself look like memory of the kernel's.
class Accesses {
 public:
  explicit Accesses(Kind kind) { set_kind(kind); }
  ~Accesses() { set_kind(Kind::kPlain); }
  Accesses(const Accesses&) = delete;
  Accesses& operator=(const Accesses&) = delete;
};

}  // namespace emulation::races
