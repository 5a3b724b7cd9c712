// Products of bfloat16 rows with bfloat16, int8 and int4 weights by AMX tiles: out = x * W^T.
//
// The weights stay in frame's canonical form, row by row, and are read once: a tile of outputs by
// inputs is the first operand, and up to 16 rows of x are the columns of the second. Tiles of plain
// weights are loaded from the weight itself. Quantized weights are multiplied as integers for few
// rows, with x as fixed-point numbers of two int8 digits; int4 codes are unpacked to int8 for that.
// For many rows, two tiles of outputs become bfloat16 at a time. Few rows need no tiles (few_rows.h).

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common.h"
#include "plain_rows.h"
#include "recording.h"
#include "streams.h"

namespace {

constexpr int kTile = 16;    // outputs, and rows of x, of a tile
constexpr int kStep = 32;    // inputs of a tile
constexpr int kPair = 2 * kTile;  // outputs of a block: two tiles, which hide each other's latency
constexpr int kFewRows = 64;  // up to which int8 is multiplied as integers; int4 up to half of them
constexpr int kCodes = 64;    // inputs of a tile of int8
constexpr int kTileBytes = 1024;
constexpr int64_t kPackedBytes = 1 << 20;  // of x in tiles: half of the second-level cache

struct Weight {
  int kind;
  int64_t outputs, inputs, group;  // group: inputs of an int4 scale
  const uint8_t *codes;
  const float *scales;   // int8 [outputs], int4 [outputs, inputs / group]
  const int8_t *zeros;  // int4, of the shape of the scales, or null for 8
  int64_t RowBytes() const { return kind == kPlain ? 2 * inputs : kind == kInt8 ? inputs : inputs / 2; }
};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr TileConfig kConfig;  // a constant: the compiler may drop stores that only the instruction reads

thread_local Scratch packed_rows, panel;

// Transposes 16 x 16 numbers of 32 bits.
inline void Transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Up to 16 rows of x -> tiles [inputs / 32][16 pairs of inputs][16 rows], absent rows zero.
void PackRows(const bf16 *x, int64_t stride, int rows, int64_t inputs, bf16 *out) {
  for (int64_t k = 0; k < inputs; k += kStep, out += kTile * kStep) {
    if (rows == 1) {
      for (int i = 0; i < kTile; i++) {
        int pair;
        memcpy(&pair, x + k + 2 * i, 4);
        _mm512_store_si512(out + i * kStep, _mm512_zextsi128_si512(_mm_cvtsi32_si128(pair)));
      }
      continue;
    }
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_loadu_si512(x + i * stride + k) : _mm512_setzero_si512();
    Transpose(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * kStep, r[i]);
  }
}

inline __m512i ToBf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// 16 outputs from `output` on of a quantized weight -> tiles [inputs / 32][16][32], 2 * 16 * 32
// numbers apart. Codes of int8 stay without their scale.
template <int kind>
void Unpack(const Weight &w, int64_t output, bf16 *out) {
  const __m512 iota = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const int64_t steps = w.inputs / kStep, group = kind == kInt4 ? w.group / kStep : steps;
  for (int i = 0; i < kTile; i++) {
    const uint8_t *row = w.codes + (output + i) * w.RowBytes();
    if constexpr (kind == kInt8) {
      for (int64_t k = 0; k < steps; k++) {
        const __m128i *from = (const __m128i *)(row + k * kStep);
        _mm512_store_si512(out + k * kPair * kStep + i * kStep,
                           ToBf16(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))),
                                  _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)))));
      }
    } else {
      const int64_t groups = w.inputs / w.group;
      const float *scale = w.scales + (output + i) * groups;
      const int8_t *zero = w.zeros + (output + i) * groups;
      for (int64_t begin = 0; begin < steps; begin += group, scale++, zero++) {
        // the 16 numbers that codes of this group stand for, twice
        const __m512 from = _mm512_sub_ps(iota, _mm512_set1_ps(w.zeros ? *zero : 8));
        const __m512 values = _mm512_mul_ps(from, _mm512_set1_ps(*scale));
        const __m512i table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
        const int64_t end = std::min(begin + group, steps);
        for (int64_t k = begin; k < end; k++) {  // 16 bytes hold 32 codes, the first half in the low nibbles
          const __m128i bytes = _mm_loadu_si128((const __m128i *)(row + k * kStep / 2));
          const __m512i words = _mm512_srlv_epi16(_mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes)), shifts);
          _mm512_store_si512(out + k * kPair * kStep + i * kStep, _mm512_permutexvar_epi16(words, table));
        }
      }
    }
  }
}

// Fetches what a tile of inputs `first` to `last` takes of memory, from the 16 outputs at `output`.
inline void Prefetch(const Weight &w, int64_t output, int64_t first, int64_t last) {
  if (output + kTile > w.outputs) return;
  const int64_t bytes = w.RowBytes(), from = first * bytes / w.inputs, to = last * bytes / w.inputs;
  for (int i = 0; i < kTile; i++)
    for (int64_t at = from; at < to; at += 64) _mm_prefetch((const char *)(w.codes + (output + i) * bytes + at), _MM_HINT_T0);
}

// Where the sums of a block go: 16 outputs from `first` and 16 from `second` on for some rows.
struct Target {
  bf16 *out;
  int64_t stride;
  bool gated;

  Target From(int64_t row) const { return {out + row * stride, stride, gated}; }

  // sums [2][16 outputs][16 rows]
  void Write(const Weight &w, const float *sums, int64_t first, int64_t second, int64_t row, int rows) const {
    __m512i a[16], b[16];
    for (int i = 0; i < kTile; i++) {
      __m512 p = _mm512_load_ps(sums + i * kTile), q = _mm512_load_ps(sums + (kTile + i) * kTile);
      if (w.kind == kInt8) {
        p = _mm512_mul_ps(p, _mm512_set1_ps(w.scales[first + i]));
        q = _mm512_mul_ps(q, _mm512_set1_ps(w.scales[second + i]));
      }
      a[i] = (__m512i)(gated ? _mm512_mul_ps(Silu(p), q) : p);
      b[i] = (__m512i)q;
    }
    Transpose(a);
    if (!gated) Transpose(b);
    for (int i = 0; i < rows; i++) {
      bf16 *to = out + (row + i) * stride + first;
      if (gated)
        _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)a[i]));
      else
        _mm512_storeu_si512(to, ToBf16((__m512)a[i], (__m512)b[i]));
    }
  }
};

// The compiler does not see that tile instructions read and write memory.
inline void Fence() { asm volatile("" ::: "memory"); }

inline void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int first>
inline void StoreSums(float *sums) {
  if constexpr (first == 0) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTile * kTile, 64);
  } else {
    _tile_stored(2, sums, 64);
    _tile_stored(3, sums + kTile * kTile, 64);
  }
  Fence();
}

template <bool wide>
inline void StoreDigits(int *parts) {
  _tile_stored(0, parts, 64);
  _tile_stored(1, parts + kTile * kTile, 64);
  if (wide) {
    _tile_stored(2, parts + 2 * kTile * kTile, 64);
    _tile_stored(3, parts + 3 * kTile * kTile, 64);
  }
  Fence();
}

// Adds the products of two tiles of outputs (at `weights` and `weights` + `apart`, rows `stride`
// bytes apart) with one or two tiles of rows to the tiles 0 to 3.
template <bool two>
inline void AddProducts(const void *weights, int64_t apart, int64_t stride, const bf16 *x, int64_t next) {
  _tile_loadd(4, weights, stride);
  _tile_loadd(6, x, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, (const char *)weights + apart, stride);
  _tile_dpbf16ps(1, 5, 6);
  if (two) {
    _tile_loadd(7, x + next, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The sums of up to 32 rows, in the tiles 0 to 3.
void WriteSums(const Weight &w, const Target &target, float *sums, int64_t first, int64_t second, int64_t row, int64_t rows) {
  StoreSums<0>(sums);
  target.Write(w, sums, first, second, row, std::min<int64_t>(rows, kTile));
  if (rows <= kTile) return;
  StoreSums<2>(sums);
  target.Write(w, sums, first, second, row + kTile, std::min<int64_t>(rows - kTile, kTile));
}

// Rows of bfloat16 with outputs [first, first + 16) and [second, second + 16) of a plain weight,
// whose tiles are loaded from where it is.
void MultiplyPlain(const Weight &w, const bf16 *x, int64_t rows, int64_t first, int64_t second, int64_t ahead, const Target &target) {
  const int64_t next = w.inputs * kTile, bytes = w.RowBytes();
  alignas(64) float sums[2 * kTile * kTile];
  for (int64_t m = 0; m < rows; m += 2 * kTile) {
    const bf16 *part = x + m * w.inputs;
    const bool two = rows - m > kTile;
    ZeroSums();
    for (int64_t k = 0; k < w.inputs; k += kStep) {
      if (m == 0) {
        Prefetch(w, first + ahead, k, k + kStep);
        Prefetch(w, second + ahead, k, k + kStep);
      }
      const uint8_t *codes = w.codes + first * bytes + 2 * k;
      if (two)
        AddProducts<true>(codes, (second - first) * bytes, bytes, part + k * kTile, next);
      else
        AddProducts<false>(codes, (second - first) * bytes, bytes, part + k * kTile, next);
    }
    WriteSums(w, target, sums, first, second, m, rows - m);
  }
}

// Rows as fixed-point numbers of two digits, 128 * high + low, in tiles [inputs / 64][digits][16
// groups of 4 inputs][16 columns] of bytes. A tile of up to 8 rows has both digits of a row, 8
// columns apart; otherwise (`wide`) a tile of high and one of low digits follow each other.
struct Digits {
  int8_t *tiles;
  float *steps;  // [rows], what 1 stands for
  bool wide;
  int64_t Bytes(int64_t inputs) const { return inputs * kTile * (wide ? 2 : 1); }  // of 16 rows
};

// 64 codes of int4 unpack to the inputs 0-15, 32-47, 16-31, 48-63: `swaps` gives x this order.
void SplitRow(const bf16 *x, int64_t inputs, int column, bool swaps, const Digits &to, int8_t *tiles, float *step) {
  *step = FindStep(x, inputs);
  const __m512 scale = _mm512_set1_ps(1 / *step);
  const int64_t apart = to.wide ? kTileBytes : 4 * kTile / 2;  // of the digits of a row
  for (int64_t k = 0; k < inputs; k += 16) {
    const int64_t part = k / 16 % 4, at = swaps && part % 3 ? 3 - part : part;
    __m512i high, low;
    Split(x + k, scale, &high, &low);
    alignas(16) int both[2][4];
    _mm_store_si128((__m128i *)both[0], _mm512_cvtepi32_epi8(high));
    _mm_store_si128((__m128i *)both[1], _mm512_cvtsepi32_epi8(low));
    int8_t *tile = tiles + k / kCodes * kTileBytes * (to.wide ? 2 : 1) + at * 4 * 64 + column * 4;
    for (int i = 0; i < 4; i++) {
      memcpy(tile + i * 64, &both[0][i], 4);
      memcpy(tile + i * 64 + apart, &both[1][i], 4);
    }
  }
}

// Rows [first, first + 16) of x -> their tiles.
void SplitRows(const bf16 *x, int64_t stride, int64_t rows, int64_t first, int64_t inputs, bool swaps, const Digits &to) {
  int8_t *tiles = to.tiles + first / kTile * to.Bytes(inputs);
  if (rows - first < (to.wide ? kTile : kTile / 2)) memset(tiles, 0, to.Bytes(inputs));
  for (int64_t i = first; i < std::min<int64_t>(rows, first + kTile); i++)
    SplitRow(x + i * stride, inputs, i - first, swaps, to, tiles, to.steps + i);
}

// 64 int4 codes less their zero points, of 16 outputs -> a tile. Fetches as much of the 16 outputs
// `ahead` of them, a line at a time between the other work, because few lines are fetched at once.
inline void UnpackCodes(const Weight &w, int64_t output, int64_t k, int64_t ahead, int8_t *out) {
  const int64_t groups = w.inputs / w.group, at = output * groups + k / w.group;
  const int64_t next = output + ahead + kTile <= w.outputs ? output + ahead : output;
  const char *lines = (const char *)w.codes + next * w.inputs / 2 + k * kTile / 2;
  const __m512i mask = _mm512_set1_epi8(15);
  for (int i = 0; i < kTile; i++) {
    if (i % 2 == 0) _mm_prefetch(lines + i * 32, _MM_HINT_T0);
    const __m256i packed = _mm256_loadu_si256((const __m256i *)(w.codes + ((output + i) * w.inputs + k) / 2));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 4), 1);
    const __m512i zero = _mm512_set1_epi8(w.zeros ? w.zeros[at + i * groups] : 8);
    _mm512_store_si512(out + i * 64, _mm512_sub_epi8(_mm512_and_si512(both, mask), zero));
  }
  const int64_t scale = next * groups + k / w.group * kTile;
  _mm_prefetch((const char *)(w.scales + scale), _MM_HINT_T0);
  if (w.zeros) _mm_prefetch((const char *)(w.zeros + scale), _MM_HINT_T0);
}

// Adds integer products of two tiles of outputs with one tile of rows, or with the two of `wide`.
template <bool wide>
inline void AddDigits(const void *weights, int64_t apart, int64_t stride, const int8_t *x) {
  _tile_loadd(4, weights, stride);
  _tile_loadd(6, x, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(5, (const char *)weights + apart, stride);
  _tile_dpbssd(1, 5, 6);
  if (wide) {
    _tile_loadd(7, x + kTileBytes, 64);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
  }
}

// Up to 64 rows of two digits with outputs [first, first + 16) and [second, second + 16).
template <int kind, bool wide>
void MultiplyDigits(const Weight &w, const Digits &x, int64_t rows, int64_t first, int64_t second, int64_t ahead, const Target &target) {
  constexpr int kParts = wide ? 4 : 2;
  constexpr bool kGroups = kind == kInt4;
  alignas(64) int8_t tiles[2 * kTileBytes];
  alignas(64) float sums[kFewRows / kTile][kParts][kTile][kTile];  // the last three as the tiles 0 to 3
  alignas(64) int parts[kParts][kTile][kTile];
  const int64_t bytes = w.RowBytes(), group = kGroups ? w.group : w.inputs, groups = w.inputs / group;
  const int64_t blocks = (rows + kTile - 1) / kTile;
  if (kGroups) memset(sums, 0, sizeof(sums[0]) * blocks);
  for (int64_t g = 0; g < groups; g++)
    for (int64_t m = 0; m < blocks; m++) {
      ZeroSums();
      for (int64_t k = g * group; k < (g + 1) * group; k += kCodes) {
        const int8_t *part = x.tiles + m * x.Bytes(w.inputs) + k / kCodes * kTileBytes * (wide ? 2 : 1);
        if (!kGroups && m == 0) {
          Prefetch(w, first + ahead, k, k + kCodes);
          Prefetch(w, second + ahead, k, k + kCodes);
        }
        if (kGroups) {
          if (m == 0 || group > kCodes) {
            UnpackCodes(w, first, k, ahead, tiles);
            UnpackCodes(w, second, k, ahead, tiles + kTileBytes);
            Fence();
          }
          AddDigits<wide>(tiles, kTileBytes, 64, part);
        } else {
          AddDigits<wide>(w.codes + first * bytes + k, (second - first) * bytes, bytes, part);
        }
      }
      StoreDigits<wide>(&parts[0][0][0]);
      for (int p = 0; p < kParts; p++)
        for (int i = 0; i < kTile; i++) {
          const __m512 number = _mm512_cvtepi32_ps(_mm512_load_si512(parts[p][i]));
          const int64_t output = (p % 2 ? second : first) + i;
          const __m512 scaled = kGroups ? _mm512_mul_ps(number, _mm512_set1_ps(w.scales[output * groups + g])) : number;
          _mm512_store_ps(sums[m][p][i], kGroups ? _mm512_add_ps(scaled, _mm512_load_ps(sums[m][p][i])) : scaled);
        }
    }
  const __m512 digit = _mm512_set1_ps(kDigit);
  for (int64_t m = 0; m < blocks; m++) {
    const int64_t count = std::min<int64_t>(rows - m * kTile, kTile);
    const __m512 step = _mm512_maskz_loadu_ps((1u << count) - 1, x.steps + m * kTile);
    for (int p = 0; p < 2; p++)
      for (int i = 0; i < kTile; i++) {
        const __m512 high = _mm512_load_ps(sums[m][p][i]);
        const __m512 low = wide ? _mm512_load_ps(sums[m][p + kParts - 2][i]) : _mm512_shuffle_f32x4(high, high, 0xee);
        _mm512_store_ps(sums[m][p][i], _mm512_mul_ps(_mm512_fmadd_ps(high, digit, low), step));
      }
    target.Write(w, &sums[m][0][0][0], first, second, m * kTile, count);
  }
}

// Any number of rows with a quantized weight: the two tiles of outputs are unpacked once.
template <int kind>
void MultiplyUnpacked(const Weight &w, const bf16 *x, int64_t rows, int64_t first, int64_t second, const Target &target) {
  bf16 *tiles = (bf16 *)panel.Get(w.inputs * kPair * 2);
  Unpack<kind>(w, first, tiles);
  Unpack<kind>(w, second, tiles + kTile * kStep);
  Fence();
  alignas(64) float sums[2 * kTile * kTile];
  const int64_t next = w.inputs * kTile;
  for (int64_t m = 0; m < rows; m += 2 * kTile) {
    const bf16 *part = x + m * w.inputs;
    const bool two = rows - m > kTile;
    ZeroSums();
    for (int64_t k = 0; k < w.inputs; k += kStep) {
      if (two)
        AddProducts<true>(tiles + k * kPair, 2 * kTile * kStep, 64, part + k * kTile, next);
      else
        AddProducts<false>(tiles + k * kPair, 2 * kTile * kStep, 64, part + k * kTile, next);
    }
    WriteSums(w, target, sums, first, second, m, rows - m);
  }
}

#include "few_rows.h"

template <int kind>
void Run(const Weight &w, const bf16 *x, int64_t rows, int64_t stride, const Target &target, int threads) {
  const int64_t blocks = w.outputs / kPair, step = target.gated ? kTile : kPair, apart = target.gated ? w.outputs / 2 : kTile;
  const int64_t most = std::max<int64_t>(kFewRows, kPackedBytes / (2 * w.inputs) / kFewRows * kFewRows);
  const int64_t share = std::max<int64_t>(1, std::min<int64_t>(16, blocks / (threads * 8)));
  const int64_t unit = kind == kInt8 ? kCodes : kBlock;
  if constexpr (kind == kPlain) {
    if (rows == 1) return MultiplyPlainRows(w.outputs, w.inputs, (const bf16 *)w.codes, x, rows, stride, target.out, target.gated, threads);
  } else {
    if (rows == 1 && w.inputs % unit == 0 && (kind != kInt4 || w.group % kCodes == 0)) return RunOne<kind>(w, x, target, threads);
  }
  const bool fits = w.inputs % kCodes == 0 && (kind == kInt8 || w.group % kCodes == 0);
  const bool splits = kind != kPlain && fits && rows <= (kind == kInt8 ? kFewRows : kFewRows / 2);
  bf16 *packed = (bf16 *)packed_rows.Get(std::min((rows + kTile - 1) / kTile * kTile, most) * w.inputs * 2);
  float steps[kFewRows];
  const Digits digits{(int8_t *)packed, steps, rows > kTile / 2};
#pragma omp parallel num_threads(threads)
  {
    _tile_loadconfig(&kConfig);
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t count = std::min(rows - row, most);
#pragma omp for
      for (int64_t m = 0; m < count; m += kTile)
        if (splits)
          SplitRows(x, stride, rows, m, w.inputs, kind == kInt4, digits);
        else
          PackRows(x + (row + m) * stride, stride, std::min<int64_t>(count - m, kTile), w.inputs, packed + m * w.inputs);
      Fence();
#pragma omp for schedule(dynamic, share)
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * step, second = first + apart;
        if (splits)
          (digits.wide ? MultiplyDigits<kind, true> : MultiplyDigits<kind, false>)(w, digits, rows, first, second, step, target);
        else if (kind == kPlain)
          MultiplyPlain(w, packed, count, first, second, step, target.From(row));
        else
          MultiplyUnpacked<kind>(w, packed, count, first, second, target.From(row));
      }
    }
    _tile_release();
  }
}

}  // namespace

extern "C" {

// Asks the operating system for the tile registers; 0 if this process may use them.
int frame_x86_request_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) ? 1 : 0;
}

// x bfloat16 [rows, inputs], `stride` numbers apart -> out bfloat16 [rows, outputs], or with
// `gated` SiLU(first half) * second half [rows, outputs / 2]. inputs: a multiple of 32; outputs:
// of 32; group: of 32.
void frame_x86_multiply(int kind, int64_t outputs, int64_t inputs, int64_t group, const void *codes, const float *scales,
                        const int8_t *zeros, const void *x, int64_t rows, int64_t stride, void *out, int gated, int threads) {
  RunCall([=] {
    const Weight w{kind, outputs, inputs, group, (const uint8_t *)codes, scales, zeros};
    const Target target{(bf16 *)out, gated ? outputs / 2 : outputs, gated != 0};
    (kind == kPlain ? Run<kPlain> : kind == kInt8 ? Run<kInt8> : Run<kInt4>)(w, (const bf16 *)x, rows, stride, target, threads);
  });
}

}  // extern "C"
