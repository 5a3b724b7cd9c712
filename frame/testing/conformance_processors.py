"""What every logits processor must do, as checks that raise AssertionError with a sentence.

A check makes processors with `make(vocab_size, max_slots)` and is given parameters that the
processor wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor
from frame.core.interfaces.sampling_params import SamplingParams

Make = Callable[[int, int], LogitsProcessor]

VOCAB = 96
SLOTS = 16
_PROMPT, _OUTPUT = 9, 7


def check_processor(make: Make, wanted: Sequence[SamplingParams]) -> None:
    """All checks. `wanted`: at least one parameter set that the processor wants; two different ones
    say more."""
    for check in (check_wants, check_rows_stand_alone, check_readmission, check_slots_are_reused):
        check(make, wanted)


def check_wants(make: Make, wanted: Sequence[SamplingParams]) -> None:
    """`wants` is pure, and a request without special parameters pays nothing."""
    processor = make(VOCAB, SLOTS)
    assert not processor.applies_to(SamplingParams()), "applies_to() is true for default parameters: every request would pay"
    for params in wanted:
        assert processor.applies_to(params) and processor.applies_to(params), f"applies_to() is false for {params}"


def check_rows_stand_alone(make: Make, wanted: Sequence[SamplingParams]) -> None:
    """Rows that did not ask are untouched; a row's logits do not depend on the rows beside it,
    their order or their slots."""
    setups = _setups(wanted, SLOTS // 2)
    logits = _logits(2 * len(setups))
    processor = make(VOCAB, SLOTS)
    for setup in setups:
        processor.add_slot(setup)
    rows = list(range(1, 2 * len(setups), 2))
    together = _apply(processor, logits, rows, setups)
    untouched = [row for row in range(len(logits)) if row not in rows]
    assert torch.equal(together[untouched], logits[untouched]), "apply() changed rows that were not named"
    backwards = _apply(processor, logits, rows[::-1], setups[::-1])
    assert torch.equal(together, backwards), "the order of rows changed the logits"
    for row, setup in zip(rows, setups, strict=True):
        single = make(VOCAB, SLOTS)
        moved = SlotSetup((setup.slot + 5) % SLOTS, setup.params, setup.seed, setup.prompt_len, setup.token_ids)
        single.add_slot(moved)
        alone = _apply(single, logits[row : row + 1], [0], [moved])
        assert torch.allclose(alone[0], together[row]), f"row {row} differs when it is alone"


def check_readmission(make: Make, wanted: Sequence[SamplingParams]) -> None:
    """A request that comes back with its output so far has the state of one that never left."""
    for setup in _setups(wanted, len(wanted)):
        stayed, back = make(VOCAB, SLOTS), make(VOCAB, SLOTS)
        slots = torch.tensor([setup.slot])
        stayed.add_slot(SlotSetup(setup.slot, setup.params, setup.seed, setup.prompt_len, setup.token_ids[: setup.prompt_len]))
        for token in setup.token_ids[setup.prompt_len :].tolist():
            stayed.observe_tokens(slots, torch.tensor([token]))
        back.add_slot(setup)
        logits = _logits(1)
        here, there = (_apply(processor, logits, [0], [setup]) for processor in (stayed, back))
        assert torch.allclose(here, there), f"a re-admitted request has other logits than one that stayed ({setup.params})"


def check_slots_are_reused(make: Make, wanted: Sequence[SamplingParams]) -> None:
    """A slot's next request knows nothing of the last one, however often slots change hands."""
    used = make(VOCAB, SLOTS)
    setups = _setups(wanted, 4 * SLOTS)
    for turn in range(0, len(setups), SLOTS // 2):
        group = setups[turn : turn + SLOTS // 2]
        for setup in group:
            used.add_slot(setup)
        used.observe_tokens(torch.tensor([setup.slot for setup in group]), torch.arange(len(group)))
        for setup in group:
            used.remove_slot(setup.slot)
    fresh = make(VOCAB, SLOTS)
    last = setups[0]
    logits = _logits(1)
    results = []
    for processor in (used, fresh):
        processor.add_slot(last)
        results.append(_apply(processor, logits, [0], [last]))
    assert torch.equal(*results), "a slot's earlier request left something behind"


def _setups(wanted: Sequence[SamplingParams], count: int) -> list[SlotSetup]:
    numbers = np.random.default_rng(0)
    return [
        SlotSetup(
            slot=i % (SLOTS // 2),
            params=wanted[i % len(wanted)],
            seed=i,
            prompt_len=_PROMPT,
            token_ids=numbers.integers(0, VOCAB, _PROMPT + _OUTPUT).astype(np.int32),
        )
        for i in range(count)
    ]


def _logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def _apply(processor: LogitsProcessor, logits: torch.Tensor, rows: Sequence[int], setups: Sequence[SlotSetup]) -> torch.Tensor:
    changed = logits.clone()
    slots = torch.tensor([setup.slot for setup in setups])
    positions = torch.tensor([len(setup.token_ids) for setup in setups])
    processor.apply(changed, torch.tensor(rows), slots, positions)
    return changed
