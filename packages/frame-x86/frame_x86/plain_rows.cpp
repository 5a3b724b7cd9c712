// The product of a few rows with a plain weight. It reads kStreams outputs at once from places far
// apart: a core then has more of memory under way than with one place, because its prefetcher
// follows each place. Also keeps the calls of a thread (recording.h).

#include "plain_rows.h"

#include <omp.h>

#include <algorithm>

#include "common.h"
#include "recording.h"
#include "streams.h"

namespace {

constexpr int kMostRows = 3;  // of which the sums are in registers

// The sums of `streams` outputs, `apart` from each other, for some rows.
template <int rows, int streams>
inline void SumPlain(const bf16 *codes, int64_t apart, int64_t inputs, const bf16 *x, int64_t x_stride, float (*totals)[kStreams]) {
  Register sums[rows][streams];
  Repeat<rows>([&](auto r) ALWAYS { Repeat<streams>([&](auto i) ALWAYS { sums[r][i] = ZeroRegister(); }); });
  for (int64_t k = 0; k < inputs; k += kPairs) {
#if defined(__AVX512BF16__)
    __m512i row[rows];
    Repeat<rows>([&](auto r) ALWAYS { row[r] = _mm512_loadu_si512(x + r * x_stride + k); });
    Repeat<streams>([&](auto i) ALWAYS {
      const bf16 *from = codes + i * apart + k;
      _mm_prefetch((const char *)from + kAhead, _MM_HINT_T0);
      const __m512i numbers = _mm512_loadu_si512(from);
      Repeat<rows>([&](auto r) ALWAYS { asm("vdpbf16ps %2, %1, %0" : "+v"(sums[r][i]) : "v"(numbers), "v"(row[r])); });
    });
#else
    Register x_even[rows], x_odd[rows];
    Repeat<rows>([&](auto r) ALWAYS { LoadPairs(x + r * x_stride + k, &x_even[r], &x_odd[r]); });
    Repeat<streams>([&](auto i) ALWAYS {
      const bf16 *from = codes + i * apart + k;
      _mm_prefetch((const char *)from + kAhead, _MM_HINT_T0);
      Register even, odd;
      LoadPairs(from, &even, &odd);
      Repeat<rows>([&](auto r) ALWAYS { sums[r][i] = MultiplyAddRegister(odd, x_odd[r], MultiplyAddRegister(even, x_even[r], sums[r][i])); });
    });
#endif
  }
  Repeat<rows>([&](auto r) ALWAYS { Repeat<streams>([&](auto i) ALWAYS { totals[r][i] = SumRegister(sums[r][i]); }); });
}

// As many outputs at once as the registers take with these rows.
template <int rows>
inline void SumStreams(const bf16 *codes, int64_t apart, int64_t inputs, const bf16 *x, int64_t x_stride, float (*totals)[kStreams]) {
  constexpr int kTogether = kRegister == 16 || rows == 1 ? kStreams : kStreams / 2;
  for (int i = 0; i < kStreams; i += kTogether) {
    float part[rows][kStreams];
    SumPlain<rows, kTogether>(codes + i * apart, apart, inputs, x, x_stride, part);
    for (int r = 0; r < rows; r++) std::copy(part[r], part[r] + kTogether, totals[r] + i);
  }
}

}  // namespace

void MultiplyPlainRows(int64_t outputs, int64_t inputs, const bf16 *codes, const bf16 *x, int64_t rows, int64_t stride, bf16 *out,
                       bool gated, int threads) {
  constexpr decltype(&SumStreams<1>) kFunctions[] = {nullptr, SumStreams<1>, SumStreams<2>, SumStreams<3>};
  const int64_t apart = outputs / kStreams, width = gated ? outputs / 2 : outputs, parts = (rows + kMostRows - 1) / kMostRows;
#pragma omp parallel for num_threads(threads) schedule(dynamic, std::max<int64_t>(1, apart / (threads * 8)))
  for (int64_t first = 0; first < apart; first++)
    for (int64_t part = 0; part < parts; part++) {
      const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
      float totals[kMostRows][kStreams];
      kFunctions[end - begin](codes + first * inputs, apart * inputs, inputs, x + begin * stride, stride, totals);
      for (int64_t r = begin; r < end; r++) WriteStreams(totals[r - begin], first, apart, gated, out + r * width);
    }
}

extern "C" {

// As `frame_x86_multiply`, of a plain weight, for few rows.
void frame_x86_multiply_few(int, int64_t outputs, int64_t inputs, int64_t, const void *codes, const float *, const int8_t *,
                            const void *x, int64_t rows, int64_t stride, void *out, int gated, int threads) {
  RunCall([=] { MultiplyPlainRows(outputs, inputs, (const bf16 *)codes, (const bf16 *)x, rows, stride, (bf16 *)out, gated != 0, threads); });
}

// The calls of this thread between `begin` and `end` are kept in what `end` returns. `free` it.
void frame_x86_begin() { recording = new Recording; }

void *frame_x86_end() { return std::exchange(recording, nullptr); }

void frame_x86_replay(const void *calls) {
  for (const auto &call : *(const Recording *)calls) call();
}

void frame_x86_free(void *calls) { delete (Recording *)calls; }

}  // extern "C"
