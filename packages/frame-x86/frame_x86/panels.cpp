// Products of bfloat16 rows with int8 and int4 weights by AVX-512 VNNI or AVX2, without AMX: out = x * W^T.
//
// Weights are packed once (`pack_panels` in kernel.py). A panel has 16 outputs. 64 bytes of it hold
// the codes of 4 inputs of each output, of int8 for VNNI with 128 added, or of 8 inputs: of int4 the
// first four are in the low nibbles.
//
// Rows of x become fixed-point numbers of two int8 digits, 128 * high + low, with one scale per row,
// which keep what bfloat16 resolves. AVX2 multiplies most weights with the whole numbers as int16.

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
  bool is_whole;
  int8_t *numbers;  // [rows, inputs / 4, digit, 4]; or `is_whole`: int16 [rows, inputs]
  int32_t *starts;  // int8 [rows, digit]: what a sum begins with, because codes have 128 added
  float *sums;      // int4 [rows, groups], of the numbers, which the zero point multiplies
  float *steps;     // [rows], what 1 stands for
};

thread_local Scratch memory;

void SplitRow(const Panels &w, const bf16 *x, const Digits &to, int64_t row) {
  to.steps[row] = FindStep(x, w.inputs);
  const F16 scale = Spread(1 / to.steps[row]);
  int8_t *numbers = to.numbers + row * 2 * w.inputs;
  float *sums = to.sums + row * (w.inputs / w.group);
  I16 high_total = ZeroInts(), low_total = ZeroInts();
  for (int64_t k = 0; k < w.inputs; k += 16) {
    I16 high, low;
    Split(x + k, scale, &high, &low);
    if (to.is_whole) {
      _mm256_storeu_si256((__m256i *)(numbers + 2 * k), Narrow16(Add(Shift7(high), low)));
      continue;
    }
    const __m128i a = Narrow8(high), b = Narrow8(low);
    _mm_store_si128((__m128i *)(numbers + 2 * k), _mm_unpacklo_epi32(a, b));
    _mm_store_si128((__m128i *)(numbers + 2 * k + 16), _mm_unpackhi_epi32(a, b));
    alignas(16) int8_t narrowed[16];
    _mm_store_si128((__m128i *)narrowed, b);
    high_total = Add(high_total, high);
    low_total = Add(low_total, Widen8(narrowed));
    if (!w.is_int4 || (k + 16) % w.group) continue;
    *sums++ = (float)Sum(Add(Shift7(high_total), low_total));
    high_total = low_total = ZeroInts();
  }
  to.starts[2 * row] = -kDigit * Sum(high_total);
  to.starts[2 * row + 1] = -kDigit * Sum(low_total);
}

// Panels that are computed together, `apart` from each other from `first` on. Memory is read faster
// from places far apart.
struct Block {
  int64_t first, apart;
  const uint8_t *codes;  // of the first panel
  int64_t stride;        // bytes from a panel to the next
};

#if defined(__AVX512F__)
#include "panels_avx512.h"
#else
#include "panels_avx2.h"
#endif

// Rows from `row` on times the panels of a block.
template <bool is_int4, int rows, int panels>
void MultiplyPanels(const Panels &w, const Digits &x, int64_t row, const Block &block, const Target &target) {
  alignas(64) float totals[rows][panels][kLanes];
  SumPanels<is_int4, rows, panels>(w, x, row, block, totals);
  constexpr int kHalf = panels / 2;  // of a gated product: the first half of the panels are gates
  for (int r = 0; r < rows; r++) {
    const F16 step = Spread(x.steps[row + r]);
    for (int p = 0; p < (target.gated ? kHalf : panels); p++) {
      F16 value = Multiply(Load(totals[r][p]), step);
      if (target.gated) value = Multiply(Silu(value), Multiply(Load(totals[r][p + kHalf]), step));
      StoreNumbers(target.out + (row + r) * target.stride + (block.first + p * block.apart) * kLanes, value);
    }
  }
}

// Any number of rows times the panels of a block, in equal parts of as many rows as the registers take.
template <bool is_int4, int panels>
void MultiplyRows(const Panels &w, const Digits &x, int64_t rows, const Block &block, const Target &target) {
  constexpr int kMost = CountRows<is_int4, panels>();
  const int64_t parts = (rows + kMost - 1) / kMost;
  const Block prepared = PrepareBlock<is_int4, panels>(w, x, block);
  for (int64_t part = 0; part < parts; part++) {
    const int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    Repeat<kMost>([&](auto i) ALWAYS {
      if (count == i + 1) MultiplyPanels<is_int4, i + 1, panels>(w, x, row, prepared, target);
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
  digits.is_whole = UsesWhole(w.is_int4, rows);
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
