"""The in-tree logits processors: conformance, and results compared with transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.loader import load_registry
from frame.testing.sampling.logits_processor import checks_of

CPU = torch.device("cpu")
VOCAB = 96
WANTED = {
    "penalties": [
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(presence_penalty=-1.0, repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7),
    ],
    "logit-bias": [SamplingParams(logit_bias={0: 3.0}), SamplingParams(logit_bias={5: -100.0, 95: 1.5, 0: 0.5})],
    "bad-words": [
        SamplingParams(bad_words_ids=((4,), (0,))),
        SamplingParams(bad_words_ids=tuple((a, 7) for a in range(VOCAB))),
        SamplingParams(bad_words_ids=((1, 2, 3, 4), *((a, b, 9) for a in range(20) for b in range(20)))),
    ],
    "min-tokens": [SamplingParams(min_tokens=8, stop_token_ids=(0, 4)), SamplingParams(min_tokens=1), SamplingParams(min_tokens=20)],
    "thinking-budget": [
        SamplingParams(thinking_token_budget=0, thinking_end_id=4),
        SamplingParams(thinking_token_budget=3, thinking_end_id=4),
        SamplingParams(thinking_token_budget=1, thinking_start_ids=(5, 6), thinking_end_id=7),
    ],
}


REGISTRY = load_registry(installed=False)


def make(name, vocab=VOCAB, slots=16):
    return REGISTRY.load(REGISTRY.get("logits_processor", name))(ProcessorContext(vocab, slots, CPU, eos_token_ids=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", WANTED)
def test_conformance(name):
    for check in checks_of(lambda vocab, slots: make(name, vocab, slots), WANTED[name]):
        check.run()


def test_all_built_in_ones_are_checked():
    assert {record.name for record in REGISTRY.records("logits_processor")} == set(WANTED)


def setup(slot, params, ids, prompt_len):
    return SlotSetup(slot, params, 0, prompt_len, np.array(ids, np.int32))


def apply(processor, logits, setups):
    changed = logits.clone()
    slots = torch.tensor([s.slot for s in setups])
    processor.apply(changed, torch.arange(len(setups)), slots, torch.tensor([len(s.token_ids) for s in setups]))
    return changed


def test_penalties_equal_their_definitions():
    numbers = np.random.default_rng(1)
    setups, expected = [], []
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(0))
    for row in range(12):
        params = SamplingParams(
            frequency_penalty=float(numbers.uniform(-2, 2)),
            presence_penalty=float(numbers.uniform(-2, 2)),
            repetition_penalty=float(numbers.uniform(0.5, 2)),
        )
        ids = numbers.integers(0, 30, 40).tolist()
        setups.append(setup(15 - row, params, ids, 25))
        scores = logits[row].tolist()
        for token in set(ids):
            scores[token] = scores[token] / params.repetition_penalty if scores[token] > 0 else scores[token] * params.repetition_penalty
        for token in set(ids[25:]):
            scores[token] -= params.frequency_penalty * ids[25:].count(token) + params.presence_penalty
        expected.append(scores)
    processor = make("penalties")
    for each in setups:
        processor.add_slot(each)
    torch.testing.assert_close(apply(processor, logits, setups), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_repetition_equals_transformers():
    ids = [3, 9, 9, 14, 60]
    logits = torch.randn(1, VOCAB)
    processor, each = make("penalties"), setup(2, SamplingParams(repetition_penalty=1.7), ids, 3)
    processor.add_slot(each)
    torch.testing.assert_close(apply(processor, logits, [each]), RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone()))


def test_bad_words_equal_transformers_as_the_row_grows():
    words = ((5,), (1, 2), (2, 1, 2), (1, 2, 1, 2, 3), (2, 2, 2, 2, 2, 2, 2))
    others = ((7,), (2, 6))
    processor, reference = make("bad-words"), NoBadWordsLogitsProcessor([list(word) for word in words])
    numbers = np.random.default_rng(0)
    ids = [1, 2]
    first = setup(3, SamplingParams(bad_words_ids=others), ids, 2)
    second = setup(9, SamplingParams(bad_words_ids=words), ids, 2)
    processor.add_slot(first)
    processor.add_slot(second)
    for step in range(60):
        logits = torch.zeros(2, VOCAB)
        changed = apply(processor, logits, [first, second])
        assert torch.equal(changed[1:], reference(torch.tensor([ids]), logits[1:])), ids
        banned = {7, 6} if ids[-1] == 2 else {7}
        assert set(changed[0].isneginf().nonzero().flatten().tolist()) == banned
        token = int(numbers.integers(1, 3))
        ids.append(token)
        processor.observe_tokens(torch.tensor([9, 3]), torch.tensor([token, token]))
        if step == 30:  # comes back in another slot
            processor.remove_slot(9)
            second = setup(1, SamplingParams(bad_words_ids=words), ids, 2)
            processor.add_slot(second)
            for later in range(3):
                processor.observe_tokens(torch.tensor([1, 3]), torch.tensor([later, later]))
                ids.append(later)
            processor.remove_slot(1)
            second = setup(9, SamplingParams(bad_words_ids=words), ids, 2)
            processor.add_slot(second)


def test_min_tokens_bans_the_end_until_the_output_is_long_enough():
    processor = make("min-tokens")
    prompt = [8, 9, 10]
    params = SamplingParams(min_tokens=2, stop_token_ids=(33, 500))
    for length, is_banned in ((3, True), (4, True), (5, False), (6, False)):
        each = setup(0, params, [*prompt, *[7] * (length - 3)], 3)
        processor.add_slot(each)
        changed = apply(processor, torch.zeros(1, VOCAB), [each])
        assert set(changed[0].isneginf().nonzero().flatten().tolist()) == ({1, 33} if is_banned else set())
    assert not processor.applies_to(SamplingParams(min_tokens=2, ignore_eos=True))


def test_logit_bias_adds():
    processor, each = make("logit-bias"), setup(0, SamplingParams(logit_bias={0: 1.5, 95: -100.0}), [1], 1)
    processor.add_slot(each)
    changed = apply(processor, torch.ones(1, VOCAB), [each])
    assert (changed[0, 0], changed[0, 95], changed[0, 1:95].unique().tolist()) == (2.5, -99.0, [1.0])


def test_state_exists_only_while_a_request_uses_it():
    processor = make("penalties", slots=64)
    state = processor._state
    assert state.capacity == 0
    setups = [setup(slot, SamplingParams(presence_penalty=1.0), [1, 2], 1) for slot in range(20)]
    for each in setups:
        processor.add_slot(each)
    assert 20 <= state.capacity <= 32
    logits = torch.zeros(20, VOCAB)
    before = apply(processor, logits, setups)
    for each in setups[:10]:
        processor.remove_slot(each.slot)
    assert torch.equal(apply(processor, logits[10:], setups[10:]), before[10:])
    for each in setups[10:]:
        processor.remove_slot(each.slot)
    assert state.capacity == 0


def test_thinking_budget_forces_the_closing_token_once():
    """Tokens 5 6 open the reasoning and 7 closes it, after two tokens at most."""
    params = SamplingParams(thinking_token_budget=2, thinking_start_ids=(5, 6), thinking_end_id=7)

    def forced(*output):
        processor = make("thinking-budget")
        for observed in range(len(output) + 1):  # as resumed after so many tokens
            row = [1, 2, *output[:observed]]
            processor.add_slot(setup(3, params, row, 2))
            slots = torch.tensor([3])
            for token in output[observed:]:
                processor.observe_tokens(slots, torch.tensor([token]))
            logits = torch.zeros(1, VOCAB)
            processor.apply(logits, torch.tensor([0]), slots, torch.tensor([len(output) + 2]))
            allowed = logits[0].isfinite().nonzero().flatten().tolist()
            yield allowed == [7]
            assert allowed == [7] or len(allowed) == VOCAB

    for output, expected in [((), False), ((5, 6, 9), False), ((5, 6, 9, 9), True), ((5, 6, 9, 7), False), ((5, 6, 9, 9, 7, 9, 9), False)]:
        assert set(forced(*output)) == {expected}, output
    assert set(forced(9, 5, 6, 9, 9, 9)) == {False}, "the output does not begin with the mark"
    assert set(forced(5, 9, 9, 9)) == {False}
