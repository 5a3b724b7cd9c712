"""`paused_collection`: a block without Python garbage collection. Used where a start imports torch
or the HTTP side, and where CUDA graphs are captured. Must not know what runs in the block."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection(*, collects_first: bool = False) -> Iterator[None]:
    """A block without garbage collection, if it was enabled: imports make many objects and hardly
    any garbage, and freeing memory or graphs of an earlier engine makes CUDA calls that break a
    capture.

    After thousands of new objects, all belong to the oldest generation, so that later collections
    do not traverse them, unless the caller froze some, which would come back. collects_first:
    collect before the block, so that no garbage keeps memory in it. Only the outermost enables.
    """
    if collects_first:
        gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > 5000 and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
