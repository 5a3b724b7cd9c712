// The sums of panels by AVX-512 VNNI: an instruction adds 4 inputs of 16 outputs, a lane each.
// Included by panels.cpp, whose types it uses.

// sums + products of 4 unsigned codes and 4 signed numbers in each lane. GCC 12 copies the sums
// where the intrinsic is used.
inline ALWAYS void AddFour(__m512i &sums, __m512i codes, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x)); }

inline ALWAYS __m512i SpreadFour(const int8_t *x) {
  int four;
  memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

inline ALWAYS __m512i TakeLow(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline ALWAYS __m512i TakeHigh(__m512i both) { return TakeLow(_mm512_srli_epi16(both, 4)); }

// How many rows are computed with so many panels: 6, or 3 of 4 panels.
template <bool is_int4, int panels>
constexpr int CountRows() {
  return 12 / panels;
}

// Whether rows are whole numbers instead of two digits.
inline bool UsesWhole(bool, int64_t) { return false; }

template <bool is_int4, int panels>
inline Block PrepareBlock(const Panels &, const Digits &, const Block &block) {
  return block;
}

// Rows from `row` on times the panels of a block, without the steps of the rows.
template <bool is_int4, int rows, int panels>
inline void SumPanels(const Panels &w, const Digits &x, int64_t row, const Block &block, float (*totals)[panels][kLanes]) {
  constexpr int kInputs = is_int4 ? 8 : 4;  // of a line
  const int64_t groups = is_int4 ? w.inputs / w.group : 1, size = is_int4 ? w.group : w.inputs;
  const int8_t *numbers = x.numbers + row * 2 * w.inputs;
  for (int64_t g = 0; g < groups; g++) {
    __m512i high[rows][panels], low[rows][panels];
    Repeat<rows>([&](auto r) ALWAYS {
      const int32_t *starts = x.starts + 2 * (row + r);
      Repeat<panels>([&](auto p) ALWAYS {
        high[r][p] = is_int4 ? _mm512_setzero_si512() : _mm512_set1_epi32(starts[0]);
        low[r][p] = is_int4 ? _mm512_setzero_si512() : _mm512_set1_epi32(starts[1]);
      });
    });
    auto add = [&](const __m512i *codes, int64_t k) ALWAYS {
      Repeat<rows>([&](auto r) ALWAYS {
        const int8_t *both = numbers + r * 2 * w.inputs + 2 * k;
        const __m512i a = SpreadFour(both), b = SpreadFour(both + 4);
        Repeat<panels>([&](auto p) ALWAYS {
          AddFour(high[r][p], codes[p], a);
          AddFour(low[r][p], codes[p], b);
        });
      });
    };
    for (int64_t k = g * size; k < (g + 1) * size; k += kInputs) {
      __m512i codes[panels], odd[panels];
      Repeat<panels>([&](auto p) ALWAYS {
        const uint8_t *from = block.codes + p * block.stride + k / kInputs * kLine;
        _mm_prefetch((const char *)from + kAhead, _MM_HINT_T0);
        codes[p] = _mm512_loadu_si512(from);
        if (is_int4) odd[p] = TakeHigh(codes[p]), codes[p] = TakeLow(codes[p]);
      });
      add(codes, k);
      if (is_int4) add(odd, k + 4);
    }
    Repeat<panels>([&](auto p) ALWAYS {
      const int64_t at = ((block.first + p * block.apart) * groups + g) * kLanes;
      const __m512 scale = _mm512_loadu_ps(w.scales + at);
      if (is_int4) _mm_prefetch((const char *)(w.scales + at) + kAhead / 4, _MM_HINT_T0);
      __m512 zero = _mm512_set1_ps(8);
      if (is_int4 && w.zeros) zero = ToFloat(Widen8(w.zeros + at));
      Repeat<rows>([&](auto r) ALWAYS {
        __m512 total;
        if constexpr (is_int4) {
          const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][p], 7), low[r][p]));
          const __m512 number = _mm512_fnmadd_ps(zero, _mm512_set1_ps(x.sums[(row + r) * groups + g]), sum);
          total = g ? _mm512_fmadd_ps(number, scale, _mm512_load_ps(totals[r][p])) : _mm512_mul_ps(number, scale);
        } else {
          total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r][p]), _mm512_set1_ps(kDigit), _mm512_cvtepi32_ps(low[r][p]));
          total = _mm512_mul_ps(total, scale);
        }
        _mm512_store_ps(totals[r][p], total);
      });
    });
  }
}
