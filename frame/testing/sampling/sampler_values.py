"""Checks of what samplers do with the values of a request: temperatures together with filters, and
the bits of keys. Used by the suite of the kind. Must not know a sampler by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from frame.testing.conformance import SkipCheck
from frame.testing.sampling.sampler_bench import PROMPT, SLOTS, VOCAB, Bench, make_logits

NUM_BITS = 63  # of a key that is not negative
NUM_KEYS = 6  # of which each bit is changed
NUM_DRAWS = 60


def check_filters_after_the_temperature(bench: Bench) -> None:
    """top_p and min_p compare the probabilities that tokens have at the request's temperature."""
    names = [name for name in ("top_p", "min_p") if name in bench.can.params]
    for seed, temperature in ((5, 0.5), (6, 0.7), (7, 0.4)):
        logits = make_logits(1, seed=seed, spread=1.0)
        weights = (logits[0].double() / temperature).softmax(-1)
        order = weights.argsort(descending=True)
        before = weights[order].cumsum(0) - weights[order]
        kept = {"top_p": set(order[before < 0.5 + 1e-3].tolist())}
        kept["min_p"] = set(torch.nonzero(weights >= (0.3 - 1e-3) * weights.max()).flatten().tolist())
        for name in names:
            value = {"top_p": 0.5, "min_p": 0.3}[name]
            changes: dict[str, Any] = {"temperature": temperature, name: value}
            bed = bench.make().enter(*(bench.setup(slot, 0, **changes) for slot in range(SLOTS)))
            positions = [[PROMPT + step] * SLOTS for step in range(NUM_DRAWS // SLOTS + 1)]
            drawn = {token for each in positions for token in bed.draw(logits.expand(SLOTS, -1), range(SLOTS), each).tolist()}
            outside = len(drawn - kept[name])
            assert not outside, f"{name}={value} at temperature {temperature}: {outside} drawn tokens are less likely at this temperature"


def check_seed_of_scaled_logits(bench: Bench) -> None:
    """Logits that are as many times greater as the temperature draw the same tokens, at any
    temperature and with any filter."""
    examples = [number for number, params in enumerate(bench.examples) if not params.custom]
    if not examples:
        raise SkipCheck("each of `conformance_params` has parameters of its own")
    values: dict[str, Any] = {"top_k": 5, "top_p": 0.7, "min_p": 0.1}
    filters = [{}, *({name: value} for name, value in values.items() if name in bench.can.params)]
    results = {}
    for factor in (1.0, 0.125, 4.0, 64.0):
        setups = [bench.setup(slot, examples[0], temperature=factor, **filters[slot % len(filters)]) for slot in range(SLOTS)]
        bed, logits = bench.make().enter(*setups), [make_logits(SLOTS, seed=seed, spread=1.0) * factor for seed in range(8)]
        results[factor] = [bed.draw(each, range(SLOTS), [PROMPT + step] * SLOTS).tolist() for step, each in enumerate(logits)]
    wrong = [factor for factor, tokens in results.items() if tokens != results[1.0]]
    assert not wrong, f"logits that are {wrong[0]:g} times greater draw other tokens at the temperature {wrong[0]:g} than at 1"


def check_seed_uses_all_bits(bench: Bench) -> None:
    """Keys that differ in one bit, whichever it is, draw other tokens."""
    slots = torch.arange(NUM_BITS + 1, device=bench.device)
    bed = bench.make(VOCAB, NUM_BITS + 1).enter(*(bench.setup(slot, 0) for slot in range(NUM_BITS + 1)))
    temperature = torch.full((NUM_BITS + 1,), math.log(2), device=bench.device)
    changes, seen = torch.tensor([0, *(1 << bit for bit in range(NUM_BITS))]), torch.zeros(NUM_BITS, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_KEYS):
        keys = torch.randint(0, 1 << 62, (1,), generator=generator) ^ changes
        table = torch.zeros(NUM_BITS + 2, dtype=torch.int64, device=bench.device)
        flat = torch.zeros(NUM_BITS + 1, VOCAB, device=bench.device)
        tokens = bed.operations.draw_plain(flat, temperature, keys.to(bench.device), (table, slots))[0].cpu()
        seen |= tokens[1:] != tokens[0]
    unused = torch.nonzero(~seen).flatten().tolist()
    assert not unused, f"the bits {unused} of a key change no token"
