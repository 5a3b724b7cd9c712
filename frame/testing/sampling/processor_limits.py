"""Checks of logits processors with as many values as a request may have, with long prompts and
several end tokens, and beside rows of NaN. Used by the suite of the kind. Must not know a processor
by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor, ProcessorContext
from frame.core.interfaces.sampling_params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_BIASES, SamplingParams
from frame.testing.conformance import Subject
from frame.testing.sampling.processor_inputs import LARGE_VOCAB, SLOTS, VOCAB, Make, apply_processor, make_logits, make_setups

_STEP = 11  # between the ids of two biases, and of two banned words


def all_values_of_a_request_count(subject: Subject, make: Make) -> None:
    """The most biases, the most and the longest banned words, all tokens of a long prompt, and all
    end tokens of the model."""
    named = getattr(subject.record.capabilities, "params", ())
    if "logit_bias" in named:
        biases = {_STEP * number: 0.25 + number % 3 for number in range(MAX_BIASES)}
        changed = _apply(make(LARGE_VOCAB, 1), SamplingParams(logit_bias=biases), [1, 2])
        expected = torch.zeros(LARGE_VOCAB).index_add(0, torch.tensor([*biases]), torch.tensor([*biases.values()]))
        lost = int((changed != expected).sum())
        assert not lost, f"of {MAX_BIASES} biases of a request, {lost} are not added"
    if "bad_words" in named:
        words = [(_STEP * number,) for number in range(MAX_BAD_WORDS - 1)]
        long = tuple(range(LARGE_VOCAB - MAX_BAD_WORD_CHARS, LARGE_VOCAB))
        params = SamplingParams(bad_words=("a",), bad_words_ids=(*words, long))
        for first, ends in ((long[0], [long[-1]]), (long[0] - 1, [])):
            changed = _apply(make(LARGE_VOCAB, 1), params, [5, first, *long[1:-1]])
            banned = (changed == -torch.inf).nonzero().flatten().tolist()
            expected_ids = sorted([word[0] for word in words] + ends)
            what = f"{MAX_BAD_WORDS} banned words, one of {len(long)} tokens"
            assert banned == expected_ids, f"of {what}, {len(banned)} tokens are banned, and not {len(expected_ids)}"
    if "repetition_penalty" in named:
        changed = _apply(make(LARGE_VOCAB, 1), SamplingParams(repetition_penalty=2.0), [7, *[8] * 5000], fill=4.0)
        penalised = (changed == 2.0).nonzero().flatten().tolist()
        assert penalised == [7, 8], f"after a prompt of the token 7 and 5,000 times 8, the tokens {penalised} are changed"
    if "min_tokens" in named:
        context = ProcessorContext(LARGE_VOCAB, 1, torch.device("cpu"), eos_token_ids=(70, 90, LARGE_VOCAB - 1))
        changed = _apply(subject.target(context, subject.options), SamplingParams(min_tokens=4, stop_token_ids=(3,)), [1, 2])
        ends = (changed == -torch.inf).nonzero().flatten().tolist()
        assert ends == [3, 70, 90, LARGE_VOCAB - 1], f"before min_tokens, the ends {ends} of 3 and {context.eos_token_ids} are banned"


def rows_of_others_keep_their_nan(make: Make, examples: Sequence[SamplingParams]) -> None:
    """The core ends a request whose logits are not finite, which a processor of another request
    must not hide."""
    setups, processor = make_setups(examples, 1), make(VOCAB, SLOTS)
    processor.add_slot(setups[0])
    logits = torch.cat((make_logits(1), torch.full((1, VOCAB), torch.nan), torch.full((1, VOCAB), torch.inf)))
    changed = apply_processor(processor, logits, [0], setups)
    is_kept = bool(changed[1].isnan().all()) and bool((changed[2] == torch.inf).all())
    assert is_kept, "apply() replaces the NaN or the infinite logits of a row that it does not apply to"


def _apply(processor: LogitsProcessor, params: SamplingParams, tokens: list[int], fill: float = 0.0) -> torch.Tensor:
    """Logits [vocab] of one value, as they are changed for a request with these tokens."""
    processor.add_slot(SlotSetup(0, params, 0, len(tokens), np.array(tokens, np.int32)))
    logits, one = torch.full((1, LARGE_VOCAB), fill), torch.zeros(1, dtype=torch.int64)
    processor.apply(logits, one, one, one + len(tokens))
    return logits[0]
