"""`sampling.defaults`: the parameters of requests that leave them out, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from frame.config.resolve import ResolveError, pinned, resolve
from frame.config.resolved import Resolved
from frame.core.interfaces.sampling import PROCESSOR_PARAMS, ProcessorCapabilities
from frame.core.interfaces.sampling_params import SamplingParams
from frame.interfaces.sampler import SamplerCapabilities
from tests.config.test_resolve import LAPTOP, LLAMA, config, record, records

STORED = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
PENALTIES = [record("logits_processor", "penalties", ProcessorCapabilities(tuple(PROCESSOR_PARAMS)))]


def resolved(defaults: Any = None, stored: dict[str, Any] | None = None, **further: Any) -> Resolved:
    sections = {} if defaults is None else {"sampling": {"defaults": defaults}}
    checkpoint = dataclasses.replace(LLAMA, sampling=STORED if stored is None else stored)
    return resolve(config(**sections), LAPTOP, checkpoint, records(**{"logits_processor": PENALTIES, **further}))


def test_they_are_those_of_the_checkpoint() -> None:
    found = resolved()
    assert found.default_params == SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.05)
    assert found.reasons["sampling.defaults"] == "from generation_config.json"
    assert Resolved.model_validate_json(found.model_dump_json()).default_params == found.default_params
    assert resolved(stored={}).default_params == SamplingParams()


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ("openai", {}),
        ("model", STORED),
        ("auto", STORED),
        ({}, {}),
        ({"top_k": 5}, {"top_k": 5}),
        ('{"frequency_penalty": 1}', {"frequency_penalty": 1}),
    ],
)
def test_a_setting_replaces_them(defaults: Any, expected: dict[str, Any]) -> None:
    found = resolved(defaults)
    assert found.default_params == SamplingParams(**expected)
    again = resolve(pinned(found), LAPTOP, dataclasses.replace(LLAMA, sampling={}), records(logits_processor=PENALTIES))
    assert again.default_params == found.default_params


@pytest.mark.parametrize(
    ("defaults", "stored", "words"),
    [
        ({"temprature": 1}, {}, r"sampling.defaults has 'temprature'; did you mean 'temperature'"),
        ({"max_tokens": 1}, {}, r"sampling.defaults has 'max_tokens'; it takes temperature, top_p, .*presence_penalty\."),
        ({"temperature": -1}, {}, r"sampling.defaults: temperature is -1.*it must be"),
        ({"top_k": 1.5}, {}, r"sampling.defaults: Expected int, got float - at \$.top_k"),
        (None, {"top_p": 7}, r"generation_config.json: top_p is 7.*it must be .*\nNearest change: sampling.defaults: \{\}"),
    ],
)
def test_a_wrong_value_ends_the_start(defaults: Any, stored: dict[str, Any], words: str) -> None:
    with pytest.raises(ResolveError, match=words):
        resolved(defaults, stored)


def test_what_the_server_refuses_in_requests_is_no_default() -> None:
    few = SamplerCapabilities(params=("top_p",))
    found = resolved(logits_processor=[], sampler=[record("sampler", "plain", few)])
    assert found.default_params == SamplingParams(temperature=0.6)
    assert found.reasons["sampling.defaults"].startswith("from generation_config.json, without top_k and repetition_penalty")
    with pytest.raises(ResolveError, match="sampling.defaults: top_k has no effect with the sampler plain"):
        resolved({"top_k": 3}, sampler=[record("sampler", "plain", few)])
