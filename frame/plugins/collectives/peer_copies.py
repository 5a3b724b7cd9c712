"""Sums of large tensors of two GPUs: each rank copies its tensor to the other by the copy engine,
which uses the whole link and no multiprocessor.

The tensor goes in pieces through a ring of slots in the other rank's memory, so that a rank adds a
piece while the next ones are on the way. The collective `p2p` uses it. Host code counts the pieces,
so a call must not be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from frame.core.interfaces.platform import DeviceStream, SupportsStreams

SLOT = 16 << 20  # bytes of a piece
SLOTS = 8
_MAX_VIEWS = 1024  # that are kept


class PeerCopies:
    """One rank's end. `handle`: of `SLOTS * slot` bytes of symmetric memory of two ranks.

    A rank signals a piece after it has added the piece before it. So the signal of piece n says
    that the slot of piece n - 1 may be written again, and `SLOTS - 1` pieces can be on the way.
    Events and views of slots are made once: where layers are narrow, the host's time for sums is a
    large part of a step's.
    """

    def __init__(self, handle: Any, rank: int, platform: SupportsStreams, slot: int = SLOT) -> None:
        self._platform, self._stream = platform, platform.create_stream()
        self._handle, self._peer, self._slot = handle, 1 - rank, slot
        self._memories = [handle.get_buffer(each, (SLOTS, slot), torch.uint8) for each in (1 - rank, rank)]
        self._views: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._begun, *self._sent = (platform.create_event() for _ in range(SLOTS + 1))
        self._count = 0  # pieces of all calls

    def sum(self, chunks: Iterable[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """The sum of both ranks' `chunks`, which follow each other in `out` and are contiguous;
        rounded once, the same bits on both ranks. -> `out`.

        A chunk is sent while the iterator computes the next one.
        """
        current, maximum = self._platform.get_current_stream(), self._slot // out.itemsize
        pieces: list[torch.Tensor] = []
        sent = 0
        for chunk in chunks:
            pieces += chunk.view(-1).split(maximum)
            sent = self._send(pieces, sent, min(len(pieces), SLOTS - 1), current)
        results = out.view(-1).split([len(piece) for piece in pieces])
        for number, (piece, result) in enumerate(zip(pieces, results, strict=True)):
            slot = (self._count + number) % SLOTS
            current.wait_event(self._sent[slot])  # also: nothing reads the chunks when the call ends
            self._handle.put_signal(self._peer, slot)
            self._handle.wait_signal(self._peer, slot)
            if sent < len(pieces):
                sent = self._send(pieces, sent, sent + 1, current)
            torch.add(piece, self._view_slot(slot, piece)[1], out=result)
        self._count += len(pieces)
        return out

    def _send(self, pieces: list[torch.Tensor], first: int, end: int, current: DeviceStream) -> int:
        """Copy the pieces from `first` to `end` of this call to the other rank, after what is
        queued on `current`. -> `end`."""
        self._begun.record(current)
        self._stream.wait_event(self._begun)
        with self._platform.use_stream(self._stream):
            for number in range(first, end):
                slot = (self._count + number) % SLOTS
                self._view_slot(slot, pieces[number])[0].copy_(pieces[number], non_blocking=True)
                self._sent[slot].record(self._stream)
        return end

    def _view_slot(self, slot: int, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A slot of the other rank's memory and of this one's, in the form of `piece`."""
        key = slot, len(piece), piece.dtype
        if key not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            remote, local = (memory[slot, : piece.nbytes].view(piece.dtype) for memory in self._memories)
            self._views[key] = remote, local
        return self._views[key]
