// What the sources share: loads of bfloat16, rows as numbers of two digits, memory of a thread, SiLU.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <utility>

namespace {

using bf16 = uint16_t;

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

inline __m512 LoadNumbers(const bf16 *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

// What 1 stands for where n numbers become fixed-point numbers: NaN if x has a NaN or an infinity.
inline float FindStep(const bf16 *x, int64_t n) {
  __m512 most = _mm512_set1_ps(1e-30f), wrong = _mm512_setzero_ps();
  for (int64_t k = 0; k < n; k += 16) {
    most = _mm512_max_ps(most, _mm512_abs_ps(LoadNumbers(x + k)));
    wrong = _mm512_fmadd_ps(LoadNumbers(x + k), _mm512_setzero_ps(), wrong);
  }
  return _mm512_reduce_max_ps(most) / kMost + _mm512_reduce_add_ps(wrong);
}

// 16 numbers times `scale` = 128 * high + low, of which low is to be narrowed with saturation.
inline ALWAYS void Split(const bf16 *x, __m512 scale, __m512i *high, __m512i *low) {
  const __m512 number = _mm512_mul_ps(LoadNumbers(x), scale);
  *high = _mm512_cvtps_epi32(_mm512_mul_ps(number, _mm512_set1_ps(1.f / kDigit)));
  *low = _mm512_cvtps_epi32(_mm512_fnmadd_ps(_mm512_cvtepi32_ps(*high), _mm512_set1_ps(kDigit), number));
}

// e to x. NaN stays: `max` and `min` return their second operand.
inline __m512 Exp(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(88.f), _mm512_max_ps(_mm512_set1_ps(-87.f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), x);
  __m512 p = _mm512_set1_ps(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

inline __m512 Silu(__m512 x) { return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), Exp(_mm512_sub_ps(_mm512_setzero_ps(), x)))); }

}  // namespace
