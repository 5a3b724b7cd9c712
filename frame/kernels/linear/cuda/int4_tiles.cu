// out[m, n] = sum_k x[m, k] (code[n, k] - zero[n, k]) scale[n, k] (+ bias[n]) for 17 rows and more, on compute capability 9.0.
//
// A tile has 128 outputs and ROWS rows. The weights are the left operand of the warp-group MMA, which
// reads it from registers: dequantized and rounded as a product of the dequantized weight would have
// them. Two warp groups have 64 outputs each; one thread of a third copies by TMA.
//
// Stream-K (arXiv 2301.03598): the units of 64 inputs of all tiles, tile after tile, are divided evenly
// among the blocks. CLUSTERED: among the blocks of a cluster, which has `cluster_tiles` tiles.
//
// Without clusters, a block that has a part of a tile leaves its sums in `partial`; the last block to
// arrive, by `counter`, adds the parts in the order of the inputs. `counter` is zero before and after.
// In a cluster, the blocks whose last work is a part of a tile, its holders, each take every n-th 16
// rows of it. They send each other the sums of these rows through distributed shared memory. A block
// that goes on to other work after the end of a tile leaves the sums of that end in `partial`.
//
// `multiply` of m64nROWSk16 is written before this text.

#define OUTPUTS 128
#define WEIGHT_BYTES (8 * (TILE_BYTES + TILE_SCALE_BYTES))
#define STAGE_BYTES (ROWS * 128 + 5120)  // inputs and weights, to a multiple of 1,024, by which the swizzle repeats
#define CONSUMERS 256                    // threads
#define SLICE_BYTES (CONSUMERS * 32)     // the sums of 16 rows

#if CLUSTERED
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void send(u32 to, u32 rank, const float* four) {
  asm volatile("{.reg .u32 a; mapa.shared::cluster.u32 a, %0, %1;\nst.shared::cluster.v4.f32 [a], {%2,%3,%4,%5};}"
               :: "r"(to), "r"(rank), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]) : "memory");
}

__device__ __forceinline__ void copy_later(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void add(float* sums, u32 from) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "r"(from) : "memory");
  sums[0] += value.x, sums[1] += value.y, sums[2] += value.z, sums[3] += value.w;
}
#endif

__device__ __forceinline__ void dequantize(u32 word, u32* left, const u32* scale, const u32* negative_zero) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 value = decode_pair(word, i);
    asm("fma.rn." TYPE "x2 %0, %0, %1, %2;" : "+r"(value) : "r"(ONES), "r"(negative_zero[i % 2]));  // exact
    asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(left[i]) : "r"(value), "r"(scale[i % 2]));
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) int4_tiles(
    const __grid_constant__ TensorMap x, const char* codes, const char* scales, const u16* bias, u16* out, float4* partial, int* counter,
    int M, int N, int K, int cluster_tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];  // of each stage: filled, then empty
#if !CLUSTERED
  __shared__ int arrived;
#endif
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int units = K >> 6, groups = GROUP ? units / (GROUP ? GROUP : 1) : 1;
  const int row_tiles = (M + ROWS - 1) / ROWS, tiles = (N + OUTPUTS - 1) / OUTPUTS * row_tiles;
#if CLUSTERED
  int blocks, rank;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int first_tile = (int)blockIdx.x / blocks * cluster_tiles;
  const int total = min(cluster_tiles, tiles - first_tile) * units;
#else
  const int blocks = gridDim.x;
  const long long total = (long long)tiles * units;
#endif
#if CLUSTERED
  auto begin_of = [&](int rank) { return first_tile * units + (int)(total * rank / blocks); };
  int work = begin_of(rank);
  const int stop = begin_of(rank + 1);
#else  // unsigned, which makes a loop that was measured 1 to 3 % faster
  int work = (int)(total * blockIdx.x / blocks);
  const int stop = (int)(total * (blockIdx.x + 1) / blocks);
#endif
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
  launch_dependents();

  if (tid >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (tid == CONSUMERS) {
      auto fetch_weight = [&](int at, int stage) {
        const int tile = at / units, unit = at - tile * units, column = tile / row_tiles;
        const u32 to = stages + stage * STAGE_BYTES + ROWS * 128, barrier = filled + stage * 8;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "n"(ROWS * 128 + WEIGHT_BYTES) : "memory");
        copy(to, codes + (size_t)(column * units + unit) * 8 * TILE_BYTES, 8 * TILE_BYTES, barrier);
        copy(to + 8 * TILE_BYTES, scales + (size_t)(column * groups + find_group(unit)) * 8 * TILE_SCALE_BYTES, 8 * TILE_SCALE_BYTES, barrier);
      };
      auto fetch_inputs = [&](int at, int stage) {
        const int tile = at / units, unit = at - tile * units;
        copy_box(stages + stage * STAGE_BYTES, &x, unit * 64, tile % row_tiles * ROWS, filled + stage * 8);
      };
      const int early = min(stop, work + STAGES);
      for (int at = work; at < early; ++at) fetch_weight(at, at - work);  // weights may be read before the wait
      wait_for_previous();
      for (int at = work; at < early; ++at) fetch_inputs(at, at - work);
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
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  wait_for_previous();
  int stage = 0, parity = 0, previous = 0;
  float sums[ROWS / 8][4];
  u32 left[2][4][4];  // of this unit and of the one before, which the MMA may still read
  auto release = [&](int which) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(empty + which * 8) : "memory");
  };
  auto multiply_unit = [&](const int buffer, bool is_first) {
    wait_for(filled + stage * 8, parity);
    const u32 inputs = stages + stage * STAGE_BYTES, weights = inputs + ROWS * 128;
    u32 words[4], scale_pair, zero_pair;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(weights + tid * 16) : "memory");
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                 : "=r"(scale_pair), "=r"(zero_pair) : "r"(weights + 8 * TILE_BYTES + warp * TILE_SCALE_BYTES + (lane >> 2) * 8) : "memory");
    zero_pair ^= 0x80008000u;
    const u32 scale[2] = {__byte_perm(scale_pair, 0, 0x1010), __byte_perm(scale_pair, 0, 0x3232)};
    const u32 zero[2] = {__byte_perm(zero_pair, 0, 0x1010), __byte_perm(zero_pair, 0, 0x3232)};
#pragma unroll
    for (int j = 0; j < 4; ++j) dequantize(words[j], left[buffer][j], scale, zero);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // the descriptor of 16 inputs in rows of 128 bytes, swizzled; 1,024 bytes from 8 rows to the next 8
      const u64 right = (u64)((inputs + j * 32) >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
      multiply(sums, left[buffer][j], right, !(is_first && j == 0));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (!is_first) release(previous);
    previous = stage;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
    ++work;
  };

  while (work < stop) {
    const int tile = work / units, unit = work - tile * units, length = min(stop, (tile + 1) * units) - work;
    multiply_unit(0, true);
    int i = 1;
    for (; i + 1 < length; i += 2) {
      multiply_unit(1, false);
      multiply_unit(0, false);
    }
    if (i < length) multiply_unit(1, false);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(previous);
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[j][e]) :: "memory");  // not read before the wait

    bool writes = true;
#if CLUSTERED
    int first = rank, holders = 1;  // which have sums of this tile
    float4* mine = partial + (size_t)blockIdx.x * (ROWS / 8) * CONSUMERS;
    if (length < units && work < stop) {
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) mine[j * CONSUMERS + tid] = *(float4*)sums[j];
      continue;
    }
    bool has_end = false;  // whether the block after the holders left the end of the tile in `partial`
    if (work == stop) {
      arrive_at_cluster();
      int last = rank;
      if (length < units) {
        while (first > 0 && begin_of(first) > tile * units) --first;
        while (last + 1 < blocks && begin_of(last + 2) <= (tile + 1) * units) ++last;
        holders = last - first + 1;
        has_end = begin_of(last + 1) < (tile + 1) * units;
      }
      wait_for_cluster();  // all have read their stages, which sums replace from here on
      const int each = (ROWS / 16 + holders - 1) / holders;
      int owner = first, number = 0;
#pragma unroll
      for (int j = 0; j < ROWS / 8; j += 2) {
        if (owner != rank) {
          const u32 to = stages + ((rank - first - (rank > owner)) * each + number) * SLICE_BYTES + tid * 16;
          send(to, owner, sums[j]);
          send(to + CONSUMERS * 16, owner, sums[j + 1]);
        } else if (has_end) {
          const float4* end = mine + (size_t)((last + 1 - rank) * (ROWS / 8) + j) * CONSUMERS + tid;
          const u32 to = stages + ((holders - 1) * each + number) * SLICE_BYTES + tid * 16;
          copy_later(to, end);
          copy_later(to + CONSUMERS * 16, end + CONSUMERS);
        }
        if (++owner > last) owner = first, ++number;
      }
      arrive_at_cluster();
      asm volatile("cp.async.wait_all;" ::: "memory");
      wait_for_cluster();
    }
#else
    if (length < units) {
      const int begin = (int)((((long long)tile * units + 1) * blocks - 1) / total), end = (int)(((long long)(tile + 1) * units * blocks - 1) / total);
      // a block has at most two parts: one that begins a tile, one that does not
      float4* mine = partial + (size_t)(2 * blockIdx.x + (unit == 0)) * (ROWS / 8) * CONSUMERS;
#pragma unroll
      for (int j = 0; j < ROWS / 8; ++j) mine[j * CONSUMERS + tid] = *(float4*)sums[j];
      __threadfence();
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (tid == 0) arrived = atomicAdd(counter + tile, 1);
      asm volatile("bar.sync 1, 256;" ::: "memory");
      writes = arrived == end - begin;
      if (writes) {
        __threadfence();
        if (tid == 0) counter[tile] = 0;
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) *(float4*)sums[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int b = begin; b <= end; ++b) {
          const float4* part = partial + (size_t)(2 * b + (b == begin)) * (ROWS / 8) * CONSUMERS;
#pragma unroll
          for (int j = 0; j < ROWS / 8; ++j) {
            const float4 value = __ldcg(part + j * CONSUMERS + tid);
            sums[j][0] += value.x, sums[j][1] += value.y, sums[j][2] += value.z, sums[j][3] += value.w;
          }
        }
      }
    }
#endif
    const int output = (tile / row_tiles * 8 + warp) * 16;
    if (writes && output < N) {
      const int first_row = tile % row_tiles * ROWS;
      const u32 staging = stages + STAGES * STAGE_BYTES + warp * 512;  // 16 rows of 16 outputs
      float bias0 = 0.f, bias1 = 0.f;
      if (BIAS) {
        bias0 = widen(bias[output + (lane >> 2)]);
        bias1 = widen(bias[output + 8 + (lane >> 2)]);
      }
#if CLUSTERED
      const int each = (ROWS / 16 + holders - 1) / holders, parts = holders - 1 + has_end;
      int owner = first;
      u32 from = stages + tid * 16;
#endif
#pragma unroll
      for (int j = 0; j < ROWS / 8; j += 2) {
#if CLUSTERED
        const bool is_mine = owner == rank;
        if (++owner == first + holders) owner = first;
        if (!is_mine) continue;
        for (int i = 0; i < parts; ++i) {
          add(sums[j], from + i * each * SLICE_BYTES);
          add(sums[j + 1], from + i * each * SLICE_BYTES + CONSUMERS * 16);
        }
        from += SLICE_BYTES;
#endif
        __syncwarp();
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                     :: "r"(staging + ((lane >> 4) * 8 + (lane & 7)) * 32 + (lane >> 3 & 1) * 16),
                        "r"(narrow_pair(sums[j][0] + bias0, sums[j][1] + bias0)), "r"(narrow_pair(sums[j][2] + bias1, sums[j][3] + bias1)),
                        "r"(narrow_pair(sums[j + 1][0] + bias0, sums[j + 1][1] + bias0)),
                        "r"(narrow_pair(sums[j + 1][2] + bias1, sums[j + 1][3] + bias1)) : "memory");
        __syncwarp();
        uint4 eight;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w) : "r"(staging + lane * 16) : "memory");
        const int row = first_row + j * 8 + (lane >> 1);
        if (row < M) *(uint4*)(out + (size_t)row * N + output + (lane & 1) * 8) = eight;
      }
    }
  }
}
