// The sums of panels by AVX2. Included by panels.cpp, whose types it uses.
//
// Codes become int16 and are multiplied with whole numbers of x in pairs. A register holds 4 outputs,
// of each the sums of both pairs of 4 inputs. Codes of int4 are unpacked to int8 first, less their
// zero points, once for all rows. For one row that costs too much: there they are multiplied with
// both digits of x, and pairs of products are added as int16, of which 32 inputs fit. A register
// then holds 8 outputs.

constexpr int64_t kExact = 512;  // inputs of int8 of which an int32 holds the sum
thread_local Scratch unpacked;

// How many rows are computed together.
template <bool is_int4, int panels>
constexpr int CountRows() {
  return 3;
}

// Whether rows are whole numbers instead of two digits.
inline bool UsesWhole(bool is_int4, int64_t rows) { return !is_int4 || rows > 1; }

// The block with codes of int4 unpacked to int8, less their zero points, where rows are whole numbers.
template <bool is_int4, int panels>
inline Block PrepareBlock(const Panels &w, const Digits &x, const Block &block) {
  if (!is_int4 || !x.is_whole) return block;
  const int64_t groups = w.inputs / w.group, bytes = w.inputs / 4 * kLine;
  uint8_t *memory = (uint8_t *)unpacked.Get(panels * bytes);
  const __m256i mask = _mm256_set1_epi8(15);
  for (int p = 0; p < panels; p++) {
    const uint8_t *from = block.codes + p * block.stride;
    uint8_t *to = memory + p * bytes;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t at = ((block.first + p * block.apart) * groups + g) * kLanes;
      const __m128i zeros = w.zeros ? _mm_loadu_si128((const __m128i *)(w.zeros + at)) : _mm_set1_epi8(8);
      __m256i zero[2];  // of 8 outputs, four times each
      for (int half = 0; half < 2; half++) {
        const __m256i wide = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(zeros, 8) : zeros);
        zero[half] = _mm256_mullo_epi32(wide, _mm256_set1_epi32(0x01010101));
      }
      for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8, from += kLine, to += 2 * kLine) {
        _mm_prefetch((const char *)from + kAhead, _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
          const __m256i both = _mm256_loadu_si256((const __m256i *)from + half);
          _mm256_store_si256((__m256i *)to + half, _mm256_sub_epi8(_mm256_and_si256(both, mask), zero[half]));
          _mm256_store_si256((__m256i *)(to + kLine) + half, _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(both, 4), mask), zero[half]));
        }
      }
    }
  }
  return {block.first, block.apart, memory, bytes};
}

// Adds sums times scales, outputs 4 q to 4 q + 3 in register q, in the order of the outputs.
inline ALWAYS void AddSums(const __m256i sums[4], const float *scales, float *totals) {
  for (int half = 0; half < 2; half++) {
    const __m256i eight = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[2 * half], sums[2 * half + 1]), 0xd8);
    float *to = totals + 8 * half;
    _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(eight), _mm256_loadu_ps(scales + 8 * half), _mm256_load_ps(to)));
  }
}

template <int rows>
inline void SumWhole(const Panels &w, const Digits &x, int64_t row, const uint8_t *codes, int64_t panel, float (*totals)[kLanes]) {
  const int16_t *numbers = (const int16_t *)(x.numbers + row * 2 * w.inputs);
  const int64_t group = w.is_int4 ? w.group : w.inputs, groups = w.inputs / group;
  for (int64_t begin = 0; begin < w.inputs;) {
    const int64_t g = begin / group, end = std::min(begin + kExact, (g + 1) * group);
    __m256i sums[rows][4];
    Repeat<rows>([&](auto r) ALWAYS { Repeat<4>([&](auto q) ALWAYS { sums[r][q] = _mm256_setzero_si256(); }); });
    for (int64_t k = begin; k < end; k += 4) {
      const uint8_t *line = codes + k / 4 * kLine;
      _mm_prefetch((const char *)line + kAhead, _MM_HINT_T0);
      Repeat<4>([&](auto q) ALWAYS {
        const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(line + 16 * q)));
        Repeat<rows>([&](auto r) ALWAYS {
          int64_t four;
          memcpy(&four, numbers + r * w.inputs + k, 8);
          sums[r][q] = _mm256_add_epi32(sums[r][q], _mm256_madd_epi16(words, _mm256_set1_epi64x(four)));
        });
      });
    }
    Repeat<rows>([&](auto r) ALWAYS { AddSums(sums[r], w.scales + (panel * groups + g) * kLanes, totals[r]); });
    begin = end;
  }
}

// `half`: which 8 outputs of the panel.
template <int rows>
inline void SumDigits(const Panels &w, const Digits &x, int64_t row, const uint8_t *codes, int64_t panel, int half, float (*totals)[kLanes]) {
  const int64_t groups = w.inputs / w.group;
  const int8_t *numbers = x.numbers + row * 2 * w.inputs;
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), digit = _mm256_set1_epi16(kDigit);
  for (int64_t g = 0; g < groups; g++) {
    __m256i sums[rows];
    Repeat<rows>([&](auto r) ALWAYS { sums[r] = _mm256_setzero_si256(); });
    for (int64_t begin = g * w.group; begin < (g + 1) * w.group; begin += 32) {
      __m256i high[rows], low[rows];
      Repeat<rows>([&](auto r) ALWAYS { high[r] = low[r] = _mm256_setzero_si256(); });
      Repeat<4>([&](auto i) ALWAYS {
        const int64_t k = begin + 8 * i;
        const uint8_t *line = codes + k / 8 * kLine + 32 * half;
        _mm_prefetch((const char *)line + kAhead, _MM_HINT_T0);
        const __m256i both = _mm256_loadu_si256((const __m256i *)line);
        const __m256i first = _mm256_and_si256(both, mask), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        Repeat<rows>([&](auto r) ALWAYS {
          int32_t four[4];  // both digits of the inputs of `first`, then of `second`
          memcpy(four, numbers + r * 2 * w.inputs + 2 * k, 16);
          high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(first, _mm256_set1_epi32(four[0])));
          low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(first, _mm256_set1_epi32(four[1])));
          high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(second, _mm256_set1_epi32(four[2])));
          low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(second, _mm256_set1_epi32(four[3])));
        });
      });
      Repeat<rows>([&](auto r) ALWAYS {
        const __m256i part = _mm256_add_epi32(_mm256_madd_epi16(high[r], digit), _mm256_madd_epi16(low[r], ones));
        sums[r] = _mm256_add_epi32(sums[r], part);
      });
    }
    const int64_t at = (panel * groups + g) * kLanes + 8 * half;
    const __m256 scale = _mm256_loadu_ps(w.scales + at);
    __m256 zero = _mm256_set1_ps(8);
    if (w.zeros) zero = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w.zeros + at))));
    Repeat<rows>([&](auto r) ALWAYS {
      const __m256 number = _mm256_fnmadd_ps(zero, _mm256_set1_ps(x.sums[(row + r) * groups + g]), _mm256_cvtepi32_ps(sums[r]));
      float *to = totals[r] + 8 * half;
      _mm256_store_ps(to, _mm256_fmadd_ps(number, scale, _mm256_load_ps(to)));
    });
  }
}

// Rows from `row` on times the panels of a block, without the steps of the rows.
template <bool is_int4, int rows, int panels>
inline void SumPanels(const Panels &w, const Digits &x, int64_t row, const Block &block, float (*totals)[panels][kLanes]) {
  for (int p = 0; p < panels; p++) {
    const uint8_t *codes = block.codes + p * block.stride;
    const int64_t panel = block.first + p * block.apart;
    alignas(64) float sums[rows][kLanes] = {};
    if (x.is_whole)
      SumWhole<rows>(w, x, row, codes, panel, sums);
    else
      for (int half = 0; half < 2; half++) SumDigits<rows>(w, x, row, codes, panel, half, sums);
    for (int r = 0; r < rows; r++) std::copy(sums[r], sums[r] + kLanes, totals[r][p]);
  }
}
