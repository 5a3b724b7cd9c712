// What a decode step computes between the products, on bfloat16 rows: RMSNorm with the residual sum;
// norms of heads, rotary embedding and the store in the KV cache; attention of one token per row
// over the paged cache. Sums are float32, and results are rounded once.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "recording.h"

namespace {

constexpr int kLanes = 16;           // float32 of a register
constexpr int kFetched = 32;          // bfloat16 of a line of memory
constexpr int kMostDim = 256;        // of a head
constexpr int kQueries = 8;          // query heads that share a pass over the keys
constexpr int64_t kThreadWork = 1 << 15;  // numbers from which on a second thread is used

inline int CountThreads(int64_t work, int threads) { return work < kThreadWork ? 1 : threads; }

// 1 / rms of the n float32 numbers at x.
inline float InverseRms(const float *x, int64_t n, float eps) {
  F16 sum = Spread(0);
  for (int64_t i = 0; i < n; i += kLanes) sum = MultiplyAdd(Load(x + i), Load(x + i), sum);
  return 1 / std::sqrt(Sum(sum) / n + eps);
}

// The halves of the first `rotated` numbers, as [cos, cos; -sin, sin] at `table` turns them.
inline void Rotate(float *x, const bf16 *table, int rotated) {
  const int half = rotated / 2;
  for (int i = 0; i < half; i += kLanes) {
    const F16 a = Load(x + i), b = Load(x + half + i);
    Store(x + i, MultiplyAdd(a, LoadNumbers(table + i), Multiply(b, LoadNumbers(table + rotated + i))));
    Store(x + half + i, MultiplyAdd(b, LoadNumbers(table + half + i), Multiply(a, LoadNumbers(table + rotated + half + i))));
  }
}

// Where the positions of a row are in a cache: p is in `pages[p / size]`, at p % size.
struct Positions {
  const int32_t *pages;
  uint32_t size;
  int64_t stride;  // numbers between tokens
  int64_t At(uint32_t p) const { return ((int64_t)pages[p / size] * size + p % size) * stride; }
};

// Attention of `count` query heads, `dim` apart at q and out, to the positions [first, last) of the
// KV head at `keys` and `values`. A head has a few lines of memory in each token, which prefetchers
// of the CPU do not find, so each block of tokens is fetched while the one before is computed, and
// then the first one of the next KV head.
void Attend(const bf16 *q, int count, int dim, const bf16 *keys, const bf16 *values, Positions positions, int64_t first, int64_t last,
            float scale, bf16 *out) {
  alignas(64) float sums[kQueries][kMostDim] = {};  // of `kPairs` numbers first the even, then the odd ones
  alignas(64) float weights[kQueries][kLanes];
  float most[kQueries], total[kQueries] = {};
  std::fill(most, most + kQueries, -INFINITY);
  int64_t blocks[2][kLanes], *rows = blocks[0], *next = blocks[1];
  auto fetch = [&](int64_t begin, int64_t beyond, int64_t *found) {
    for (int64_t p = begin; p < std::min(begin + kLanes, last); p++) {
      const int64_t at = found[p - begin] = positions.At(p);
      for (int c = 0; c < dim; c += kFetched) {
        _mm_prefetch((const char *)(keys + at + beyond + c), _MM_HINT_T0);
        _mm_prefetch((const char *)(values + at + beyond + c), _MM_HINT_T0);
      }
    }
  };
  fetch(first, 0, next);
  for (int64_t p = first; p < last; p += kLanes) {
    const int tokens = (int)std::min<int64_t>(kLanes, last - p);
    std::swap(rows, next);
    if (p + kLanes < last)
      fetch(p + kLanes, 0, next);
    else
      fetch(first, dim, next);
    for (int t = 0; t < tokens; t++) {
      const bf16 *key = keys + rows[t];
      for (int i = 0; i < count; i++) {
        Register sum = ZeroRegister();
        for (int c = 0; c < dim; c += kPairs) sum = AddPairs(sum, key + c, q + i * dim + c);
        weights[i][t] = SumRegister(sum) * scale;
      }
    }
    for (int i = 0; i < count; i++) {
      std::fill(weights[i] + tokens, weights[i] + kLanes, -INFINITY);
      const F16 scores = Load(weights[i]);
      const float now = std::max(most[i], Largest(scores));
      const float factor = std::exp(most[i] - now);
      Store(weights[i], Exp(Subtract(scores, Spread(now))));
      std::fill(weights[i] + tokens, weights[i] + kLanes, 0.f);
      total[i] = total[i] * factor + Sum(Load(weights[i]));
      most[i] = now;
      for (int c = 0; c < dim; c += kPairs) {
        Register even = ScaleRegister(LoadRegister(sums[i] + c), factor), odd = ScaleRegister(LoadRegister(sums[i] + c + kRegister), factor);
        for (int t = 0; t < tokens; t++) {
          Register value_even, value_odd;
          LoadPairs(values + rows[t] + c, &value_even, &value_odd);
          const Register weight = SpreadRegister(weights[i][t]);
          even = MultiplyAddRegister(weight, value_even, even);
          odd = MultiplyAddRegister(weight, value_odd, odd);
        }
        StoreRegister(sums[i] + c, even);
        StoreRegister(sums[i] + c + kRegister, odd);
      }
    }
  }
  for (int i = 0; i < count; i++)
    for (int c = 0; c < dim; c += kPairs) {
      const float factor = 1 / total[i];
      StorePairs(out + i * dim + c, ScaleRegister(LoadRegister(sums[i] + c), factor), ScaleRegister(LoadRegister(sums[i] + c + kRegister), factor));
    }
}

}  // namespace

extern "C" {

// x [rows, size], `stride` apart. stream += x if it is not null ([rows, size], `apart` apart; rounded
// before it is normed); out [rows, size] = norm(stream) * weight, or of x. size: a multiple of 16.
void frame_x86_add_rms_norm(const bf16 *x, int64_t rows, int64_t size, int64_t stride, bf16 *stream, int64_t apart, const float *weight,
                            float eps, bf16 *out, int threads) {
  RunCall([=] {
#pragma omp parallel for num_threads(CountThreads(rows * size, threads))
    for (int64_t row = 0; row < rows; row++) {
      const bf16 *from = x + row * stride;
      if (stream) {
        bf16 *sum = stream + row * apart;
        for (int64_t i = 0; i < size; i += kLanes) StoreNumbers(sum + i, Add(LoadNumbers(from + i), LoadNumbers(sum + i)));
        from = sum;
      }
      F16 squares = Spread(0);
      for (int64_t i = 0; i < size; i += kLanes) squares = MultiplyAdd(LoadNumbers(from + i), LoadNumbers(from + i), squares);
      const F16 factor = Spread(1 / std::sqrt(Sum(squares) / size + eps));
      for (int64_t i = 0; i < size; i += kLanes)
        StoreNumbers(out + row * size + i, Multiply(Multiply(LoadNumbers(from + i), factor), Load(weight + i)));
    }
  });
}

// qkv [tokens, heads + 2 * kv_heads, dim], rows `stride` apart: norms (if `weights` float32 [2, dim]
// is not null) and rotates queries into q [tokens, heads, dim] and keys in place, then stores keys
// and values at `slots` of the caches [slots, kv_heads, dim], unless `slots` is null. dim and half of
// `rotated`: multiples of 16.
void frame_x86_norm_rope_store(bf16 *qkv, int64_t tokens, int64_t stride, int heads, int kv_heads, int dim, int rotated,
                               const int64_t *positions, const bf16 *table, const float *weights, float eps, const int64_t *slots,
                               bf16 *k_cache, bf16 *v_cache, bf16 *q, int threads) {
  RunCall([=] {
#pragma omp parallel for num_threads(CountThreads(tokens * stride, threads))
    for (int64_t token = 0; token < tokens; token++) {
      bf16 *row = qkv + token * stride;
      const bf16 *turn = table + positions[token] * 2 * rotated;
      alignas(64) float x[kMostDim];
      for (int head = 0; head < heads + kv_heads; head++) {
        const bool is_key = head >= heads;
        for (int i = 0; i < dim; i += kLanes) Store(x + i, LoadNumbers(row + head * dim + i));
        if (weights) {
          const F16 factor = Spread(InverseRms(x, dim, eps));
          for (int i = 0; i < dim; i += kLanes)
            Store(x + i, Multiply(Multiply(Load(x + i), factor), Load(weights + is_key * dim + i)));
        }
        Rotate(x, turn, rotated);
        bf16 *to = is_key ? row + head * dim : q + (token * heads + head) * dim;
        for (int i = 0; i < dim; i += kLanes) StoreNumbers(to + i, Load(x + i));
      }
      if (slots) {
        const size_t width = (size_t)kv_heads * dim;
        memcpy(k_cache + slots[token] * width, row + heads * dim, 2 * width);
        memcpy(v_cache + slots[token] * width, row + heads * dim + width, 2 * width);
      }
    }
  });
}

// q [rows, heads, dim] -> out of that shape: attention of one token per row to the last `window`
// (0: all) of its `lengths[row]` cached positions. Caches [pages, page_size, kv_heads, dim]; the
// pages of a row are those of `table` [slots, width] at slots[row]. dim: a multiple of 32.
void frame_x86_attend(const bf16 *q, int64_t rows, int heads, int kv_heads, int dim, const bf16 *k_cache, const bf16 *v_cache,
                      int64_t page_size, const int32_t *table, int64_t width, const int64_t *slots, const int32_t *lengths,
                      int64_t window, float scale, bf16 *out, int threads) {
  RunCall([=] {
    const int group = heads / kv_heads;
    int64_t work = 0;
    for (int64_t row = 0; row < rows; row++) work += (int64_t)lengths[row] * kv_heads * dim;
#pragma omp parallel for num_threads(CountThreads(work, threads)) schedule(dynamic)
    for (int64_t item = 0; item < rows * kv_heads; item++) {
      const int64_t row = item / kv_heads, head = item % kv_heads, length = lengths[row];
      const int32_t *pages = table + slots[row] * width;
      const int64_t stride = (int64_t)kv_heads * dim, first = window ? std::max<int64_t>(0, length - window) : 0;
      for (int i = 0; i < group; i += kQueries) {
        const int64_t at = (row * heads + head * group + i) * dim;
        const Positions positions{pages, (uint32_t)page_size, stride};
        Attend(q + at, std::min(kQueries, group - i), dim, k_cache + head * dim, v_cache + head * dim, positions, first, length, scale, out + at);
      }
    }
  });
}

}  // extern "C"
