"""Python's garbage collection during the imports of a start, which make many objects and hardly any
garbage. Used where torch or the HTTP side is imported. Must not know what is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """A block of imports without garbage collection, if it was enabled. At its end all objects
    belong to the oldest generation, so that the next collections do not traverse them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else the caller's frozen objects would come back
                gc.freeze()
                gc.unfreeze()
            gc.enable()
