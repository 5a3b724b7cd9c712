// The product of one row with an int4 weight by dot products of bytes (VNNI): codes are unpacked in
// registers, and not to a tile in memory. Included by products.cpp, whose types it uses.

constexpr int kBlock = 128;   // inputs of a register of codes
constexpr int kTogether = 4;  // outputs that are computed together

// A row as fixed-point numbers of two digits. `sums` [inputs / 128][2][16]: of each lane the sum of
// the digits that it multiplies, which times the zero point is what the codes give too much.
struct OneRow {
  int8_t *high, *low;
  int32_t *sums;
  float step;

  static int64_t CountBytes(int64_t inputs) { return 2 * inputs + inputs / kBlock * 2 * 64; }

  OneRow(const bf16 *x, const Weight &w, void *memory)
      : high((int8_t *)memory), low(high + w.inputs), sums((int32_t *)(low + w.inputs)) {
    auto load = [&](int64_t k) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + k))), 16));
    };
    __m512 most = _mm512_set1_ps(1e-30f), wrong = _mm512_setzero_ps();  // NaN if x has a NaN or an infinity
    for (int64_t k = 0; k < w.inputs; k += 16) {
      most = _mm512_max_ps(most, _mm512_abs_ps(load(k)));
      wrong = _mm512_fmadd_ps(load(k), _mm512_setzero_ps(), wrong);
    }
    step = _mm512_reduce_max_ps(most) / kMost + _mm512_reduce_add_ps(wrong);
    const __m512 scale = _mm512_set1_ps(1 / step);
    for (int64_t k = 0; k < w.inputs; k += 16) {
      const __m512 number = _mm512_mul_ps(load(k), scale);
      const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(number, _mm512_set1_ps(1.f / kDigit)));
      const __m512i second = _mm512_cvtps_epi32(_mm512_fnmadd_ps(_mm512_cvtepi32_ps(first), _mm512_set1_ps(kDigit), number));
      // 128 codes unpack to every other 16 inputs in the low nibbles, then to the rest
      const int64_t part = k / 16 % 8, at = k - part * 16 + part / 2 * 16 + part % 2 * 64;
      _mm_store_si128((__m128i *)(high + at), _mm512_cvtepi32_epi8(first));
      _mm_store_si128((__m128i *)(low + at), _mm512_cvtsepi32_epi8(second));
    }
    for (int64_t begin = 0; begin < w.inputs; begin += kBlock)
      for (int digit = 0; digit < 2; digit++) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = begin; k < begin + kBlock; k += kCodes)
          sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_load_si512((digit ? low : high) + k));
        _mm512_store_si512(sums + (begin / kBlock * 2 + digit) * 16, sum);
      }
  }
};

// 128 * high + low as float32.
inline __m512 JoinDigits(__m512i high, __m512i low) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(kDigit), _mm512_cvtepi32_ps(low));
}

// The numbers of two groups of 64 inputs, each in half of the lanes.
inline __m512 Halves(float a, float b) { return _mm512_mask_mov_ps(_mm512_set1_ps(a), 0xff00, _mm512_set1_ps(b)); }
inline __m512i Halves(int a, int b) { return _mm512_mask_mov_epi32(_mm512_set1_epi32(a), 0xff00, _mm512_set1_epi32(b)); }

// The outputs [first, first + 4) -> out, 16 numbers apart.
inline void MultiplyFour(const Weight &w, const OneRow &x, int64_t first, float *out) {
  const __m512i mask = _mm512_set1_epi8(15);
  const int64_t groups = w.inputs / w.group, bytes = w.inputs / 2;
  __m512 totals[kTogether];
  for (int i = 0; i < kTogether; i++) totals[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < w.inputs; k += kBlock) {
    const __m512i a = _mm512_load_si512(x.high + k), b = _mm512_load_si512(x.high + k + kCodes);
    const __m512i c = _mm512_load_si512(x.low + k), d = _mm512_load_si512(x.low + k + kCodes);
    const __m512i high = _mm512_load_si512(x.sums + k / kBlock * 32), low = _mm512_load_si512(x.sums + k / kBlock * 32 + 16);
    const int64_t one = k / w.group, two = (k + kCodes) / w.group;
    for (int i = 0; i < kTogether; i++) {
      const uint8_t *from = w.codes + (first + i) * bytes + k / 2;
      _mm_prefetch((const char *)from + kTogether * bytes, _MM_HINT_T0);
      const int64_t at = (first + i) * groups;
      const __m512i zeros = w.zeros ? Halves((int)w.zeros[at + one], (int)w.zeros[at + two]) : _mm512_set1_epi32(8);
      __m512i sum = _mm512_sub_epi32(_mm512_setzero_si512(), w.zeros ? _mm512_mullo_epi32(high, zeros) : _mm512_slli_epi32(high, 3));
      __m512i rest = _mm512_sub_epi32(_mm512_setzero_si512(), w.zeros ? _mm512_mullo_epi32(low, zeros) : _mm512_slli_epi32(low, 3));
      const __m512i codes = _mm512_loadu_si512(from);
      const __m512i even = _mm512_and_si512(codes, mask), odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
      sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, even, a), odd, b);
      rest = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(rest, even, c), odd, d);
      totals[i] = _mm512_fmadd_ps(JoinDigits(sum, rest), Halves(w.scales[at + one], w.scales[at + two]), totals[i]);
    }
  }
  for (int i = 0; i < kTogether; i++) out[i * kTile] = _mm512_reduce_add_ps(totals[i]) * x.step;
}

// The outputs [first, first + 16) and [second, second + 16).
inline void MultiplyOne(const Weight &w, const OneRow &x, int64_t first, int64_t second, const Target &target) {
  alignas(64) float sums[2 * kTile * kTile] = {};  // of which `Write` keeps the first column
  for (int i = 0; i < kPair; i += kTogether)
    MultiplyFour(w, x, (i < kTile ? first : second - kTile) + i, sums + i * kTile);
  target.Write(w, sums, first, second, 0, 1);
}
