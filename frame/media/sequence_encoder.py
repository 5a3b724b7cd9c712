"""`SequenceEncoder`: the media of encoder-decoder models (Whisper) in the scheduler.

Implements `RequestMedia`. A request has one item, without placeholders, which is encoded in the
step with its first chunk each time that it enters the device: the keys and values go to the block
of its slot. Must not know the block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from frame.core.interfaces.media import EncodeOrder
from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.core.scheduling.running import StepPlan
from frame.core.scheduling.step_features import NoMedia
from frame.media.checks import DIGEST_BYTES, refuse

_NO_ITEM = "the model writes text for an audio input, and the request has none; use the route audio/transcriptions or Engine.transcribe"
_NO_ROWS = np.empty(0, np.int32)


class SequenceEncoder(NoMedia):
    """Implements `RequestMedia`: chunks wait for nothing, and a request that a failed step had is
    encoded again when it enters the device anew."""

    def __init__(self) -> None:
        self._encoded: set[Request] = set()  # on the device
        self._orders: list[EncodeOrder] = []
        self._num_encoded = 0

    def start_request(self, request: Request) -> Finish | None:
        """A request arrives. Its decoder's keys and values depend on the item: the digest becomes a
        part of its namespace."""
        if not request.media:
            return Finish("error", error=_NO_ITEM, code="invalid_request", param="prompt")
        item = request.media[0]
        if len(request.media) > 1 or item.runs or len(item.digest) != DIGEST_BYTES:
            return refuse("the model reads one audio input, which has no placeholders; use the route audio/transcriptions")
        owner, colon, salt = request.namespace.partition(":")
        owner, salt = (owner, salt) if colon else ("", owner)
        request.namespace = f"{owner}:{salt}#{item.digest.hex()}"
        return None

    def schedule_chunk(self, request: Request, start: int, count: int, step: int) -> None:
        if request not in self._encoded:
            self._encoded.add(request)
            self._orders.append(EncodeOrder(request.media[0], _NO_ROWS, request.slot))
            self._num_encoded += 1

    def release(self, request: Request) -> None:
        self._encoded.discard(request)

    def take_inputs(self, plan: StepPlan, num_tokens: int) -> dict[str, Any]:
        orders, self._orders = self._orders, []
        return {"encodes": orders} if orders else {}

    def describe_load(self) -> dict[str, Any]:
        return {"media_encoded": self._num_encoded}
