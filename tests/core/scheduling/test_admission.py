"""Requests made from messages, and the limits of the configuration. Refusals are tested with the
scheduler."""

from __future__ import annotations

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate
from frame.core.scheduling.admission import Admission, SchedulerConfig
from frame.core.scheduling.request import Request

CONFIG = SchedulerConfig(
    page_size=4, num_pages=9, max_running=3, token_budget=16, max_context=30, vocab_size=50, eos_ids=(2, 3), request_timeout=60.0
)


def accepted(message: Generate, now: float = 5.0) -> Request:
    request = Admission(CONFIG).create_request(message, now, None)
    assert isinstance(request, Request)
    return request


def test_config() -> None:
    assert (CONFIG.capacity, CONFIG.max_pages, CONFIG.max_tokens_per_step) == (32, 8, 19)


def test_a_message_becomes_a_request() -> None:
    params = SamplingParams(max_tokens=7, stop_token_ids=(9, 3), seed=11)
    request = accepted(Generate(rid="a", token_ids=[5, 6, 7, 8], output_len=1, params=params, priority=2, namespace="n", deadline=1.5))
    assert (request.prompt.tolist(), list(request.output), request.all_tokens().tolist()) == ([5, 6, 7], [8], [5, 6, 7, 8])
    assert (request.prompt_len, request.output_len, request.num_tokens, request.max_num_tokens, request.max_new_tokens) == (3, 1, 4, 10, 7)
    assert (request.seed, request.priority, request.namespace, request.arrival, request.deadline) == (11, 2, "n", 5.0, 6.5)
    assert request.stop_ids == (2, 3, 9)


def test_defaults() -> None:
    request = accepted(Generate(rid="a", token_ids=[5], params=SamplingParams(ignore_eos=True, stop_token_ids=(9,))))
    assert (request.stop_ids, request.deadline, request.max_num_tokens) == ((9,), 65.0, 30)
    admission = Admission(CONFIG)
    drawn = [admission.create_request(Generate(rid=str(i), token_ids=[5], params=SamplingParams()), 0.0, None) for i in range(3)]
    seeds = [request.seed for request in drawn if isinstance(request, Request)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [request.index for request in drawn if isinstance(request, Request)] == [0, 1, 2]


def test_token_ids_beyond_any_vocabulary_are_refused() -> None:
    for token in (50, -1, 2**31, -(2**40)):
        finish = Admission(CONFIG).create_request(Generate(rid="a", token_ids=[1, token], params=SamplingParams()), 0.0, None)
        assert isinstance(finish, Finish)
        assert finish.error == "the prompt holds a token id outside the vocabulary (0 to 49)"
