"""Checks of what samplers do with the values of a request: temperatures together with filters, any
top_k, and the bits of keys. Used by the suite of the kind. Must not know a sampler by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from frame.core.interfaces.sampling_params import MAX_INT
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


def check_logits_that_are_shifted(bench: Bench) -> None:
    """A number that is added to all logits of a row changes no draw: probabilities depend on
    differences."""
    results = {}
    for shift in (0.0, 4096.0, -4096.0):
        bed = bench.make().enter(*(bench.setup(slot, slot, temperature=1.0) for slot in range(SLOTS)))
        logits = [(make_logits(SLOTS, seed=seed) * 256).round() / 256 + shift for seed in range(8)]  # sums are exact
        results[shift] = [bed.draw(each, range(SLOTS), [PROMPT + step] * SLOTS).tolist() for step, each in enumerate(logits)]
    wrong = [shift for shift, tokens in results.items() if tokens != results[0.0]]
    assert not wrong, f"logits to which {wrong[0]:g} is added draw other tokens"


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


def check_top_k_of_any_size(bench: Bench) -> None:
    """A client may ask for more tokens than there are, and for the greatest number."""
    if "top_k" not in bench.can.params:
        raise SkipCheck("it honours no top_k")
    sizes = (VOCAB - 1, VOCAB, VOCAB + 1, MAX_INT)
    bed, logits = bench.make().enter(*(bench.setup(slot, 0, top_k=top_k) for slot, top_k in enumerate(sizes))), make_logits(1, seed=9)
    tokens = bed.draw(logits.expand(len(sizes), -1), range(len(sizes)), [PROMPT] * len(sizes)).tolist()
    assert all(0 <= token < VOCAB for token in tokens), f"with top_k={sizes} of {VOCAB} tokens, the tokens {tokens} are drawn"


def check_top_k_of_close_logits(bench: Bench) -> None:
    """Logits that differ by a thousandth are different: top_k=1 keeps one token."""
    if "top_k" not in bench.can.params:
        raise SkipCheck("it honours no top_k")
    greatest = 20 - torch.arange(VOCAB) / 64
    sizes = [1 + slot % 3 for slot in range(SLOTS)]
    bed = bench.make().enter(*(bench.setup(slot, 0, top_k=top_k) for slot, top_k in enumerate(sizes)))
    for step in range(8):
        tokens = bed.draw(greatest.expand(SLOTS, -1), range(SLOTS), [PROMPT + step] * SLOTS).tolist()
        wrong = [(top_k, token) for top_k, token in zip(sizes, tokens, strict=True) if token >= top_k]
        assert not wrong, f"of the tokens in order, top_k={wrong[0][0]} keeps token {wrong[0][1]}"


def check_filters_keep_enough(bench: Bench) -> None:
    """The token whose probability reaches top_p is kept, and so are all others that a filter keeps:
    each is drawn."""
    logits = torch.full((VOCAB,), -30.0)
    logits[[11, 5, 70, 31]] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    values: dict[str, Any] = {"top_k": 3, "top_p": 0.75, "min_p": 0.45}
    for name, value in ((name, value) for name, value in values.items() if name in bench.can.params):
        bed = bench.make().enter(*(bench.setup(slot, 0, **{name: value}) for slot in range(SLOTS)))
        positions = [[PROMPT + step] * SLOTS for step in range(8)]
        drawn = {token for each in positions for token in bed.draw(logits.expand(SLOTS, -1), range(SLOTS), each).tolist()}
        assert drawn == {11, 5, 70}, f"{name}={value} of the probabilities 0.4, 0.3, 0.2 and 0.1 keeps {len(drawn)} tokens, and not 3"
