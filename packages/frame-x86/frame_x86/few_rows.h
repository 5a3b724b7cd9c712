// The product of one row with a quantized weight, by dot products in registers, without tiles, of
// kStreams outputs at once (streams.h). Included by products.cpp, whose types it uses.

constexpr int kBlock = 128;   // inputs of a register of int4 codes

// A row as fixed-point numbers of two digits. `sums`: int8 [2][16], what each lane of a digit begins
// with, because codes are multiplied with 128 added; int4 [groups], the sums of the numbers as
// float32, which times zero point and scale is what the codes give too much.
struct OneRow {
  int8_t *high, *low;
  void *sums;
  float step;

  static int64_t CountBytes(const Weight &w) { return 2 * w.inputs + std::max<int64_t>(128, w.inputs / w.group * 4); }

  OneRow(const bf16 *x, const Weight &w, void *memory)
      : high((int8_t *)memory), low(high + w.inputs), sums(low + w.inputs) {
    step = FindStep(x, w.inputs);
    const __m512 scale = _mm512_set1_ps(1 / step);
    __m512i total = _mm512_setzero_si512();
    for (int64_t k = 0; k < w.inputs; k += 16) {
      __m512i first, second;
      Split(x + k, scale, &first, &second);
      // 128 codes of int4 unpack to every other 16 inputs in the low nibbles, then to the rest
      const int64_t part = k / 16 % 8, at = w.kind == kInt8 ? k : k - part * 16 + part / 2 * 16 + part % 2 * 64;
      _mm_store_si128((__m128i *)(high + at), _mm512_cvtepi32_epi8(first));
      _mm_store_si128((__m128i *)(low + at), _mm512_cvtsepi32_epi8(second));
      if (w.kind == kInt8) continue;
      total = _mm512_add_epi32(total, _mm512_add_epi32(_mm512_slli_epi32(first, 7), second));
      if ((k + 16) % w.group) continue;
      ((float *)sums)[k / w.group] = (float)_mm512_reduce_add_epi32(total);
      total = _mm512_setzero_si512();
    }
    if (w.kind != kInt8) return;
    for (const int8_t *digit : {high, low}) {
      __m512i sum = _mm512_setzero_si512();
      for (int64_t k = 0; k < w.inputs; k += kCodes)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), _mm512_load_si512(digit + k));
      _mm512_store_si512((int32_t *)sums + (digit == low) * 16, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
  }
};

inline ALWAYS __m512i LoadAhead(const uint8_t *from) {
  _mm_prefetch((const char *)from + kAhead, _MM_HINT_T0);
  return _mm512_loadu_si512(from);
}

// The sums of kStreams outputs, `apart` from each other, in the lanes of a register each.
template <int kind>
inline void SumCodes(const Weight &w, const OneRow &row, int64_t first, int64_t apart, __m512 totals[kStreams]) {
  const uint8_t *codes = w.codes + first * w.RowBytes();
  const int64_t stride = apart * w.RowBytes();
  auto load = [&](int i, int64_t at) { return LoadAhead(codes + i * stride + at); };
  if constexpr (kind == kInt8) {
    __m512i high[kStreams], low[kStreams];
    for (int i = 0; i < kStreams; i++) high[i] = _mm512_load_si512(row.sums), low[i] = _mm512_load_si512((int32_t *)row.sums + 16);
    for (int64_t k = 0; k < w.inputs; k += kCodes) {
      const __m512i a = _mm512_load_si512(row.high + k), b = _mm512_load_si512(row.low + k);
      for (int i = 0; i < kStreams; i++) {
        const __m512i numbers = _mm512_xor_si512(load(i, k), _mm512_set1_epi8(-128));
        high[i] = _mm512_dpbusd_epi32(high[i], numbers, a);
        low[i] = _mm512_dpbusd_epi32(low[i], numbers, b);
      }
    }
    for (int i = 0; i < kStreams; i++)
      totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[i]), _mm512_set1_ps(kDigit), _mm512_cvtepi32_ps(low[i]));
  } else {
    const __m512i mask = _mm512_set1_epi8(15);
    const int64_t groups = w.inputs / w.group;
    for (int i = 0; i < kStreams; i++) totals[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w.inputs; k += kBlock) {
      const __m512i a = _mm512_load_si512(row.high + k), b = _mm512_load_si512(row.high + k + kCodes);
      const __m512i c = _mm512_load_si512(row.low + k), d = _mm512_load_si512(row.low + k + kCodes);
      const float *scales = w.scales + first * groups + k / w.group;
      const int64_t next = (k + kCodes) / w.group - k / w.group;
      for (int i = 0; i < kStreams; i++) {
        const __m512i both = load(i, k / 2);
        const __m512i even = _mm512_and_si512(both, mask), odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        const __m512i high = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), even, a), odd, b);
        const __m512i low = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_slli_epi32(high, 7), even, c), odd, d);
        const float *scale = scales + i * apart * groups;  // each of half of the lanes
        const __m512 factor = _mm512_mask_mov_ps(_mm512_set1_ps(scale[0]), 0xff00, _mm512_set1_ps(scale[next]));
        totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), factor, totals[i]);
      }
    }
    for (int64_t g = 0; g < groups; g += 16) {
      const __mmask16 valid = groups - g < 16 ? (1u << (groups - g)) - 1 : 0xffff;
      const __m512 sums = _mm512_maskz_loadu_ps(valid, (const float *)row.sums + g);
      for (int i = 0; i < kStreams; i++) {
        const int64_t at = (first + i * apart) * groups + g;
        const __m512 zeros = w.zeros ? _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(valid, w.zeros + at))) : _mm512_set1_ps(8);
        totals[i] = _mm512_fnmadd_ps(_mm512_mul_ps(zeros, sums), _mm512_maskz_loadu_ps(valid, w.scales + at), totals[i]);
      }
    }
  }
}

template <int kind>
void RunOne(const Weight &w, const bf16 *x, const Target &target, int threads) {
  const OneRow row(x, w, packed_rows.Get(OneRow::CountBytes(w)));
  const int64_t apart = w.outputs / kStreams;
#pragma omp parallel for num_threads(threads) schedule(dynamic, std::max<int64_t>(1, apart / (threads * 8)))
  for (int64_t first = 0; first < apart; first++) {
    __m512 totals[kStreams];
    SumCodes<kind>(w, row, first, apart, totals);
    float sums[kStreams];
    for (int i = 0; i < kStreams; i++) sums[i] = Sum(totals[i]) * (kind == kInt8 ? row.step * w.scales[first + i * apart] : row.step);
    WriteStreams(sums, first, apart, target.gated, target.out);
  }
}
