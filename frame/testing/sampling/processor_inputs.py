"""What the suite of logits processors calls them with: parameters, slots, logits and outputs. Must
not know a processor by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from msgspec.structs import replace

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor
from frame.core.interfaces.sampling_params import SamplingParams

Make = Callable[[int, int], LogitsProcessor]

VOCAB, SLOTS = 97, 16
LARGE_VOCAB, MANY_SLOTS = 50_000, 256
MAX_IDLE_BYTES = 8 << 20  # of a processor that no request uses, at the large sizes
PROMPT, OUTPUT = 9, 7  # tokens of an example request
# Parameter sets of the in-tree processors; a class names others in `conformance_params`.
EXAMPLES = tuple(
    SamplingParams(**example)
    for example in (
        {"frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"min_tokens": 12, "stop_token_ids": (3, 5)},
        {"bad_words_ids": ((4,), (1, 2), (2, 3, 1))},
        {"bad_words_ids": ((7, 8),)},
        {"logit_bias": {3: 2.0, 9: -50.0}},
        {"logit_bias": {1: -1.5}},
        {"min_tokens": 20, "stop_token_ids": (7,)},
        {"repetition_penalty": 0.8, "presence_penalty": -0.3},
        {"thinking_token_budget": 3, "thinking_end_id": 4},
        {"thinking_token_budget": 1, "thinking_start_ids": (5,), "thinking_end_id": 6},
    )
)
# A request with each parameter that a record may name. The tokenizer sets `bad_words_ids` too.
ONE_PARAM: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "frequency_penalty": SamplingParams(frequency_penalty=0.5),
        "presence_penalty": SamplingParams(presence_penalty=0.5),
        "repetition_penalty": SamplingParams(repetition_penalty=1.2),
        "logit_bias": SamplingParams(logit_bias={3: 1.0}),
        "bad_words": SamplingParams(bad_words=("a",), bad_words_ids=((4,),)),
        "bad_words_ids": SamplingParams(bad_words_ids=((4,),)),
        "min_tokens": SamplingParams(min_tokens=4, stop_token_ids=(3,)),
        "thinking_token_budget": SamplingParams(thinking_token_budget=4, thinking_end_id=3),
    }
)
# What the API says of a parameter: logits [vocab], ids of the output, ids of prompt and output, and
# the request's parameters -> the logits then.
MEANINGS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SamplingParams], torch.Tensor]] = MappingProxyType(
    {
        "frequency_penalty": lambda logits, output, _, params: logits - params.frequency_penalty * torch.bincount(output, minlength=VOCAB),
        "presence_penalty": lambda logits, output, _, params: logits - params.presence_penalty * _is_among(output),
        "repetition_penalty": lambda logits, _, every, params: torch.where(
            _is_among(every), torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty), logits
        ),
        "logit_bias": lambda logits, _, __, params: logits.index_add(
            0, torch.tensor([*(params.logit_bias or {})]), torch.tensor([*(params.logit_bias or {}).values()])
        ),
        "bad_words": lambda logits, _, __, params: _ban(logits, [ids[0] for ids in params.bad_words_ids]),
        "min_tokens": lambda logits, output, _, params: _ban(logits, params.stop_token_ids if len(output) < params.min_tokens else ()),
    }
)
# Values of a client's own parameter, `custom`, which are texts.
BAD_VALUES = ("", "abc", "1,,2", "-1", str(VOCAB), "1e999", "nan", "9" * 40, "\0", "[]", "{", "🙂", "²", "1,²", "٣", "9" * 5000)


def _is_among(ids: torch.Tensor) -> torch.Tensor:
    """bool [vocab]"""
    return torch.bincount(ids, minlength=VOCAB) > 0


def _ban(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    return logits.index_fill(0, torch.tensor(list(ids), dtype=torch.int64), -torch.inf)


def make_setups(
    examples: Sequence[SamplingParams],
    count: int,
    vocab: int = VOCAB,
    *,
    same_slots: bool = True,
    same_tokens: bool = True,
    seed: int = 0,
) -> list[SlotSetup]:
    numbers = np.random.default_rng(seed)
    return [
        SlotSetup(
            slot=i % (SLOTS // 2 if same_slots else SLOTS),
            params=examples[i % len(examples)],
            seed=i,
            prompt_len=PROMPT,
            token_ids=numbers.integers(0, vocab if same_tokens else vocab // 3, PROMPT + OUTPUT).astype(np.int32),
        )
        for i in range(count)
    ]


def move_setup(setup: SlotSetup, slot: int) -> SlotSetup:
    return replace(setup, slot=slot)


def cut_setup(setup: SlotSetup, size: int) -> SlotSetup:
    return replace(setup, token_ids=setup.token_ids[:size])


def fill_processor(make: Make, setups: Sequence[SlotSetup]) -> LogitsProcessor:
    processor = make(VOCAB, SLOTS)
    for setup in setups:
        processor.add_slot(setup)
    return processor


def fill_half(make: Make, examples: Sequence[SamplingParams]) -> tuple[list[SlotSetup], torch.Tensor, LogitsProcessor]:
    """Requests in half of the slots, a row of logits for each, and a processor that has them."""
    setups = make_setups(examples, SLOTS // 2)
    return setups, make_logits(len(setups)), fill_processor(make, setups)


def make_logits(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))


def observe_outputs(processor: LogitsProcessor, setups: Sequence[SlotSetup], first: int) -> None:
    """Each request samples another token."""
    tokens = (torch.arange(len(setups)) + first) % VOCAB
    processor.observe_tokens(torch.tensor([setup.slot for setup in setups]), tokens)


def apply_processor(processor: LogitsProcessor, logits: torch.Tensor, rows: Iterable[int], setups: Sequence[SlotSetup]) -> torch.Tensor:
    changed = logits.clone()
    call_processor(processor, changed, rows, setups)
    return changed


def call_processor(processor: LogitsProcessor, logits: torch.Tensor, rows: Iterable[int], setups: Sequence[SlotSetup]) -> None:
    slots = torch.tensor([setup.slot for setup in setups])
    positions = torch.tensor([len(setup.token_ids) for setup in setups])
    processor.apply(logits, torch.tensor(list(rows)), slots, positions)
