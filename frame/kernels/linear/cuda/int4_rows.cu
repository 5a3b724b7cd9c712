// out[m, n] = sum_k x[m, k] (code[n, k] - zero[n, k]) scale[n, k] (+ bias[n]) for up to 16 rows.
//
// Every block has all rows, and a range of tiles of 16 outputs, PASSES times TILES at a time. Its WARPS
// share the inputs. A warp goes through its units of 64 inputs, in a unit through the passes, and has the
// sums of all tiles in registers. It copies the codes of STAGES passes ahead, with those of a unit's first
// pass its inputs, into its own part of shared memory. An MMA multiplies OFFSET + code; sum (code - zero) x
// is the sum of these products minus (OFFSET + zero) sum x, and the sum of x comes from an MMA with ones.
// Scales multiply the sums of a unit, not the weights. The warps' sums replace the stages in the end.
//
// COLUMNS: tiles of 8 rows. GATED: out = SiLU(first half of the outputs) * second half; TILES is even
// then, and tiles of the halves alternate.

#define HALVES (GATED ? 2 : 1)
#define WIDTH (PASSES * TILES / HALVES)  // tiles of a half at a time
#define STAGE_BYTES (TILES * (TILE_BYTES + TILE_SCALE_BYTES) + COLUMNS * 1024)

__device__ __forceinline__ void copy(u32 to, const void* from, bool is_on) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0;\n @p cp.async.cg.shared.global.L2::256B [%0], [%1], 16;}"
               :: "r"(to), "l"(from), "r"((u32)is_on) : "memory");
}

__device__ __forceinline__ void multiply(float* sums, const u32* left, u32 right0, u32 right1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) int4_rows(
    const u16* x, const char* codes, const char* scales, const u16* bias, u16* out, int M, int N, int K, int x_stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int units = K >> 6, groups = GROUP ? units / (GROUP ? GROUP : 1) : 1;
  const int width = N / HALVES, columns = width >> 4;  // columns: tiles of a half
  const int begin = units * warp / WARPS, end = units * (warp + 1) / WARPS;
  const int first = (int)((long long)columns * blockIdx.x / gridDim.x), last = (int)((long long)columns * (blockIdx.x + 1) / gridDim.x);
  const u32 stages = get_shared_address(memory) + warp * STAGES * STAGE_BYTES;

  auto fetch_weight = [&](int stage, int column, int unit) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const bool is_on = column + t / HALVES < last && unit < end;
      const int tile = column + t / HALVES + (GATED ? t % HALVES * columns : 0);
      const size_t place = (size_t)((tile >> 3) * units + unit) * 8 + (tile & 7);
      const size_t scale_place = (size_t)((tile >> 3) * groups + find_group(unit)) * 8 + (tile & 7);
      const u32 to = stages + stage * STAGE_BYTES + t * (TILE_BYTES + TILE_SCALE_BYTES) + lane * 16;
      copy(to, codes + place * TILE_BYTES + lane * 16, is_on);
      copy(to + TILE_BYTES, scales + scale_place * TILE_SCALE_BYTES + lane * 16, is_on && lane < 4);
    }
  };
  // rows of 128 bytes, whose parts of 16 bytes are permuted, so that ldmatrix meets each bank once
  auto place_input = [&](int stage, int row, int part) {
    return stages + stage * STAGE_BYTES + TILES * (TILE_BYTES + TILE_SCALE_BYTES) + row * 128 + ((part ^ (row & 7)) << 4);
  };
  auto fetch_inputs = [&](int stage, int unit) {
    const bool is_on = unit < end;
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; ++i) {
      const int row = i * 4 + (lane >> 3);
      copy(place_input(stage, row, lane & 7), x + (size_t)row * x_stride + unit * 64 + (lane & 7) * 8, is_on && row < M);
    }
  };

  auto commit = [&]() { asm volatile("cp.async.commit_group;" ::: "memory"); };
  auto start_weights = [&](int column) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch_weight(s, column + s % PASSES * (TILES / HALVES), begin + s / PASSES);
  };
  auto start_inputs = [&]() {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
      if (s % PASSES == 0) fetch_inputs(s, begin + s / PASSES);
      commit();
    }
  };
  auto clear_inputs = [&]() {  // rows after the last are zeros
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
      for (int i = 0; i < COLUMNS * 2; ++i) {
        const int row = i * 4 + (lane >> 3);
        if (row >= M) asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" :: "r"(place_input(s, row, lane & 7)), "r"(0) : "memory");
      }
  };

  launch_dependents();
  start_weights(first);
  clear_inputs();
  wait_for_previous();
  const u32 ones[4] = {ONES, ONES, ONES, ONES};
  for (int column = first; column < last; column += WIDTH) {
    if (column > first) {
      __syncthreads();  // the sums of the tiles before are read
      start_weights(column);
      clear_inputs();
    }
    start_inputs();
    int stage = 0, stage_ahead = STAGES - 1;
    float sums[PASSES][TILES][COLUMNS][4] = {};
    for (int unit = begin; unit < end; ++unit) {
      u32 right[COLUMNS][8];
      float input_sums[COLUMNS][4] = {};
      int here = column;
      if (PASSES > 1) asm volatile("" : "+r"(here));  // so that no addresses of tiles stay in registers
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncwarp();
        {
          const int ahead = (pass + STAGES - 1) % PASSES, unit_ahead = unit + (pass + STAGES - 1) / PASSES;
          fetch_weight(stage_ahead, here + ahead * (TILES / HALVES), unit_ahead);
          if (ahead == 0) fetch_inputs(stage_ahead, unit_ahead);
          commit();
        }
        if (pass == 0) {
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                           : "=r"(right[c][4 * j]), "=r"(right[c][4 * j + 1]), "=r"(right[c][4 * j + 2]), "=r"(right[c][4 * j + 3])
                           : "r"(place_input(stage, c * 8 + (lane & 7), 4 * j + (lane >> 3))) : "memory");
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) multiply(input_sums[c], ones, right[c][2 * j], right[c][2 * j + 1]);
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const u32 from = stages + stage * STAGE_BYTES + t * (TILE_BYTES + TILE_SCALE_BYTES);
          u32 words[4], scale, zero;
          asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from + lane * 16) : "memory");
          asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(scale), "=r"(zero) : "r"(from + TILE_BYTES + (lane >> 2) * 8) : "memory");
          float part[COLUMNS][4] = {};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            u32 left[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) left[i] = decode_pair(words[j], i);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) multiply(part[c], left, right[c][2 * j], right[c][2 * j + 1]);
          }
          const float scale0 = widen_low(scale), scale1 = widen_high(scale), zero0 = widen_low(zero), zero1 = widen_high(zero);
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            float* sum = sums[pass][t][c];
            sum[0] += scale0 * (part[c][0] - zero0 * input_sums[c][0]);
            sum[1] += scale0 * (part[c][1] - zero0 * input_sums[c][1]);
            sum[2] += scale1 * (part[c][2] - zero1 * input_sums[c][0]);
            sum[3] += scale1 * (part[c][3] - zero1 * input_sums[c][1]);
          }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        stage_ahead = stage_ahead + 1 == STAGES ? 0 : stage_ahead + 1;
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    // the sums of a warp: for each tile and tile of rows 32 times 4
    float* const own = (float*)(memory + warp * STAGES * STAGE_BYTES);
#pragma unroll
    for (int t = 0; t < PASSES * TILES; ++t)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) *(float4*)(own + ((t * COLUMNS + c) * 32 + lane) * 4) = *(float4*)sums[t / TILES][t % TILES][c];
    __syncthreads();
    const float* const all = (const float*)memory;
    for (int e = threadIdx.x; e < WIDTH * 16 * COLUMNS * 8; e += WARPS * 32) {
      const int output = e & 15, row = e >> 4 & (COLUMNS * 8 - 1), t = e / (16 * COLUMNS * 8);
      // thread and number of the sum in an MMA's result
      const int thread = (output & 7) * 4 + (row & 7) / 2, number = (output >> 3) * 2 + (row & 1);
      if (column + t < last && row < M) {
        float total = 0.f, up = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float* from = all + w * (STAGES * STAGE_BYTES / 4) + ((t * HALVES * COLUMNS + (row >> 3)) * 32 + thread) * 4 + number;
          total += from[0];
          if (GATED) up += from[COLUMNS * 128];
        }
        const int n = (column + t) * 16 + output;
        if (BIAS) {
          total += widen(bias[n]);
          if (GATED) up += widen(bias[n + width]);
        }
        if (GATED) total = total / (1.f + __expf(-total)) * up;
        out[(size_t)row * width + n] = narrow(total);
      }
    }
  }
}
