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

from frame.core.interfaces.platform import DeviceEvent, DeviceStream, SupportsStreams

SLOT = 16 << 20  # bytes of a piece
SLOTS = 8


class PeerCopies:
    """One rank's end. `handle`: of `SLOTS * slot` bytes of symmetric memory of two ranks.

    A rank signals a piece after it has added the piece before it. So the signal of piece n says
    that the slot of piece n - 1 may be written again, and `SLOTS - 1` pieces can be on the way.
    """

    def __init__(self, handle: Any, rank: int, platform: SupportsStreams, slot: int = SLOT) -> None:
        self._platform, self._stream = platform, platform.create_stream()
        self._handle, self._peer, self._slot = handle, 1 - rank, slot
        self._remote, self._local = (handle.get_buffer(each, (SLOTS, slot), torch.uint8) for each in (1 - rank, rank))
        self._count = 0  # pieces of all calls

    def sum(self, chunks: Iterable[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """The sum of both ranks' `parts`, which follow each other in `out` and are contiguous;
        rounded once, the same bits on both ranks. -> `out`.

        A part is sent while the iterator computes the next one.
        """
        current, maximum = self._platform.get_current_stream(), self._slot // out.itemsize
        pieces: list[torch.Tensor] = []
        sent: list[DeviceEvent] = []
        for chunk in chunks:
            self._stream.wait_stream(current)
            pieces += chunk.view(-1).split(maximum)
            sent += [self._send(pieces[number], number) for number in range(len(sent), min(len(pieces), SLOTS - 1))]
        results = out.view(-1).split([len(piece) for piece in pieces])
        for number, (piece, result) in enumerate(zip(pieces, results, strict=True)):
            slot = (self._count + number) % SLOTS
            current.wait_event(sent[number])  # also: nothing reads the parts when the call ends
            self._handle.put_signal(self._peer, slot)
            self._handle.wait_signal(self._peer, slot)
            if len(sent) < len(pieces):
                self._stream.wait_event(self._record(current))
                sent.append(self._send(pieces[len(sent)], len(sent)))
            torch.add(piece, self._local[slot][: piece.nbytes].view(piece.dtype), out=result)
        self._count += len(pieces)
        return out

    def _send(self, piece: torch.Tensor, number: int) -> DeviceEvent:
        """Copy a piece of this call to the other rank. -> the event of its end."""
        with self._platform.use_stream(self._stream):
            self._remote[(self._count + number) % SLOTS][: piece.nbytes].copy_(piece.view(torch.uint8), non_blocking=True)
        return self._record(self._stream)

    def _record(self, stream: DeviceStream) -> DeviceEvent:
        """An event after what `stream` has to do."""
        event = self._platform.create_event()
        event.record(stream)
        return event
