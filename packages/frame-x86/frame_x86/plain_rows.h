// The product of a few rows with a plain weight, by dot products in registers. Also used by products.cpp.

#pragma once

#include <cstdint>

// x bfloat16 [rows, inputs], `stride` numbers apart -> out [rows, outputs], or with `gated` SiLU(first half) * second half
// [rows, outputs / 2]. codes: bfloat16 [outputs, inputs].
void MultiplyPlainRows(int64_t outputs, int64_t inputs, const uint16_t *codes, const uint16_t *x, int64_t rows, int64_t stride,
                       uint16_t *out, bool gated, int threads);
