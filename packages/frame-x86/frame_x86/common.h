// What the sources share: rows as numbers of two digits, memory of a thread, SiLU.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <utility>

#include "simd.h"

namespace {

enum Kind { kPlain = 0, kInt8 = 1, kInt4 = 2 };

constexpr int kDigit = 128;          // of x as numbers of two digits
constexpr int kMost = 127 * kDigit;  // the largest magnitude of a row of x

// Memory of one thread that grows and is kept.
struct Scratch {
  void *data = nullptr;
  size_t size = 0;
  ~Scratch() { free(data); }
  void *Get(size_t wanted) {
    if (wanted > size) {
      free(data);
      size = (wanted + 4095) / 4096 * 4096;
      data = aligned_alloc(4096, size);
      if (!data) abort();
    }
    return data;
  }
};

#define ALWAYS __attribute__((always_inline))

template <class F, int... i>
inline ALWAYS void RepeatEach(F f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>{}), ...);
}

// f(0), ..., f(n - 1) with constants, so that arrays of registers stay in registers.
template <int n, class F>
inline ALWAYS void Repeat(F f) {
  RepeatEach(f, std::make_integer_sequence<int, n>{});
}

// What 1 stands for where n numbers become fixed-point numbers: NaN if x has a NaN or an infinity.
inline float FindStep(const bf16 *x, int64_t n) {
  F16 most = Spread(1e-30f), wrong = Spread(0);
  for (int64_t k = 0; k < n; k += 16) {
    most = Max(most, Absolute(LoadNumbers(x + k)));
    wrong = MultiplyAdd(LoadNumbers(x + k), Spread(0), wrong);
  }
  return Largest(most) / kMost + Sum(wrong);
}

// 16 numbers times `scale` = 128 * high + low, of which low is to be narrowed with saturation.
inline ALWAYS void Split(const bf16 *x, F16 scale, I16 *high, I16 *low) {
  const F16 number = Multiply(LoadNumbers(x), scale);
  *high = Round(Multiply(number, Spread(1.f / kDigit)));
  *low = Round(SubtractProduct(ToFloat(*high), Spread(kDigit), number));
}

// e to x. NaN stays.
inline F16 Exp(F16 x) {
  x = Min(Spread(88.f), Max(Spread(-87.f), x));
  const F16 n = RoundToInteger(Multiply(x, Spread(1.44269504f)));
  const F16 r = SubtractProduct(n, Spread(0.693147181f), x);
  F16 p = Spread(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = MultiplyAdd(p, r, Spread(c));
  return Multiply(p, PowerOfTwo(n));
}

inline F16 Silu(F16 x) { return Divide(x, Add(Spread(1.f), Exp(Subtract(Spread(0), x)))); }

}  // namespace
