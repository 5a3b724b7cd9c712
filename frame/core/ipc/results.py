"""Results of steps, from the rank that samples to rank 0 where these are two ranks (pipelines).

A message has two frames: its kind, and a MessagePack `StepResult` or the sentence of a failure.
Must not know a model or a request.
"""

from __future__ import annotations

import msgspec
import zmq

from frame.core.interfaces.batch import StepResult
from frame.core.ipc.transport import decode_array, encode_array, open_pull, open_push

RESULT, FAILURE = b"result", b"failure"
_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(StepResult, dec_hook=decode_array)


def encode_result(result: StepResult) -> bytes:
    """The result as MessagePack."""
    return _encoder.encode(result)


def decode_result(data: bytes) -> StepResult:
    """Decode a result; its arrays own their memory. Raises msgspec.ValidationError."""
    return _decoder.decode(data)


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
