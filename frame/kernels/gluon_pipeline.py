# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Shared-memory pipeline of the Gluon kernels (compute capability 9.0): stages, barriers, MMA loop.

A producer warp fills `STAGES` stages of shared memory in turn; consumer warp groups multiply them
(warp specialization, as in CUTLASS's and FlashAttention-3's producer-consumer kernels). An item is
one stage: a tile of inputs and the tile of weights for it. Used by `gated_prefill` and
`expert_prefill`; depends on no kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def view(buffer, place, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """`buffer` from stage `place` on, seen as one [HEIGHT, WIDTH] tile that may span several
    stages."""
    return buffer.index(place)._reinterpret(buffer.dtype, [HEIGHT, WIDTH], buffer.layout)  # noqa: SLF001 - Gluon has no public function


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate two barriers for each stage. `ready` completes after PRODUCERS arrivals, `free`
    after CONSUMERS arrivals."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=PRODUCERS)
        mbarrier.init(free.index(i), count=CONSUMERS)
    return ready, free


@gluon.jit
def multiply_items(x, w, ready, free, item, steps, CONSUMER: gl.constexpr):
    """Sum of x_tile @ w_tile.T over `steps` items, starting at `item` -> float32 [64, 256].

    Computed by one consumer group (four warps) for its 64 rows; CONSUMER is 0 or 1. Each item has
    64 inputs. The MMA of an item overlaps the wait for the next one.
    """
    STAGES: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    sums = gl.zeros([64, 256], gl.float32, layout)
    for k in range(steps):
        stage = item % STAGES
        mbarrier.wait(ready.index(stage), item // STAGES & 1)
        sums = warpgroup_mma(x.index(stage * 2 + CONSUMER), view(w, stage * 2, 256, 64).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))  # the previous item's MMA has completed: release its stage
        mbarrier.arrive(free.index((item + STAGES - 1) % STAGES), count=1, pred=k > 0)
        item += 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(free.index((item + STAGES - 1) % STAGES), count=1)
    return sums
