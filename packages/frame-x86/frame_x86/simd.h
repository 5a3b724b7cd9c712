// Sixteen numbers at a time, in one register of AVX-512 or in two of AVX2, and pairs of bfloat16.
// Included by the sources that are compiled for each of the two.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

#if defined(__AVX512F__)

using F16 = __m512;   // 16 float32
using I16 = __m512i;  // 16 int32
using Register = __m512;

inline F16 Spread(float x) { return _mm512_set1_ps(x); }
inline F16 Load(const float *x) { return _mm512_loadu_ps(x); }
inline void Store(float *to, F16 x) { _mm512_storeu_ps(to, x); }
inline F16 Add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 Subtract(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 Multiply(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 Divide(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 MultiplyAdd(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline F16 SubtractProduct(F16 a, F16 b, F16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline F16 Max(F16 a, F16 b) { return _mm512_max_ps(a, b); }  // b where one is NaN; `Min` too
inline F16 Min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline F16 Absolute(F16 a) { return _mm512_abs_ps(a); }
inline float Sum(F16 a) { return _mm512_reduce_add_ps(a); }
inline float Largest(F16 a) { return _mm512_reduce_max_ps(a); }
inline I16 Round(F16 a) { return _mm512_cvtps_epi32(a); }
inline F16 ToFloat(I16 a) { return _mm512_cvtepi32_ps(a); }
inline I16 Add(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
inline I16 Shift7(I16 a) { return _mm512_slli_epi32(a, 7); }
inline int Sum(I16 a) { return _mm512_reduce_add_epi32(a); }
inline I16 ZeroInts() { return _mm512_setzero_si512(); }
inline __m128i Narrow8(I16 a) { return _mm512_cvtsepi32_epi8(a); }    // with saturation
inline __m256i Narrow16(I16 a) { return _mm512_cvtsepi32_epi16(a); }  // with saturation
inline I16 Widen8(const int8_t *x) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)); }
inline F16 PowerOfTwo(F16 a) { return _mm512_scalef_ps(_mm512_set1_ps(1.f), a); }  // of integers from -126 to 127
inline F16 RoundToInteger(F16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline F16 LoadNumbers(const bf16 *x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

// The bits of float32 with the upper half rounded to bfloat16. NaN stays NaN.
inline I16 RoundBits(F16 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 wrong = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, wrong, bits, _mm512_set1_epi32(0x400000));
}

inline void StoreNumbers(bf16 *to, F16 x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(RoundBits(x), 16)));
#endif
}

inline Register ZeroRegister() { return _mm512_setzero_ps(); }
inline Register MultiplyAddRegister(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }
inline float SumRegister(Register a) { return _mm512_reduce_add_ps(a); }
inline Register SpreadRegister(float x) { return _mm512_set1_ps(x); }
inline Register ScaleRegister(Register a, float x) { return _mm512_mul_ps(a, _mm512_set1_ps(x)); }

// The even and the odd ones of 32 numbers.
inline void LoadPairs(const bf16 *x, Register *even, Register *odd) {
  const __m512i both = _mm512_loadu_si512(x);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
}

inline void StorePairs(bf16 *to, Register even, Register odd) {
  const __m512i high = _mm512_and_si512(RoundBits(odd), _mm512_set1_epi32(0xffff0000));
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(RoundBits(even), 16), high));
}

#else

struct F16 {
  __m256 a, b;
};
struct I16 {
  __m256i a, b;
};
using Register = __m256;

inline F16 Spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 Load(const float *x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline void Store(float *to, F16 x) { _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b); }
inline F16 Add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 Subtract(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 Multiply(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 Divide(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 MultiplyAdd(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 SubtractProduct(F16 x, F16 y, F16 z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline F16 Max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 Min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 Absolute(F16 x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline I16 Round(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F16 ToFloat(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16 Add(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 Shift7(I16 x) { return {_mm256_slli_epi32(x.a, 7), _mm256_slli_epi32(x.b, 7)}; }
inline I16 ZeroInts() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline F16 RoundToInteger(F16 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}

inline float SumRegister(Register x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float Sum(F16 x) { return SumRegister(_mm256_add_ps(x.a, x.b)); }
inline float Largest(F16 x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline int Sum(I16 x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline __m256i Narrow16(I16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); }
inline __m128i Narrow8(I16 x) {
  const __m256i words = Narrow16(x);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline I16 Widen8(const int8_t *x) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)x);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline F16 PowerOfTwo(F16 x) {
  const I16 n = Round(x);
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}

inline __m256 LoadEight(const bf16 *x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}
inline F16 LoadNumbers(const bf16 *x) { return {LoadEight(x), LoadEight(x + 8)}; }

// The bits of float32 with the upper half rounded to bfloat16. NaN stays NaN.
inline __m256i RoundBits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 wrong = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), wrong));
}

inline void StoreNumbers(bf16 *to, F16 x) {
  const __m256i a = _mm256_srli_epi32(RoundBits(x.a), 16), b = _mm256_srli_epi32(RoundBits(x.b), 16);
  _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}

inline Register ZeroRegister() { return _mm256_setzero_ps(); }
inline Register MultiplyAddRegister(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
inline Register SpreadRegister(float x) { return _mm256_set1_ps(x); }
inline Register ScaleRegister(Register a, float x) { return _mm256_mul_ps(a, _mm256_set1_ps(x)); }

// The even and the odd ones of 16 numbers.
inline void LoadPairs(const bf16 *x, Register *even, Register *odd) {
  const __m256i both = _mm256_loadu_si256((const __m256i *)x);
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)));
}

inline void StorePairs(bf16 *to, Register even, Register odd) {
  const __m256i high = _mm256_and_si256(RoundBits(odd), _mm256_set1_epi32(0xffff0000));
  _mm256_storeu_si256((__m256i *)to, _mm256_or_si256(_mm256_srli_epi32(RoundBits(even), 16), high));
}

#endif

constexpr int kRegister = sizeof(Register) / sizeof(float);  // float32 of a register
constexpr int kPairs = 2 * kRegister;                        // bfloat16 of a register

inline Register LoadRegister(const float *x) {
  Register value;
  memcpy(&value, x, sizeof(value));
  return value;
}
inline void StoreRegister(float *to, Register x) { memcpy(to, &x, sizeof(x)); }

// sums + the products of the pairs of x and y.
inline __attribute__((always_inline)) Register AddPairs(Register sums, const bf16 *x, const bf16 *y) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(y));
#else
  Register x_even, x_odd, y_even, y_odd;
  LoadPairs(x, &x_even, &x_odd);
  LoadPairs(y, &y_even, &y_odd);
  return MultiplyAddRegister(x_odd, y_odd, MultiplyAddRegister(x_even, y_even, sums));
#endif
}

}  // namespace
