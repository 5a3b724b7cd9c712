"""What a message brings is found where the handlers look for it; what nobody waits for is passed over."""

from __future__ import annotations

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, StepText, StepTokens, TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.stats import ClientStats
from frame.entrypoints.engine_client.token_router import TokenRouter


def test_each_sequence_gets_its_own() -> None:
    answer, stats, ended = RequestState("a"), ClientStats(), []
    streams = {name: SequenceState(answer, i, 0, name, [5], SamplingParams()) for i, name in enumerate(("a-0", "a-1"))}
    answer.sequences = list(streams.values())
    feed = TokenRouter(streams, stats, lambda sequence, finish, now: ended.append((sequence.rid, finish.reason)))
    touched: list[RequestState] = []
    first = StepText(
        rids=["a-0", "gone", "a-1"], texts=["x", "?", "y"], token_ids=[[1], [9], [2]], finishes={1: Finish("stop")},
        num_cached_tokens={0: 4}, prompt_logprobs={2: TokenLogprobs([5], [None], [[]])},
    )  # fmt: skip
    feed.take(first, first.texts, touched)
    second = StepText(rids=["a-0"], texts=["z"], token_ids=[[3, 4]], finishes={0: Finish("length")})
    feed.take(second, second.texts, touched)
    assert touched == [answer]  # once, until its handler has looked
    assert answer.changed == answer.sequences
    assert [sequence.take()[:2] for sequence in answer.sequences] == [("xz", [1, 3, 4]), ("y", [2])]
    assert ended == [("a-0", "length")] and list(streams) == ["a-1"]
    assert (answer.sequences[0].cached, stats.cached_tokens, stats.generated_tokens) == (4, 4, 4)
    assert (len(stats.first_token), len(stats.inter_token)) == (2, 1)
    more = StepText(rids=["a-1"], texts=[""], token_ids=[[]], prompt_logprobs={0: TokenLogprobs([6], [-1.0], [[]])})
    feed.take(more, more.texts, touched)
    assert answer.sequences[1].prompt_logprobs == TokenLogprobs([5, 6], [None, -1.0], [[], []])


def test_vectors_come_without_text() -> None:
    answer = RequestState("a")
    streams = {"a": SequenceState(answer, 0, 0, "a", [5], SamplingParams())}
    answer.sequences = list(streams.values())
    feed = TokenRouter(streams, ClientStats(), lambda sequence, finish, now: None)
    feed.take(StepTokens(rids=["a"], token_ids=[[]], finishes={0: Finish("stop")}, pooled={0: b"1234"}), None, [])
    assert answer.vectors == {0: b"1234"} and not streams
