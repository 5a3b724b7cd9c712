"""The fake runner notices what a wrong scheduler does; a check that cannot fail would prove
nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams
from frame.testing.fake_runner import FakeRunner, FakeRunnerError, continuation

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)


def runner() -> FakeRunner:
    return FakeRunner(num_pages=8, page_size=2, num_slots=2, max_pages=4, vocab_size=VOCAB)


def extend(step: int, slot: int, tokens: list[int], pages: list[int], cached: int = 0, **changes: Any) -> ScheduledBatch:
    values: dict[str, Any] = {
        "step": step,
        "num_decodes": 0,
        "slots": np.array([slot], np.int32),
        "num_computed": np.array([cached], np.int32),
        "num_scheduled": np.array([len(tokens) - cached], np.int32),
        "token_ids": np.array(tokens[cached:], np.int32),
        "samples": np.array([True]),
        "new_pages": np.array([(slot, i, page) for i, page in enumerate(pages)], np.int32).reshape(-1, 3),
        "setups": [SlotSetup(slot, GREEDY, 0, len(tokens), np.array(tokens, np.int32))],
    }
    return ScheduledBatch(**{**values, **changes})


def decode(step: int, slot: int, computed: int, pages: list[tuple[int, int]] = ()) -> ScheduledBatch:  # type: ignore[assignment]
    return extend(
        step,
        slot,
        [0] * (computed + 1),
        [],
        computed,
        num_decodes=1,
        token_ids=np.empty(0, np.int32),
        setups=[],
        new_pages=np.array([(slot, index, page) for index, page in pages], np.int32).reshape(-1, 3),
    )


def test_tokens_are_those_of_an_unconstrained_run() -> None:
    fake, prompt = runner(), [3, 1, 4]
    expected = continuation(prompt, GREEDY, 0, VOCAB, 3)
    assert fake.launch(extend(0, 0, prompt, [5, 2])).wait().token_ids.tolist() == expected[:1]
    assert fake.launch(decode(1, 0, 3)).wait().token_ids.tolist() == expected[1:2]
    assert fake.launch(decode(2, 0, 4, [(2, 7)])).wait().token_ids.tolist() == expected[2:]
    # another slot that reads the first page's two tokens
    assert fake.launch(extend(3, 1, prompt, [5, 3], cached=2)).wait().token_ids.tolist() == expected[:1]


def test_the_token_depends_on_the_seed_when_it_is_drawn() -> None:
    drawn = SamplingParams(temperature=1.0)
    assert continuation([1], drawn, 1, VOCAB, 8) != continuation([1], drawn, 2, VOCAB, 8)
    assert continuation([1], GREEDY, 1, VOCAB, 8) == continuation([1], GREEDY, 2, VOCAB, 8)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (extend(1, 1, [9, 9, 9], [5, 3], cached=2), "slot 1 reads a wrong token at position 0"),
        (extend(1, 1, [3, 1, 4], [6, 3], cached=2), "slot 1 reads a wrong token at position 0"),
        (extend(1, 1, [3, 1, 4], [6]), "slot 1 has no page"),
        (extend(1, 1, [3, 1, 4], [0, 3]), "page 0 was handed out"),
        (extend(1, 0, [3, 1, 4], [5, 2]), "slot 0 is set up while in use"),
        (msgspec.structs.replace(decode(1, 0, 3), released=[1]), "slot 1 is released but empty"),
        (decode(1, 0, 5, [(2, 7)]), "computes position 5 but has 4 tokens"),
        (decode(0, 0, 3), "launched after step 0"),
        (extend(1, 1, [3, 1, 4], [6, 3], samples=np.array([False])), "`samples` is wrong"),
        (extend(1, 1, [3, 1, 4], [6, 3], token_ids=np.array([3, 1, 5], np.int32)), "holds other tokens than its setup"),
    ],
)
def test_it_notices(batch: ScheduledBatch, sentence: str) -> None:
    fake = runner()
    fake.launch(extend(0, 0, [3, 1, 4], [5, 2])).wait()
    with pytest.raises(FakeRunnerError, match=sentence):
        fake.launch(batch)


def test_it_notices_a_page_that_was_given_away_too_early() -> None:
    fake = runner()
    fake.launch(extend(0, 0, [3, 1, 4], [5, 2])).wait()
    fake.launch(extend(1, 1, [7, 7, 7], [5, 3])).wait()  # page 5 is still slot 0's
    with pytest.raises(FakeRunnerError, match="slot 0 reads a wrong token at position 0"):
        fake.launch(decode(2, 0, 3))


def test_it_notices_a_page_or_slot_that_a_step_in_flight_still_uses() -> None:
    fake = runner()
    fake.launch(extend(0, 0, [3, 1, 4], [5, 2]))
    with pytest.raises(FakeRunnerError, match="page 5 is handed to slot 1 while step 0, in flight, writes to it"):
        fake.launch(extend(1, 1, [7, 7, 7], [5, 3]))
    with pytest.raises(FakeRunnerError, match="slot 0 is set up while in use"):
        fake.launch(extend(2, 0, [7, 7, 7], [6, 3], released=[0]))


def test_it_notices_two_rows_that_write_one_page() -> None:
    one, two = extend(0, 0, [3, 1], [5]), extend(0, 1, [7, 7], [5])
    both = msgspec.structs.replace(
        one,
        slots=np.array([0, 1], np.int32),
        num_computed=np.zeros(2, np.int32),
        num_scheduled=np.full(2, 2, np.int32),
        token_ids=np.array([3, 1, 7, 7], np.int32),
        samples=np.ones(2, np.bool_),
        new_pages=np.concatenate((one.new_pages, two.new_pages)),
        setups=[*one.setups, *two.setups],
    )
    with pytest.raises(FakeRunnerError, match=r"pages \[5\] are written by a row while another"):
        runner().launch(both)


def test_what_is_cached_is_read_and_not_written() -> None:
    fake, prompt = runner(), [3, 1, 4, 1]
    (token,) = fake.launch(extend(0, 0, prompt, [5, 2])).wait().token_ids.tolist()
    again = extend(1, 1, prompt, [5, 2], 3)
    both = msgspec.structs.replace(
        again,
        num_decodes=1,
        slots=np.array([0, 1], np.int32),
        num_computed=np.array([4, 3], np.int32),
        num_scheduled=np.ones(2, np.int32),
        samples=np.ones(2, np.bool_),
        new_pages=np.array([(0, 2, 6), *again.new_pages.tolist()], np.int32),
        skip_kv_store=np.array([False, True]),
    )
    assert fake.launch(both).wait().token_ids.tolist()[1] == token
    with pytest.raises(FakeRunnerError, match="reads a wrong token at position 1"):
        fake.launch(msgspec.structs.replace(extend(2, 1, [3, 2], [5], 1, released=[1]), skip_kv_store=np.array([True])))
