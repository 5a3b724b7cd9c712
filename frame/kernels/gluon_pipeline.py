# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Items on their way through shared memory, as the Gluon kernels of this folder have them: places, barriers, products of four warps.

An item is a part of a product's inputs, with the weights for it, in one of `STAGES` places that are used in turn. Knows no kernel, and not
who fetches what.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def view(buffer, place, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """[HEIGHT, WIDTH] from `place` on, however many of the buffer's pieces those are."""
    return buffer.index(place)._reinterpret(buffer.dtype, [HEIGHT, WIDTH], buffer.layout)  # noqa: SLF001  (there is no other way)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Two a stage: that its item is there, after so many arrivals, and that so many are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=PRODUCERS)
        mbarrier.init(free.index(i), count=CONSUMERS)
    return ready, free


@gluon.jit
def multiply_items(x, w, ready, free, item, steps, PART: gl.constexpr):
    """The sums [64, 256] of so many items from `item` on, of their 64 rows number `PART` and all of their weights."""
    STAGES: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    sums = gl.zeros([64, 256], gl.float32, layout)
    for k in range(steps):
        stage = item % STAGES
        mbarrier.wait(ready.index(stage), item // STAGES & 1)
        sums = warpgroup_mma(x.index(stage * 2 + PART), view(w, stage * 2, 256, 64).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))  # the item before this one is done with
        mbarrier.arrive(free.index((item + STAGES - 1) % STAGES), count=1, pred=k > 0)
        item += 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(free.index((item + STAGES - 1) % STAGES), count=1)
    return sums
