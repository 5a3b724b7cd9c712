// What the kernels of 4-bit weights share. NVRTC compiles this text before that of a kernel.
//
// HALF: 0 for bfloat16, 1 for float16. GROUP: units of 64 inputs that share a scale; 0: all inputs.
//
// The layout of a weight (`frame.kernels.linear.blocked_int4.pack_codes`): blocks of 128 outputs; in a
// block units of 64 inputs; in a unit 8 tiles of 16 outputs; in a tile 16 bytes for each thread of a
// warp. Word j of thread (g, t), g = thread / 4, holds the left operand of the MMA with inputs 16 j to
// 16 j + 15: its nibbles i and i + 4 are inputs h, h + 1 of output g + 8 (i % 2), h = 2 t + 8 (i / 2).
// Scales: for each block and group 8 tiles of 8 words; word pair g holds the scales of outputs g and
// g + 8, then their zero points plus OFFSET, which is what a code in the mantissa adds to it.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#if HALF
#define TYPE "f16"
#define MAGIC 0x64006400u  // two times 1024, of which the last mantissa bit is 1
#define ONES 0x3C003C00u
#else
#define TYPE "bf16"
#define MAGIC 0x43004300u  // two times 128
#define ONES 0x3F803F80u
#endif
#define TILE_BYTES 512        // the codes of a tile and a unit
#define TILE_SCALE_BYTES 64   // its scales and zero points

__device__ __forceinline__ float widen(u16 value) {
  float result;
#if HALF
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
#else
  result = __uint_as_float((u32)value << 16);
#endif
  return result;
}

__device__ __forceinline__ float widen_low(u32 pair) { return widen((u16)pair); }
__device__ __forceinline__ float widen_high(u32 pair) { return widen((u16)(pair >> 16)); }

__device__ __forceinline__ u16 narrow(float value) {
  u16 result;
  asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ u32 narrow_pair(float low, float high) {
  u32 result;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// OFFSET + code of nibbles `number` and `number` + 4, exact
__device__ __forceinline__ u32 decode_pair(u32 word, int number) {
  u32 result = word >> (4 * number);
  asm("lop3.b32 %0, %0, 0x000F000F, %1, 0xEA;" : "+r"(result) : "n"(MAGIC));
  return result;
}

__device__ __forceinline__ u32 get_shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ int find_group(int unit) { return GROUP ? unit / (GROUP ? GROUP : 1) : 0; }
