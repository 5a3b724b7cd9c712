// One GEMM of a mixture of experts with e2m1 weights and e8m0 scales per 32 inputs (MXFP4), bfloat16 activations, on compute
// capability 9.0. FIRST: act[row, o] = activation(gate, up) of the gates and ups of the row's expert. Otherwise
// out[pair, n] = (sum_k x[row, k] w[n, k] + bias[n]) * weight of the pair.
//
// A tile has ROWS rows of one expert and 64 outputs of each half of the weight, so that a thread has a gate and its up. The weights
// are the left operand of the warp-group MMA, from registers. Two warp groups have 32 outputs of each half each; a further thread copies.
//
// The units of all tiles, tile after tile, are divided evenly among the blocks (stream-K, as in int4_tiles.cu). The last block to arrive
// at a tile, by the counter of the block that began it, adds the parts in the order of the inputs. Counters are zero before and after.
//
// SPLIT 0: a block takes whole tiles, so that a row's sums do not depend on its place, which is undefined in large alignments.
//
// Rows of x are in the order of the alignment. EARLY: the kernel before this one waited for the alignment, so weights may be read before
// it ends.
// `multiply` of m64nROWSk16 is written before this text.

#define STAGE_BYTES (ROWS * 128 + 5120)  // to a multiple of 1,024, by which the swizzle repeats
#define CONSUMERS 256
#define THREADS (BLOCKS > 1 ? 288 : 384)  // a lone block takes registers from a group of warps of which one copies
#define CHUNK (ROWS < 32 ? ROWS : 32)  // rows that are written at a time
#define ROW_PITCH 80                   // bytes of 32 outputs in the staging memory, without bank conflicts
#define STAGING_BYTES (CHUNK * ROW_PITCH)

// 8 outputs of CHUNK rows, in the order of an MMA's sums, to the rows of the staging memory
__device__ __forceinline__ void store_transposed(u32 to, const u32* words) {
#if ROWS >= 32
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
#elif ROWS == 16
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" :: "r"(to), "r"(words[0]), "r"(words[1]) : "memory");
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" :: "r"(to), "r"(words[0]) : "memory");
#endif
}

__device__ __forceinline__ uint4 load_four(u32 from) {
  uint4 result;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w) : "r"(from) : "memory");
  return result;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mxfp4_experts(
    const __grid_constant__ TensorMap x, const char* weights, const u16* bias, u16* out, const float* pair_weights, const int* pairs_of,
    const int* experts_of, const int* used, float4* partial, int* counter, int pairs, int half, int units,
    float alpha, float limit) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];  // of each stage: filled, then empty
  __shared__ int row_pairs[2][ROWS];
  __shared__ float row_weights[2][ROWS];
  __shared__ int arrived;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const u32 stages = (get_shared_address(memory) + 1023) & ~1023u;
  const u32 filled = get_shared_address(barriers), empty = filled + STAGES * 8;
  if (tid == 0) {
    for (int s = 0; s < STAGES; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(filled + s * 8) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" :: "r"(empty + s * 8) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
#if !EARLY
  wait_for_previous();
#endif
  launch_dependents();  // after the wait: the next kernel of this layer reads the alignment before it waits

  const int columns = (half + HALF_OUTPUTS - 1) / HALF_OUTPUTS, tiles = *used * columns, total = tiles * units;
  const int blocks = min((int)gridDim.x, SPLIT ? total : tiles);
  if ((int)blockIdx.x >= blocks) return;
#if SPLIT
  int work = (int)((long long)total * blockIdx.x / blocks);
  const int stop = (int)((long long)total * (blockIdx.x + 1) / blocks);
  auto find_tile = [&](int at) { return at / units; };
#else
  int work = 0;
  const int stop = (tiles - (int)blockIdx.x + blocks - 1) / blocks * units;
  auto find_tile = [&](int at) { return at / units * blocks + (int)blockIdx.x; };
#endif

  if (tid >= CONSUMERS) {
#if BLOCKS == 1
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (tid > CONSUMERS) return;
    auto fetch_weight = [&](int at, int stage) {  // and announce all bytes of the stage
      const int tile = find_tile(at), unit = at % units, block = tile / columns, column = tile - block * columns;
      const u32 to = stages + stage * STAGE_BYTES + ROWS * 128, barrier = filled + stage * 8;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   :: "r"(barrier), "n"(ROWS * 128 + WEIGHT_BYTES) : "memory");
      copy(to, weights + ((size_t)(experts_of[block] * columns + column) * units + unit) * WEIGHT_BYTES, WEIGHT_BYTES, barrier);
    };
    auto fetch_inputs = [&](int at, int stage) {
      const int unit = at % units, block = find_tile(at) / columns;
      copy_box(stages + stage * STAGE_BYTES, &x, unit * 64, block * ROWS, filled + stage * 8);
    };
    const int early = min(stop, work + STAGES);
#if EARLY
    for (int at = work; at < early; ++at) fetch_weight(at, at - work);
    wait_for_previous();
    for (int at = work; at < early; ++at) fetch_inputs(at, at - work);
#else
    for (int at = work; at < early; ++at) {
      fetch_weight(at, at - work);
      fetch_inputs(at, at - work);
    }
#endif
    int stage = 0, parity = 0;
    for (int at = early; at < stop; ++at) {
      wait_for(empty + stage * 8, parity);
      fetch_weight(at, stage);
      fetch_inputs(at, stage);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }

#if BLOCKS == 1
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
#if EARLY
  wait_for_previous();
#endif
  int stage = 0, parity = 0, number = 0;
  float sums[ROWS / 8][4];
  auto dequantize_unit = [&](u32 (*left)[4]) {
    wait_for(filled + stage * 8, parity);
    const u32 from = stages + stage * STAGE_BYTES + ROWS * 128;
    u32 words[4], exponents, scale[2][2];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from + tid * 16) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(exponents) : "r"(from + 4096 + warp * 32 + (lane >> 2) * 4) : "memory");
    expand_scales(exponents, scale);
#pragma unroll
    for (int j = 0; j < 4; ++j) dequantize(words[j], left[j], scale[j / 2]);
  };
  auto release = [&](int which) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(empty + which * 8) : "memory");
  };
  auto go_on = [&]() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
    ++work;
  };
#if ROWS <= 32  // MMAs of warps, which start sooner than those of groups
  u32 left[4][4];
  auto multiply_unit = [&](const int, bool is_first) {
    dequantize_unit(left);
    if (is_first) {
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) *(float4*)sums[j] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    const u32 from = stages + stage * STAGE_BYTES + (lane & 7) * 128;  // rows of 128 bytes, swizzled
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 right[4];  // 32 inputs
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(right[0]), "=r"(right[1]), "=r"(right[2]), "=r"(right[3])
                     : "r"(from + j * 1024 + ((i * 4 + (lane >> 3)) ^ (lane & 7)) * 16) : "memory");
        multiply_warp(sums[j], left[2 * i], right);
        multiply_warp(sums[j], left[2 * i + 1], right + 2);
      }
    }
    release(stage);
    go_on();
  };
#else  // the two groups take turns: one dequantizes while the other multiplies
  auto start_unit = [&](u32 (*left)[4], bool is_first) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // the descriptor of 16 inputs in rows of 128 bytes, swizzled; 1,024 bytes from 8 rows to the next 8
      const u64 right = (u64)((stages + stage * STAGE_BYTES + j * 32) >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
      multiply(sums, left[j], right, !(is_first && j == 0));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  u32 left[2][4][4];  // of this unit and of the one before, which the MMA may still read
  int previous = 0;
  const int group = warp >> 2;
  if (group == 1) asm volatile("bar.arrive 4, 256;" ::: "memory");
  auto multiply_unit = [&](const int buffer, bool is_first) {
    dequantize_unit(left[buffer]);
    asm volatile("bar.sync %0, 256;" :: "r"(4 + group) : "memory");
    start_unit(left[buffer], is_first);
    asm volatile("bar.arrive %0, 256;" :: "r"(5 - group) : "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (!is_first) release(previous);
    previous = stage;
    go_on();
  };
#endif

  while (work < stop) {
    const int tile = find_tile(work), unit = work % units, length = min(stop - work, units - unit);
    const int block = tile / columns, column = tile - block * columns, output = column * HALF_OUTPUTS + warp * 8 + (lane >> 2);
    int pair = pairs;
    if (tid < ROWS) pair = pairs_of[block * ROWS + tid];
    float bias0 = 0.f, bias1 = 0.f;
    if (BIAS && output < half) {
      const u16* row = bias + (size_t)experts_of[block] * 2 * half + output;
      bias0 = widen(row[0]);
      bias1 = widen(row[half]);
    }
    multiply_unit(0, true);
    const float weight = WEIGHTED && pair < pairs ? pair_weights[pair] : 1.f;
#if ROWS <= 32
#pragma unroll 1
    for (int i = 1; i < length; ++i) multiply_unit(0, false);
#else
    int i = 1;
    for (; i + 1 < length; i += 2) {
      multiply_unit(1, false);
      multiply_unit(0, false);
    }
    if (i < length) multiply_unit(1, false);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(previous);
#endif
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[j][e]) :: "memory");  // not read before the wait

    if (SPLIT && length < units) {
      const int begin = (int)((((long long)tile * units + 1) * blocks - 1) / total), end = (int)(((long long)(tile + 1) * units * blocks - 1) / total);
      // a block has at most two parts: one that begins a tile, one that does not
      float4* mine = partial + (size_t)(2 * blockIdx.x + (unit == 0)) * (ROWS / 8) * CONSUMERS;
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) mine[j * CONSUMERS + tid] = *(float4*)sums[j];
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (tid == 0) {  // releases the parts of all threads, and acquires those of other blocks
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter + begin) : "memory");
        arrived = before;
      }
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (arrived != end - begin) continue;
      if (tid == 0) counter[begin] = 0;
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) *(float4*)sums[j] = make_float4(0.f, 0.f, 0.f, 0.f);
#if ROWS <= 16
#pragma unroll 4
#else
#pragma unroll 1
#endif
      for (int b = begin; b <= end; ++b) {
        const float4* part = partial + (size_t)(2 * b + (b == begin)) * (ROWS / 8) * CONSUMERS;
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
          const float4 value = __ldcg(part + j * CONSUMERS + tid);
          sums[j][0] += value.x, sums[j][1] += value.y, sums[j][2] += value.z, sums[j][3] += value.w;
        }
      }
    }

    const int part = warp >> 2, turn = number++ & 1;
    if (tid < ROWS) {
      row_pairs[turn][tid] = pair;
      if (WEIGHTED) row_weights[turn][tid] = weight;
    }
    asm volatile("bar.sync 1, 256;" ::: "memory");
    const u32 staging = stages + STAGES * STAGE_BYTES + part * 4 * STAGING_BYTES;  // two buffers of two halves
    const int piece = column * HALF_OUTPUTS + part * 32 + (tid & 3) * 8, row = (tid & 127) >> 2;
#pragma unroll
    for (int c = 0; c < ROWS / CHUNK; ++c) {
      const u32 buffer = staging + (c & 1) * 2 * STAGING_BYTES;
      u32 low[4], high[4];
#pragma unroll
      for (int j = 0; j < CHUNK / 8; ++j) {
        const float* four = sums[c * (CHUNK / 8) + j];
#if FIRST
        low[j] = narrow_pair(activate(four[0] + bias0, four[2] + bias1, alpha, limit), activate(four[1] + bias0, four[3] + bias1, alpha, limit));
#else
        float first = 1.f, second = 1.f;
        if (WEIGHTED) {
          const int at = c * CHUNK + j * 8 + (lane & 3) * 2;
          first = row_weights[turn][at], second = row_weights[turn][at + 1];
        }
        low[j] = narrow_pair((four[0] + bias0) * first, (four[1] + bias0) * second);
        high[j] = narrow_pair((four[2] + bias1) * first, (four[3] + bias1) * second);
#endif
      }
      const u32 to = buffer + (lane & (CHUNK - 1)) * ROW_PITCH + (warp & 3) * 16;
      store_transposed(to, low);
#if !FIRST
      store_transposed(to + STAGING_BYTES, high);
#endif
      asm volatile("bar.sync %0, 128;" :: "r"(2 + part) : "memory");
      if (row < CHUNK && piece < half) {
        const int target = row_pairs[turn][c * CHUNK + row];
        if (target < pairs) {
#if FIRST
          *(uint4*)(out + (size_t)(block * ROWS + c * CHUNK + row) * half + piece) = load_four(buffer + row * ROW_PITCH + (tid & 3) * 16);
#else
          u16* place = out + (size_t)target * 2 * half + piece;
          *(uint4*)place = load_four(buffer + row * ROW_PITCH + (tid & 3) * 16);
          *(uint4*)(place + half) = load_four(buffer + STAGING_BYTES + row * ROW_PITCH + (tid & 3) * 16);
#endif
        }
      }
    }
    // `arrived`, the tables and the staging buffers are written next after barrier 1, which all pass
  }
}
