"""Releases a rank's memory while its engine sleeps, and maps it again at its addresses.

`SleepingRunner` carries out the orders of rank 0 on one rank. Which memory a tag has: "kv_cache",
the KV pool; "weights", the parameters of the models that an update rewrites. Must not know requests
or how a device releases memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from frame.core.blame import explain
from frame.core.interfaces.platform import Platform, SupportsSleep, SupportsStreams
from frame.core.interfaces.runner import MemoryOrder, ModelRunner, WrappedRunner

log = logging.getLogger(__name__)


def tag_memory(is_on: bool, platform: Platform, tag: str) -> contextlib.AbstractContextManager[object]:
    """Inside a with block, what is allocated on the device can be released as `tag`."""
    return platform.tag_allocations(tag) if is_on and isinstance(platform, SupportsSleep) else contextlib.nullcontext()


class SleepingRunner(WrappedRunner):
    """A rank's runner whose memory may be released between two steps. `tensors`: what makes the
    list of a tag's tensors."""

    def __init__(self, runner: ModelRunner, platform: SupportsSleep, tensors: Mapping[str, Callable[[], Sequence[torch.Tensor]]]) -> None:
        super().__init__(runner)
        self._platform = platform
        self._tensors = tensors
        platform.prepare_release(sum(tensor.nbytes for tensor in _list_whole(tensors["weights"]())))

    def change_memory(self, order: MemoryOrder, beat: Callable[[], object]) -> str:
        began = time.perf_counter()
        try:
            if isinstance(self._platform, SupportsStreams):
                self._platform.synchronize()
            size = sum(self._release(tag, drops=tag == "kv_cache" or order.drops_weights, beat=beat) for tag in order.released)
            for tag in order.mapped:
                self._platform.map_tag(tag, _list_whole(self._tensors[tag]()))
                beat()
        except Exception as error:
            log.exception("a change of the memory failed")
            return f"the memory could not be changed: {explain(error)}"
        if order.released or order.mapped:
            tags = " and ".join(order.released or order.mapped)
            what = f"released {size / 2**20:,.0f} MiB of {tags}" if order.released else f"mapped {tags}"
            log.info("%s in %.2f s", what, time.perf_counter() - began)
        return ""

    def _release(self, tag: str, *, drops: bool, beat: Callable[[], object]) -> int:
        size = self._platform.release_tag(tag, _list_whole(self._tensors[tag]()), keeps_values=not drops)
        beat()
        return size


def _list_whole(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are one piece of memory, each once."""
    whole = {tensor.data_ptr(): tensor for tensor in tensors if not tensor.is_mkldnn and tensor.is_contiguous() and tensor.numel()}
    return list(whole.values())
