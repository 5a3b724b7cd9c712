// Outputs of a row that are computed together, from places far apart in a weight.

#pragma once

#include "common.h"

namespace {

constexpr int kStreams = 8;   // places, and outputs that are computed together
constexpr int kAhead = 1024;  // bytes that are fetched ahead in each place

// Writes the outputs `first` + i * `apart` of a row of which `sums` are the sums. Gated: the second half of the streams
// are what the SiLU of the first half multiplies.
inline void WriteStreams(const float *sums, int64_t first, int64_t apart, bool gated, bf16 *out) {
  alignas(64) float values[16] = {}, others[16] = {};
  alignas(32) bf16 rounded[16];
  for (int i = 0; i < kStreams; i++) values[i] = sums[i];
  if (gated) {
    for (int i = 0; i < kStreams / 2; i++) others[i] = sums[i + kStreams / 2];
    StoreNumbers(rounded, Multiply(Silu(Load(values)), Load(others)));
  } else {
    StoreNumbers(rounded, Load(values));
  }
  for (int i = 0; i < (gated ? kStreams / 2 : kStreams); i++) out[first + i * apart] = rounded[i];
}

}  // namespace
