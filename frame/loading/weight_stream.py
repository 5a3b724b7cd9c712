"""`WeightStream`: reads tensors from ranges of files ahead of their use, with several threads.

Threads read into CPU memory directly, and into GPU memory through page-locked buffers, whose copies
run while the next piece is read. Used by `weight_reader`. Must not know models or file formats.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.platform import DeviceEvent, Platform, SupportsStreams
from frame.interfaces.weights import FileRange

THREADS = 8
PIECE = 16 << 20  # bytes that a thread reads at a time
AHEAD = 512 << 20  # bytes that are read before they are requested


def cut_rows(place: FileRange, rows: slice | None) -> FileRange:
    """The range of these rows of the first dimension; None: all rows."""
    if rows is None or not place.shape:
        return place
    start, stop, _ = rows.indices(place.shape[0])
    row_bytes = math.prod(place.shape[1:]) * place.dtype.itemsize
    return FileRange(place.path, place.dtype, (max(0, stop - start), *place.shape[1:]), place.offset + start * row_bytes)


def count_bytes(place: FileRange) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


class WeightStream:
    """A pool of reading threads. A context manager: leaving it stops the threads."""

    def __init__(self, platform: Platform, threads: int | None = None) -> None:
        self._platform = platform
        self._streams = platform if isinstance(platform, SupportsStreams) else None
        self._pool = ThreadPoolExecutor(threads or min(THREADS, os.cpu_count() or 1), thread_name_prefix="weights")
        self._thread = threading.local()
        self._files: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        if self._streams is not None:
            self._streams.synchronize()  # copies from the threads' buffers must be done before these are freed

    def read(self, places: Iterable[FileRange]) -> Iterator[torch.Tensor]:
        """Yield the tensors, in order, on the device; up to `AHEAD` bytes are read in advance."""
        waiting: deque[tuple[torch.Tensor, list[Future[Any]], FileRange]] = deque()
        ahead, rest, is_over = 0, iter(places), False
        while waiting or not is_over:
            while not is_over and (ahead < AHEAD or not waiting):
                place = next(rest, None)
                if place is None:
                    is_over = True
                else:
                    waiting.append(self._begin(place))
                    ahead += count_bytes(place)
            if waiting:
                tensor, pieces, place = waiting.popleft()
                for piece in pieces:
                    copied = piece.result()
                    if copied is not None and self._streams is not None:
                        self._streams.get_current_stream().wait_event(copied)
                ahead -= count_bytes(place)
                yield tensor.view(place.dtype).view(place.shape)

    def _begin(self, place: FileRange) -> tuple[torch.Tensor, list[Future[Any]], FileRange]:
        if place.path not in self._files:
            self._files[place.path] = os.open(place.path, os.O_RDONLY)
        file = self._files[place.path]
        target = torch.empty(count_bytes(place), dtype=torch.uint8, device=self._platform.device)
        freed = None
        if self._streams is not None:  # a kernel on this stream may still read the tensor that had this memory before
            freed = self._streams.create_event()
            freed.record(self._streams.get_current_stream())
        pieces = [
            self._pool.submit(self._fetch, file, place, start, target[start : start + PIECE], freed)
            for start in range(0, count_bytes(place), PIECE)
        ]
        return target, pieces, place

    def _fetch(self, file: int, place: FileRange, start: int, target: torch.Tensor, freed: DeviceEvent | None) -> DeviceEvent | None:
        """Read one piece; runs in a thread. -> on a GPU, the event of its copy."""
        if freed is None or self._streams is None:
            _read_into(file, place, start, target)
            return None
        lane: Lane | None = getattr(self._thread, "lane", None)
        if lane is None:
            self._platform.activate()  # for this thread: page-locked memory belongs to a device's context
            lane = self._thread.lane = Lane(self._streams)
        return lane.copy(file, place, start, target, freed)


class Lane:
    """One thread's stream to a GPU, with two page-locked buffers: one is filled while the other one
    is copied."""

    def __init__(self, platform: SupportsStreams) -> None:
        self._platform = platform
        self._stream = platform.create_stream()
        self._buffers = [platform.allocate_pinned((PIECE,), torch.uint8) for _ in range(2)]
        self._copied: list[DeviceEvent | None] = [None, None]
        self._turn = 0

    def copy(self, file: int, place: FileRange, start: int, target: torch.Tensor, freed: DeviceEvent) -> DeviceEvent:
        self._turn ^= 1
        before = self._copied[self._turn]
        if before is not None:
            before.synchronize()
        buffer = self._buffers[self._turn][: target.numel()]
        _read_into(file, place, start, buffer)
        copied = self._platform.create_event()
        with self._platform.use_stream(self._stream):
            self._stream.wait_event(freed)
            target.copy_(buffer, non_blocking=True)
            copied.record(self._stream)
        self._copied[self._turn] = copied
        return copied


def _read_into(file: int, place: FileRange, start: int, target: torch.Tensor) -> None:
    """Read bytes of a tensor, from `start` on, into host memory. Raises CheckpointError if the file
    ends early."""
    view = memoryview(target.numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], place.offset + start + done)
        if not count:
            raise CheckpointError(f"{place.path} became shorter while it was read: download it again.")
        done += count
