// out[n, k] = (code[n, k] - zero[n, k]) scale[n, k], computed in float32. Grid: tiles of 16 outputs, parts of the inputs.

#define WARPS 8
#define PITCH 144  // bytes of a row of 64 inputs in shared memory; 16 more than it has, so that stores meet each bank once

extern "C" __global__ void __launch_bounds__(WARPS * 32) int4_dequantize(const uint4* codes, const uint2* scales, uint4* out, int K) {
  __shared__ __align__(16) unsigned char memory[WARPS][16 * PITCH];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = blockIdx.x;
  const int units = K >> 6, groups = GROUP ? units / (GROUP ? GROUP : 1) : 1;
  const u32 to = get_shared_address(memory[warp]) + ((lane & 7) + (lane >> 3 & 1) * 8) * PITCH + (lane >> 4) * 16;
  launch_dependents();
  wait_for_previous();
  for (int unit = blockIdx.y * WARPS + warp; unit < units; unit += gridDim.y * WARPS) {
    const uint4 four = codes[(((size_t)(tile >> 3) * units + unit) * 8 + (tile & 7)) * 32 + lane];
    const uint2 pair = scales[(((tile >> 3) * groups + find_group(unit)) * 8 + (tile & 7)) * 8 + (lane >> 2)];
    const float scale[2] = {widen_low(pair.x), widen_high(pair.x)}, zero[2] = {widen_low(pair.y), widen_high(pair.y)};
    const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 codes_of = decode_pair(words[j], i);
        values[i] = narrow_pair((widen_low(codes_of) - zero[i % 2]) * scale[i % 2], (widen_high(codes_of) - zero[i % 2]) * scale[i % 2]);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                   :: "r"(to + j * 32), "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + (lane >> 3);
      out[((size_t)(tile * 16 + row) * K + unit * 64) / 8 + (lane & 7)] = *(uint4*)(memory[warp] + row * PITCH + (lane & 7) * 16);
    }
    __syncwarp();
  }
}
