// As mxfp4_experts.cu for a few pairs, each of which reads its expert, without an alignment. A block of four warps computes 8 outputs of
// each half for one pair, each warp every fourth unit of inputs; of an MMA's 8 rows, one is used. FIRST reads the tokens of the pairs,
// otherwise x has their rows. Grid: pairs times tiles of outputs, the latter fastest.

#define WARPS 4
#define DEPTH 4  // units that a warp loads ahead

extern "C" __global__ void __launch_bounds__(WARPS * 32, 8) mxfp4_rows(
    const u16* x, const char* weights, const u16* bias, u16* out, const float* pair_weights, const long long* ids, int top, int half,
    int units, int inputs, int x_stride, float alpha, float limit) {
  __shared__ float4 parts[WARPS - 1][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tiles = half / 8, pair = (int)blockIdx.x / tiles, tile = (int)blockIdx.x - pair * tiles;
#if FIRST
  wait_for_previous();
#endif
  launch_dependents();  // after the wait: the next kernel of this layer reads the ids before it waits
  const int expert = (int)ids[pair], columns = (half + HALF_OUTPUTS - 1) / HALF_OUTPUTS;

  const char* unit_weights = weights + ((size_t)(expert * columns + tile / 8) * units + warp) * WEIGHT_BYTES;
  const int tile_at = tile % 8 * 512 + lane * 16, scale_at = 4096 + tile % 8 * 32 + g * 4;
  uint4 words[DEPTH];
  u32 exponents[DEPTH];
  auto load = [&](int slot, int ahead) {  // of the unit so many turns ahead
    const char* from = unit_weights + (size_t)ahead * WARPS * WEIGHT_BYTES;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[slot].x), "=r"(words[slot].y), "=r"(words[slot].z), "=r"(words[slot].w) : "l"(from + tile_at));
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(exponents[slot]) : "l"(from + scale_at));
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    if (warp + i * WARPS < units) load(i, i);
#if !FIRST
  wait_for_previous();
#endif

  const u16* row = x + (size_t)(FIRST ? pair / top : pair) * x_stride + t * 2;
  float4 sums = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int unit = warp; unit < units; unit += WARPS * DEPTH) {
#pragma unroll
    for (int slot = 0; slot < DEPTH; ++slot) {
      const int current = unit + slot * WARPS;
      if (current >= units) break;
      u32 right[4][2], left[4], scale[2][2];
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = current * 64 + j * 16 + i * 8;
          right[j][i] = g == 0 && at < inputs ? *(const u32*)(row + at) : 0;  // inputs are a multiple of 8
        }
      const u32 four[4] = {words[slot].x, words[slot].y, words[slot].z, words[slot].w};
      expand_scales(exponents[slot], scale);
      if (current + DEPTH * WARPS < units) load(slot, DEPTH);
      unit_weights += (size_t)WARPS * WEIGHT_BYTES;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        dequantize(four[j], left, scale[j / 2]);
        multiply_warp((float*)&sums, left, right[j]);
      }
    }
  }
  if (warp) parts[warp - 1][lane] = sums;
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int w = 0; w < WARPS - 1; ++w) {
    const float4 part = parts[w][lane];
    sums.x += part.x, sums.y += part.y, sums.z += part.z, sums.w += part.w;
  }
  if (t) return;  // of the sums, x and z are those of row 0
  const int output = tile * 8 + g;
  float bias0 = 0.f, bias1 = 0.f;
  if (BIAS) {
    const u16* from = bias + (size_t)expert * 2 * half + output;
    bias0 = widen(from[0]);
    bias1 = widen(from[half]);
  }
#if FIRST
  out[(size_t)pair * half + output] = narrow(activate(sums.x + bias0, sums.z + bias1, alpha, limit));
#else
  u16* place = out + (size_t)pair * 2 * half + output;
  place[0] = narrow((sums.x + bias0) * pair_weights[pair]);
  place[half] = narrow((sums.z + bias1) * pair_weights[pair]);
#endif
}
