// Copies into shared memory by TMA, and the barriers that they complete on. Follows `common.cuh`.

struct __align__(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  asm volatile("{.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:}"
               :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// a box of a tensor map from column and row on
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
