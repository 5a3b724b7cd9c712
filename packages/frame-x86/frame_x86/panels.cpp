// Products of bfloat16 rows with int8 and int4 weights by AVX-512 VNNI, without AMX: out = x * W^T.
//
// Weights are packed once (`pack_panels` in kernel.py). A panel has 16 outputs, a lane of a register
// each. 64 bytes of it hold the codes of 4 inputs of each output, int8 with 128 added, or of 8
// inputs: of int4 the first four are in the low nibbles. An instruction adds 4 inputs of 16 outputs.
//
// Rows of x become fixed-point numbers of two int8 digits, 128 * high + low, with one scale per row,
// which keep what bfloat16 resolves.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "recording.h"

namespace {

constexpr int kLanes = 16;          // outputs of a panel
constexpr int kLine = 64;           // bytes that are loaded at once
constexpr int kAhead = 1024;        // bytes that are fetched ahead in each panel
constexpr int64_t kMostRows = 512;  // whose numbers are in memory at a time

struct Panels {
  bool is_int4;
  int64_t outputs, inputs, group;  // group: inputs of an int4 scale
  const uint8_t *codes;   // [outputs / 16, inputs / 4 or 8, 16, 4]
  const float *scales;    // int8 [outputs]; int4 [outputs / 16, groups, 16]
  const int8_t *zeros;    // int4, of the shape of the scales, or null for 8
};

// Where the results go: 16 outputs of a panel for some rows.
struct Target {
  bf16 *out;
  int64_t stride;
  bool gated;
};

// Rows of x as numbers of two digits.
struct Digits {
  int8_t *numbers;  // [rows, inputs / 4, digit, 4]
  int32_t *starts;  // int8 [rows, digit]: what a sum begins with, because codes have 128 added
  float *sums;      // int4 [rows, groups], of the numbers, which the zero point multiplies
  float *steps;     // [rows], what 1 stands for
};

thread_local Scratch memory;

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

void SplitRow(const Panels &w, const bf16 *x, const Digits &to, int64_t row) {
  to.steps[row] = FindStep(x, w.inputs);
  const __m512 scale = _mm512_set1_ps(1 / to.steps[row]);
  int8_t *numbers = to.numbers + row * 2 * w.inputs;
  float *sums = to.sums + row * (w.inputs / w.group);
  __m512i high_total = _mm512_setzero_si512(), low_total = _mm512_setzero_si512();
  for (int64_t k = 0; k < w.inputs; k += 16) {
    __m512i high, low;
    Split(x + k, scale, &high, &low);
    const __m128i a = _mm512_cvtepi32_epi8(high), b = _mm512_cvtsepi32_epi8(low);
    _mm_store_si128((__m128i *)(numbers + 2 * k), _mm_unpacklo_epi32(a, b));
    _mm_store_si128((__m128i *)(numbers + 2 * k + 16), _mm_unpackhi_epi32(a, b));
    high_total = _mm512_add_epi32(high_total, high);
    low_total = _mm512_add_epi32(low_total, _mm512_cvtepi8_epi32(b));
    if (!w.is_int4 || (k + 16) % w.group) continue;
    *sums++ = (float)_mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high_total, 7), low_total));
    high_total = low_total = _mm512_setzero_si512();
  }
  to.starts[2 * row] = -kDigit * _mm512_reduce_add_epi32(high_total);
  to.starts[2 * row + 1] = -kDigit * _mm512_reduce_add_epi32(low_total);
}

// Panels that are computed together, `apart` from each other from `first` on. Memory is read faster
// from places far apart.
struct Block {
  int64_t first, apart;
  const uint8_t *codes;  // of the first panel
  int64_t stride;        // bytes from a panel to the next
};

// Rows from `row` on times the panels of a block.
template <bool is_int4, int rows, int panels>
void MultiplyPanels(const Panels &w, const Digits &x, int64_t row, const Block &block, const Target &target) {
  constexpr int kInputs = is_int4 ? 8 : 4;  // of a line
  const int64_t groups = is_int4 ? w.inputs / w.group : 1, size = is_int4 ? w.group : w.inputs;
  const int8_t *numbers = x.numbers + row * 2 * w.inputs;
  alignas(64) float totals[rows][panels][kLanes];
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
      if (is_int4 && w.zeros) zero = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w.zeros + at))));
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
  constexpr int kHalf = panels / 2;  // of a gated product: the first half of the panels are gates
  for (int r = 0; r < rows; r++) {
    const __m512 step = _mm512_set1_ps(x.steps[row + r]);
    for (int p = 0; p < (target.gated ? kHalf : panels); p++) {
      __m512 value = _mm512_mul_ps(_mm512_load_ps(totals[r][p]), step);
      if (target.gated) value = _mm512_mul_ps(Silu(value), _mm512_mul_ps(_mm512_load_ps(totals[r][p + kHalf]), step));
      bf16 *to = target.out + (row + r) * target.stride + (block.first + p * block.apart) * kLanes;
      _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(value));
    }
  }
}

// Any number of rows times the panels of a block, in equal parts of at most 6 rows, or 3 of 4 panels.
template <bool is_int4, int panels>
void MultiplyRows(const Panels &w, const Digits &x, int64_t rows, const Block &block, const Target &target) {
  constexpr int kMost = 12 / panels;
  const int64_t parts = (rows + kMost - 1) / kMost;
  for (int64_t part = 0; part < parts; part++) {
    const int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    Repeat<kMost>([&](auto i) ALWAYS {
      if (count == i + 1) MultiplyPanels<is_int4, i + 1, panels>(w, x, row, block, target);
    });
  }
}

template <bool is_int4, int panels>
void Run(const Panels &w, const Digits &x, int64_t rows, const Target &target, int threads) {
  const int64_t blocks = w.outputs / kLanes / panels, bytes = w.inputs / (is_int4 ? 8 : 4) * kLine;
#pragma omp for schedule(dynamic, std::max<int64_t>(1, blocks / (threads * 8)))
  for (int64_t first = 0; first < blocks; first++) {
    MultiplyRows<is_int4, panels>(w, x, rows, {first, blocks, w.codes + first * bytes, blocks * bytes}, target);
  }
}

void Multiply(const Panels &w, const bf16 *x, int64_t rows, int64_t stride, const Target &target, int threads) {
  const int64_t most = std::min(rows, kMostRows), groups = w.is_int4 ? w.inputs / w.group : 1, panels = w.outputs / kLanes;
  char *at = (char *)memory.Get(most * (2 * w.inputs + 8 + 4 + 4 * groups));
  Digits digits;
  digits.numbers = (int8_t *)at, at += most * 2 * w.inputs;
  digits.starts = (int32_t *)at, at += most * 8;
  digits.steps = (float *)at, at += most * 4;
  digits.sums = (float *)at;
#pragma omp parallel num_threads(threads)
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    const Target part{target.out + row * target.stride, target.stride, target.gated};
#pragma omp for
    for (int64_t r = 0; r < count; r++) SplitRow(w, x + (row + r) * stride, digits, r);
    if (count == 1 && panels % 8 == 0)
      (w.is_int4 ? Run<true, 8> : Run<false, 8>)(w, digits, count, part, threads);
    else if (count <= 3 && panels % 4 == 0)
      (w.is_int4 ? Run<true, 4> : Run<false, 4>)(w, digits, count, part, threads);
    else
      (w.is_int4 ? Run<true, 2> : Run<false, 2>)(w, digits, count, part, threads);
  }
}

}  // namespace

// As `frame_x86_multiply`, of packed weights. outputs: a multiple of 32; inputs and group: of 16.
extern "C" void frame_x86_multiply_panels(int kind, int64_t outputs, int64_t inputs, int64_t group, const void *codes, const float *scales,
                                          const int8_t *zeros, const void *x, int64_t rows, int64_t stride, void *out, int gated, int threads) {
  RunCall([=] {
    const Panels w{kind == kInt4, outputs, inputs, group, (const uint8_t *)codes, scales, zeros};
    const Target target{(bf16 *)out, gated ? outputs / 2 : outputs, gated != 0};
    Multiply(w, (const bf16 *)x, rows, stride, target, threads);
  });
}
