"""The messages that admit a sequence: the first time as it was submitted, and again with what it has."""

from __future__ import annotations

import time

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate, TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.resubmission import SHORTEST, generate_of, watch_of

PARAMS = SamplingParams(max_tokens=9, seed=3, prompt_logprobs=1)


def submitted(seconds: float) -> SequenceState:
    sequence = SequenceState(RequestState("r"), 0, 0, "r", [1, 2, 3], PARAMS)
    sequence.standing.message = Generate(rid="r", token_ids=[1, 2, 3], params=PARAMS, namespace="salt")
    sequence.standing.expires = time.monotonic() + seconds
    return sequence


def test_first_and_again() -> None:
    sequence = submitted(100.0)
    first = generate_of(sequence)
    assert (first.rid, first.token_ids, first.output_len, first.namespace) == ("r", [1, 2, 3], 0, "salt")
    sequence.standing.admissions = 1
    sequence.standing.name = "r~2"
    sequence.standing.output.extend([7, 8])
    again = generate_of(sequence)
    assert (again.rid, again.token_ids, again.output_len, again.namespace) == ("r~2", [1, 2, 3, 7, 8], 2, "salt")
    assert again.params == PARAMS  # the engine died before it told the prompt's logprobs
    sequence.prompt_logprobs = TokenLogprobs([1, 2, 3], [None, -1.0, -2.0], [[], [], []])
    assert generate_of(sequence).params.prompt_logprobs is None
    watch = watch_of(sequence, again)
    assert (watch.rid, watch.prompt_tail, watch.token_ids) == ("r~2", [1, 2, 3], [7, 8])


@pytest.mark.parametrize("admissions", [0, 1])
def test_what_is_left_of_its_time(admissions: int) -> None:
    waited, late = submitted(10.0), submitted(-1.0)
    waited.standing.admissions = late.standing.admissions = admissions
    assert 0 < (generate_of(waited).deadline or 0) <= 10.0
    assert generate_of(late).deadline == SHORTEST


def test_a_sequence_that_was_never_submitted() -> None:
    with pytest.raises(RuntimeError, match="r was never submitted"):
        generate_of(SequenceState(RequestState("r"), 0, 0, "r", [1], PARAMS))
