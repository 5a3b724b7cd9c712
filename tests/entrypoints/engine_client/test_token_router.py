"""A step's tokens, texts and finishes reach the state of their sequences; those of unknown
sequences are skipped."""

from __future__ import annotations

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, StepText, StepTokens, TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.stats import ClientStats
from frame.entrypoints.engine_client.token_router import TokenRouter


def test_a_step_reaches_each_sequence() -> None:
    request, stats, ended = RequestState("a"), ClientStats(), []
    sequences = {name: SequenceState(request, i, 0, name, [5], SamplingParams()) for i, name in enumerate(("a-0", "a-1"))}
    request.sequences = list(sequences.values())
    router = TokenRouter(sequences, stats, lambda sequence, finish, now: ended.append((sequence.rid, finish.reason)))
    touched: list[RequestState] = []
    first = StepText(
        rids=["a-0", "gone", "a-1"], texts=["x", "?", "y"], token_ids=[[1], [9], [2]], finishes={1: Finish("stop")},
        num_cached_tokens={0: 4, 1: 0, 2: 0}, prompt_logprobs={2: TokenLogprobs([5], [None], [[]])},
    )  # fmt: skip
    router.route_step(first, first.texts, touched)
    second = StepText(rids=["a-0"], texts=["z"], token_ids=[[3, 4]], finishes={0: Finish("length")})
    router.route_step(second, second.texts, touched)
    assert touched == [request]  # once, until its handler has read it
    assert request.changed == request.sequences
    assert [sequence.take_output()[:2] for sequence in request.sequences] == [("xz", [1, 3, 4]), ("y", [2])]
    assert ended == [("a-0", "length")] and list(sequences) == ["a-1"]
    assert (request.sequences[0].cached, stats.cached_tokens, stats.generated_tokens) == (4, 4, 4)
    assert stats.computed_tokens == 1  # of a-1
    more = StepText(rids=["a-1"], texts=[""], token_ids=[[]], prompt_logprobs={0: TokenLogprobs([6], [-1.0], [[]])})
    router.route_step(more, more.texts, touched)
    assert request.sequences[1].prompt_logprobs == TokenLogprobs([5, 6], [None, -1.0], [[], []])


def test_vectors_have_no_text() -> None:
    request = RequestState("a")
    sequences = {"a": SequenceState(request, 0, 0, "a", [5], SamplingParams())}
    request.sequences = list(sequences.values())
    router = TokenRouter(sequences, ClientStats(), lambda sequence, finish, now: None)
    router.route_step(StepTokens(rids=["a"], token_ids=[[]], finishes={0: Finish("stop")}, pooled={0: b"1234"}), None, [])
    assert request.vectors == {0: b"1234"} and not sequences
