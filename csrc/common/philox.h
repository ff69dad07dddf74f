// Philox4x32-10, bit-equal on host and device. graphed_sampling/philox.py has the definition and
// its source; the tests compare the two.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace graphed_sampling {

// The 64-bit word of one draw. stream: the third word of the counter.
GS_HOST_DEVICE inline uint64_t philox_word(uint64_t seed, uint64_t position, uint32_t stream) {
  constexpr int kRounds = 10;
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32);
  uint32_t c2 = stream, c3 = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * c0, product1 = kMultiplier1 * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return uint64_t{c1} << 32 | c0;
}

}  // namespace graphed_sampling
