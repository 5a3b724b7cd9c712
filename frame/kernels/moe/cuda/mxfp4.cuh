// What the kernels of experts in MXFP4 share: e2m1 weights, e8m0 scales per 32 inputs, bfloat16 activations. Follows `common.cuh`.
//
// Layout of a weight (`frame.kernels.moe.blocked_mxfp4.pack_weight`): blocks of 64 outputs of each half; in a block units of 64
// inputs; in a unit 8 tiles of 8 outputs of each half, 16 bytes for each thread of a warp, then their scales. Word j of thread (g, t),
// g = thread / 4, holds the left operand of the MMA with inputs 16 j to 16 j + 15: its register i holds inputs h and h + 1,
// h = 2 t + 8 (i / 2), of output g of half i % 2. The bits lie so that rotations, shifts and masks extract the registers.
// A scale's byte is the exponent field of 2^126 times the scale; a word has (inputs 0-31, 32-63) x (half 0, half 1) of output g.

#define HALF_OUTPUTS 64    // of a block
#define WEIGHT_BYTES 4352  // of a unit: 8 tiles of 512, scales of 256

__device__ __forceinline__ void expand_scales(u32 exponents, u32 (*scale)[2]) {  // [inputs][half], twice in a word
  scale[0][0] = (exponents & 0xFF) * 0x00800080u;
  scale[0][1] = __byte_perm(exponents, 0, 0x4441) * 0x00800080u;
  scale[1][0] = __byte_perm(exponents, 0, 0x4442) * 0x00800080u;
  scale[1][1] = (exponents >> 24) * 0x00800080u;
}

__device__ __forceinline__ void dequantize(u32 word, u32* left, const u32* scale) {
  u32 turned, last, value[4];
  asm("shf.r.wrap.b32 %0, %1, %1, 4;" : "=r"(turned) : "r"(word));
  asm("shf.r.wrap.b32 %0, %1, %1, 6;" : "=r"(last) : "r"(word));
  value[0] = word & 0x81C081C0u;
  value[1] = turned & 0x81C081C0u;
  value[2] = word << 6 & 0x81C081C0u;
  value[3] = last & 0x81808180u | word << 2 & 0x00400040u;
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(left[i]) : "r"(value[i]), "r"(scale[i % 2]));  // exact
}

__device__ __forceinline__ void multiply_warp(float* sums, const u32* left, const u32* right) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

__device__ __forceinline__ float compute_sigmoid(float x) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.f + power));
  return result;
}

__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
#if CLAMPED
  gate = gate > limit ? limit : gate;  // keeps NaN
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1.f) * gate * compute_sigmoid(gate * alpha);
#else
  return gate * compute_sigmoid(gate) * up;
#endif
}
