"""Sampling parameters at the ends of their types: each is refused by name, or its request gets
tokens. None is an error of the server."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import make_loop

PROMPT = [7, 8, 9, 7, 8, 9, 10, 11]
LARGEST_F32 = 3.4028234663852886e38
VALUES = (
    *(0.0, 5e-324, 1e-320, sys.float_info.min, 1e-300, 1e-50, 1e-45, 1e-40, 1.1754943508222875e-38, 1e-38, 1e-30, 1e-20, 1e-12, 1e-9),
    *(1e-7, 1e-6, 9.9e-6, 1e-5, 1.1e-5, 1e-4, 1e-3, 0.0099, 0.01, 0.1, 0.5, 1 - 1e-4, 1 - 1e-8, math.nextafter(1.0, 0.0), 1.0),
    *(math.nextafter(1.0, 2.0), 1.5, 2.0, math.nextafter(2.0, 3.0), 9.99, 10.0, 10.1, 99.9, 100.0, 100.1, 1e4, 1e9, 1e30, LARGEST_F32),
    *(1e39, 1e300, sys.float_info.max, math.inf, math.nan),
)
FIELDS = tuple(name for name, kind in SamplingParams.__annotations__.items() if kind == "float")


@pytest.fixture
def loop() -> Iterator[LocalLoop]:
    made = make_loop(str(find_model("frame-tiny")), tokens=8192)
    yield made
    made.runner.close()


def params_of(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "seed": 3, "ignore_eos": True, **values})


def check(loop: LocalLoop, each: list[SamplingParams]) -> None:
    """`LocalLoop` raises for a request that ends with an error, such as logits that are not
    finite."""
    outputs = loop.generate([PROMPT] * len(each), each)
    vocab = loop.scheduler.config.vocab_size
    assert all(len(output) == 3 and min(output) >= 0 and max(output) < vocab for output in outputs)


def test_every_number_is_covered() -> None:
    assert set(FIELDS) == {"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}


@pytest.mark.parametrize("name", [*FIELDS, "logit_bias"])
def test_an_extreme_value_is_refused_by_name_or_served(loop: LocalLoop, name: str) -> None:
    served = []
    for value in (*VALUES, *(-value for value in VALUES)):
        params = params_of(**{name: {PROMPT[0]: value} if name == "logit_bias" else value})
        problems = params.problems(loop.scheduler.config.vocab_size)
        if problems:
            assert all(problem.param == name and problem.sentence.startswith(name) for problem in problems)
        else:
            served += [params, params_of(**{name: getattr(params, name), "temperature": 0.0})]
    assert len(served) >= 2
    check(loop, served)


@pytest.mark.slow
def test_extreme_values_together(loop: LocalLoop) -> None:
    rng = random.Random(5)
    by_field = {
        name: [value for value in (*VALUES, *(-value for value in VALUES)) if not params_of(**{name: value}).problems()] for name in FIELDS
    }
    served = []
    for _ in range(200):
        values: dict[str, Any] = {name: rng.choice(choices) for name, choices in by_field.items() if rng.random() < 0.7}
        bias = {token: rng.choice((-100.0, -1e-300, 100.0)) for token in rng.sample(range(380), 3)}
        served.append(params_of(**values, logit_bias=bias, top_k=rng.choice((-1, 1, 2**31 - 1)), logprobs=rng.choice((None, 0, 20))))
    check(loop, served)
