"""Messages between the engine and the processes that call grammars survive their encoding."""

from __future__ import annotations

import msgspec
import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.structured_output.call_messages import (
    Accepted,
    AcceptTokens,
    Call,
    DropGrammar,
    EndRequest,
    Filled,
    FillMasks,
    HoldRequest,
    PollHeld,
    ReleaseRequest,
    StartRequest,
    pack,
    unpack,
)


def test_calls_of_a_step_are_read_as_they_were_written() -> None:
    calls: list[Call] = [
        StartRequest(3, 7, SamplingParams(regex="x", logprobs=2), pack([5, 6]), 40, (1, 2), 5.0, 0.25),
        EndRequest(4),
        DropGrammar(7),
        HoldRequest(3),
        ReleaseRequest(3),
        AcceptTokens(pack([3]), pack([9]), 2),
        FillMasks(pack([3, 1]), pack([0, 200]), 2, 256),
        PollHeld(),
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(calls), type=list[Call]) == calls


def test_replies_are_read_as_they_were_written() -> None:
    for reply in (
        Accepted({2: Finish("stop"), 0: Finish("error", error="no", code="invalid_grammar")}, {7: 123}),
        Filled({3: [1, 2]}, [4]),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=type(reply)) == reply


def test_numbers_are_int32() -> None:
    assert unpack(pack([0, 1 << 30])).tolist() == [0, 1 << 30] and unpack(pack([])).dtype == np.int32
