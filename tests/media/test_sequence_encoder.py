"""Items of encoder-decoder models: encoded each time that a request enters the device."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.messages import Finish, Generate
from frame.core.scheduling.admission import Admission
from frame.core.scheduling.request import Request
from frame.core.scheduling.running import StepPlan
from frame.media.sequence_encoder import SequenceEncoder
from tests.core.scheduling.small_rig import config, params, prompt
from tests.media.media_rig import make_item


def make_request(namespace: str = "a:salt", names: str = "x") -> Request:
    message = Generate(
        rid="r", token_ids=prompt(3), params=params(), namespace=namespace, media=[make_item(name, modality="audio") for name in names]
    )
    request = Admission(config()).create_request(message, 0.0, None)
    assert isinstance(request, Request)
    return request


def test_the_namespace_depends_on_the_item() -> None:
    media, requests = SequenceEncoder(), [make_request(), make_request(), make_request(names="y")]
    assert [media.start_request(request) for request in requests] == [None] * 3
    one, same, other = (request.namespace for request in requests)
    assert one == same != other
    assert one.startswith("a:salt#")
    assert requests[0].prompt_keys is None


@pytest.mark.parametrize("names", ["", "xy"])
def test_a_request_has_one_item(names: str) -> None:
    finish = SequenceEncoder().start_request(make_request(names=names))
    assert isinstance(finish, Finish)
    assert finish.code == "invalid_request"


def test_an_item_is_encoded_once_until_the_request_leaves() -> None:
    media, request = SequenceEncoder(), make_request()
    orders = []
    for leaves in (False, False, True, False):
        request.slot = 2
        media.schedule_chunk(request, 0, 2, 0)
        orders.append(len(media.take_inputs(StepPlan(np.empty(0, np.intp)), 2).get("encodes", [])))
        if leaves:
            media.release(request)
    assert orders == [1, 0, 0, 1]
