"""The process's side of grammar calls: faults of one request's grammar end that request alone."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.structured_output.call_messages import (
    Accepted,
    AcceptTokens,
    Call,
    EndRequest,
    Filled,
    FillMasks,
    Loaded,
    LoadGrammar,
    StartRequest,
    pack,
)
from frame.structured_output.served_calls import ServedCalls
from tests.core.scheduling.scripted_grammar import Free, Script
from tests.structured_output.local_process import ByName

VOCAB = 40


def raises() -> Any:
    raise OSError("no matcher")


BACKEND = ByName({"free": Free, "script": lambda: Script([1, 2, 1], VOCAB), "raises": raises})


def make_served() -> tuple[ServedCalls, np.ndarray, dict[str, int]]:
    masks = np.zeros((2, 8, 2), np.int32)
    served, numbers = ServedCalls(BACKEND, masks, VOCAB, 1, None), {}
    for number, name in enumerate(BACKEND.compiled):
        reply = served.load_grammar(msgspec.msgpack.encode(LoadGrammar(number, "regex", name, b"")))
        loaded = msgspec.msgpack.decode(reply, type=Loaded)
        assert loaded.num_bytes == 1000 and not loaded.error and loaded.seconds >= 0
        numbers[name] = number
    return served, masks, numbers


def ask(served: ServedCalls, *calls: Call, kind: Any = None) -> Any:
    replies: list[bytes] = []
    served.answer(msgspec.msgpack.encode(list(calls)), replies.append)
    assert len(replies) == (kind is not None)
    return None if kind is None else msgspec.msgpack.decode(replies[0], type=kind)


def start(number: int, compiled: int, output: list[int] | None = None) -> StartRequest:
    return StartRequest(number, compiled, SamplingParams(regex="x"), pack(output or []), 40, (), 5.0, 0.0)


def test_masks_are_written_to_their_rows() -> None:
    served, masks, numbers = make_served()
    fill = FillMasks(pack([70, 0]), pack([5, 2]), 1, 8)
    assert ask(served, start(70, numbers["script"]), start(0, numbers["free"]), fill, kind=Filled) == Filled({}, [])
    assert (
        masks[1, 5].tolist() == [1 << 3, 0] and masks[1, 2].tolist() == [-1, -1] and not masks[0].any() and not masks[1, [0, 1, 3, 4]].any()
    )
    served.close()


def test_a_request_that_cannot_begin_ends_at_its_first_token() -> None:
    served, masks, numbers = make_served()
    served.load_grammar(msgspec.msgpack.encode(LoadGrammar(9, "regex", "free", b"")))
    calls = [start(0, numbers["raises"]), start(1, numbers["script"], output=[30]), start(2, 55), start(3, numbers["free"])]
    ask(served, *calls, FillMasks(pack([0, 1, 2, 3]), pack([0, 1, 2, 3]), 0, 4), kind=Filled)
    assert (masks[0, :4] == -1).all()
    accepted = ask(served, AcceptTokens(pack([0, 1, 2, 3]), pack([5, 5, 5, 5]), 4), kind=Accepted)
    assert sorted(accepted.ends) == [0, 1, 2] and "no matcher" in accepted.ends[0].error and "breaks" in accepted.ends[1].error
    again = ask(served, EndRequest(0), start(0, numbers["free"]), AcceptTokens(pack([0]), pack([5]), 1), kind=Accepted)
    assert again.ends == {}  # the number is used again
    served.close()


def test_the_engine_gets_the_sizes_that_have_changed(monkeypatch: Any) -> None:
    served, _, numbers = make_served()
    monkeypatch.setattr("frame.structured_output.served_calls.REREAD", 0.0)
    ask(served, start(0, numbers["free"]))
    assert ask(served, AcceptTokens(pack([0]), pack([5]), 1), kind=Accepted).sizes == {}
    monkeypatch.setattr(BACKEND.compiled["free"], "num_bytes", 5000)
    assert ask(served, AcceptTokens(pack([0]), pack([5]), 1), kind=Accepted).sizes == {numbers["free"]: 5000}
    assert ask(served, AcceptTokens(pack([0]), pack([5]), 1), kind=Accepted).sizes == {}
    served.close()
