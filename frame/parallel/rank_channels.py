"""What the ranks of one model send each other: rank 0's batches and orders, the replies to orders,
and results from the rank that samples to rank 0 where these are two ranks (pipelines).

Plain MessagePack with a hook for arrays; nothing is pickled. Must not know a model or a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import AdapterOrder, MemoryOrder, ProfileRequest, TierOrder, TransferOrder, WeightOrder
from frame.core.ipc.transport import DECODE_ERRORS, open_pull, open_push

log = logging.getLogger(__name__)


def encode_array(value: Any) -> Any:
    """An array as (dtype, shape, raw bytes): the hook of encoders."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b"")
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to another rank")


def decode_array(kind: type, value: Any) -> Any:
    """The hook of decoders for `encode_array`. The array owns its memory."""
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be received from another rank")
    dtype, shape, data = value
    parsed = np.dtype(dtype)
    if parsed.hasobject:
        raise TypeError(f"dtype {dtype} is not plain data")
    return np.frombuffer(data, dtype=parsed).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_batch_decoder = msgspec.msgpack.Decoder(ScheduledBatch, dec_hook=decode_array)


def encode_batch(batch: ScheduledBatch) -> bytes:
    """The batch as MessagePack; an array is (dtype, shape, raw bytes)."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> ScheduledBatch:
    """Decode a batch; its arrays own their memory. Raises msgspec.ValidationError."""
    return _batch_decoder.decode(data)


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Order to the followers: start a profile, or (None) stop it."""

    request: ProfileRequest | None


class Traced(msgspec.Struct, frozen=True, tag=True):
    """Notice to the followers: a traced request ended; its spans belong below `trace`, a W3C
    traceparent."""

    rid: str
    trace: str


class SwitchBackend(msgspec.Struct, frozen=True, tag=True):
    """Order to the followers: call `ModelRunner.switch_backend`."""


class GrammarMask(msgspec.Struct, frozen=True, tag=True):
    """Order to the rank that samples: the mask of the last batch, which has
    `has_deferred_grammar_mask`. `group`: the attention group whose mask it is."""

    mask: np.ndarray | None
    group: int = 0


class OrderReply(msgspec.Struct, frozen=True):
    """A follower's reply to order `number`. `error`: one sentence; empty if the order was carried
    out. `num_blocks`: see `TierReply`."""

    rank: int
    number: int
    error: str = ""
    num_blocks: int = 0


@dataclass(slots=True)
class Replies:
    """The replies to an order so far."""

    silent: set[int]  # ranks that have not replied
    problems: list[str] = field(default_factory=list)
    num_blocks: int | None = None  # the minimum of all ranks


Order = Profile | Traced | SwitchBackend | GrammarMask | AdapterOrder | WeightOrder | TransferOrder | MemoryOrder
AnyOrder = Order | TierOrder
BATCH, ORDER = b"batch", b"order"  # the second frame of what rank 0 sends; the first is the data, the third an order's number
REPLY_TIMEOUT = 30.0  # seconds that a follower may take to reply
REPLY_POLL = 0.1  # seconds between two beats while replies are awaited
_order_decoder: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder, dec_hook=decode_array)
_reply_decoder = msgspec.msgpack.Decoder(OrderReply)


class BatchSender:
    """Rank 0's side: sends the same bytes to every follower (ranks 1 and up), in order. A single
    empty frame means stop. Followers reply to the address `replies`."""

    def __init__(self, addresses: list[str], replies: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sockets = [open_push(self._context, address) for address in addresses]
        self._replies = open_pull(self._context, replies)
        self._number = 0
        self._waiting: dict[int, Replies] = {}  # by order

    def send(self, batch: ScheduledBatch) -> None:
        self._send_all(encode_batch(batch), BATCH)

    def send_order(self, order: AnyOrder) -> None:
        """Send an order to the followers, in order with the batches."""
        self._number += 1
        self._send_all(_encoder.encode(order), ORDER, str(self._number).encode())

    def ask(self, order: Order, timeout: float = REPLY_TIMEOUT) -> list[str]:
        """Send an order and wait for every follower's reply, up to `timeout` seconds. -> one
        sentence for each rank that failed."""
        self.send_order(order)
        return self.collect_replies(timeout)

    def collect_replies(self, timeout: float, beat: Callable[[], object] = int) -> list[str]:
        """Wait for every follower's reply to the last order, as `ask`; calls `beat` meanwhile."""
        number, until = self.await_replies(), time.monotonic() + timeout
        replies = self._waiting[number]
        while replies.silent and (left := until - time.monotonic()) > 0:
            self._receive_reply(int(1000 * min(left, REPLY_POLL)) + 1)
            beat()
        self.forget_replies(number)
        return replies.problems + [f"rank {rank} did not answer within {timeout:g} s" for rank in sorted(replies.silent)]

    def await_replies(self, ranks: Iterable[int] | None = None) -> int:
        """Note that every follower, or each of `ranks`, replies to the last order. -> its
        number."""
        self._waiting[self._number] = Replies(set(range(1, len(self._sockets) + 1) if ranks is None else ranks))
        return self._number

    def poll_replies(self, number: int) -> list[str] | None:
        """One sentence for each rank that failed to carry out an order; None: some have not
        replied yet."""
        self.receive_replies()
        replies = self.take_replies(number)
        return None if replies is None else replies.problems

    def receive_replies(self) -> None:
        """Receive the replies that have come."""
        while self._receive_reply(0):
            pass

    def take_replies(self, number: int) -> Replies | None:
        """The replies to an order, of those received; None: some ranks have not replied yet."""
        return None if self._waiting[number].silent else self._waiting.pop(number)

    def forget_replies(self, number: int) -> None:
        """Nothing waits for the replies to this order any more."""
        self._waiting.pop(number, None)

    def _receive_reply(self, milliseconds: int) -> bool:
        """Receive one reply. -> False: none came in time."""
        if not self._replies.poll(milliseconds):
            return False
        data = self._replies.recv()
        try:
            reply = _reply_decoder.decode(data)
        except DECODE_ERRORS as error:
            log.warning("dropped %d received bytes that are no reply: %s", len(data), error)
            return True
        replies = self._waiting.get(reply.number)
        if replies is not None and reply.rank in replies.silent:
            replies.silent.remove(reply.rank)
            replies.problems += [f"rank {reply.rank}: {reply.error}"] if reply.error else []
            replies.num_blocks = reply.num_blocks if replies.num_blocks is None else min(replies.num_blocks, reply.num_blocks)
        return True

    def close(self) -> None:
        """Tell the followers to stop."""
        self._send_all(b"")
        for socket in self._sockets:
            socket.close()
        self._replies.close(linger=0)
        self._context.term()

    def _send_all(self, *frames: bytes) -> None:
        for socket in self._sockets:
            socket.send_multipart(frames)


class BatchReceiver:
    """The side of the follower `rank`."""

    def __init__(self, address: str, rank: int, replies: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = open_pull(self._context, address)
        self._replies = open_push(self._context, replies)
        self._rank = rank
        self._number = 0  # of the last order

    def receive(self) -> ScheduledBatch | AnyOrder | None:
        """Wait for the next batch or order; None when rank 0 stops.

        Messages without rank 0's framing are dropped. Raises RuntimeError for a batch or order that
        cannot be decoded: rank 0 waits in a collective operation for this rank, so the process must
        end.
        """
        while True:
            data, *rest = self._socket.recv_multipart()
            if not data and not rest:
                return None
            try:
                if rest == [BATCH]:
                    return decode_batch(data)
                if len(rest) == 2 and rest[0] == ORDER:
                    self._number = int(rest[1])
                    return _order_decoder.decode(data)
            except (*DECODE_ERRORS, ValueError, TypeError) as error:
                raise RuntimeError(f"rank 0 sent a batch or order that cannot be decoded, so this rank cannot continue: {error}") from error
            log.warning("dropped %d received bytes that are no batch", len(data))

    @property
    def order_number(self) -> int:
        """That of the last order."""
        return self._number

    def wait_message(self, milliseconds: int) -> bool:
        """Whether a message comes in this time."""
        return bool(self._socket.poll(milliseconds))

    def reply(self, error: str = "", number: int | None = None, num_blocks: int = 0) -> None:
        """Answer an order, by default the last one: carried out, or the error."""
        number = self._number if number is None else number
        self._replies.send(msgspec.msgpack.encode(OrderReply(self._rank, number, error, num_blocks)))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._replies.close()
        self._context.term()


# results of steps ---------------------------------------------------------------------------------

RESULT, FAILURE = b"result", b"failure"
_result_decoder = msgspec.msgpack.Decoder(StepResult, dec_hook=decode_array)


def encode_result(result: StepResult) -> bytes:
    """The result as MessagePack."""
    return _encoder.encode(result)


def decode_result(data: bytes) -> StepResult:
    """Decode a result; its arrays own their memory. Raises msgspec.ValidationError."""
    return _result_decoder.decode(data)


class ResultSender:
    """The side of the rank that samples. Used by one thread."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = open_push(self._context, address)

    def send(self, result: StepResult) -> None:
        self._socket.send_multipart((RESULT, encode_result(result)))

    def send_failure(self, error: str) -> None:
        """Tell rank 0 that a step failed: one sentence."""
        self._socket.send_multipart((FAILURE, error.encode()))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ResultReceiver:
    """Rank 0's side."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = open_pull(self._context, address)

    def receive(self, step: int) -> StepResult:
        """Wait for the result of a step; results come in the order of the steps. Raises
        RuntimeError for a step that failed, or the result of another step."""
        kind, data = self._socket.recv_multipart()
        if kind == FAILURE:
            raise RuntimeError(data.decode(errors="replace"))
        result = decode_result(data)
        if result.step != step:
            raise RuntimeError(f"the result of step {result.step} came where that of step {step} was expected")
        return result

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
