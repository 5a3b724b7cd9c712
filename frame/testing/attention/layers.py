"""Checks of attention backends over two layers of equal shape that differ in all other facts: the
scales of an fp8 cache, sinks, scale, soft cap and window.

Both layers are computed by turns on one backend. Must not know a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from frame.core.interfaces.attention import AttentionBackend
from frame.entrypoints.tools.bench.paged_batches import DTYPES, Case, PlainKVCache, planned, requirements
from frame.testing.attention.calls import Make, Place
from frame.testing.attention.cases import DECODES, LATENT, MIXED, with_pages_for
from frame.testing.attention.reference import TOLERANCE, Inputs, Placed, make_inputs, reference
from frame.testing.attention.steps import LayeredKVCache
from frame.testing.conformance import Check, Subject
from frame.testing.tensors import require_near

STEPS = 2
SCORES = (1.3, 0.8)  # of the two layers, by which their scales differ


@dataclass(frozen=True)
class Difference:
    """What may differ between two layers of equal shape, as fields of `Case` for each."""

    name: str
    layers: tuple[dict[str, Any], dict[str, Any]]


FP8 = torch.float8_e4m3fn
DIFFERENCES = (
    Difference("sinks", ({"sinks": True}, {"sinks": True})),  # whose numbers differ by the seed
    Difference("soft_cap", ({"soft_cap": 1.5}, {"soft_cap": 0.6})),
    Difference("window", ({"window": 7}, {"window": 23})),
)
HEADS_FP8 = Difference("fp8", ({"kv_dtype": FP8, "kv_scales": (2.0, 0.5)}, {"kv_dtype": FP8, "kv_scales": (0.5, 1.0)}))
LATENT_FP8 = Difference("fp8", ({"kv_dtype": FP8, "kv_scales": (0.5, 1.0)}, {"kv_dtype": FP8, "kv_scales": (1.0, 1.0)}))

HEADS = (Case(MIXED, head_dim=64, v_head_dim=64), Case(MIXED, page_size=64, head_dim=128, v_head_dim=128))
LATENTS = (Case(MIXED, **LATENT), Case(MIXED, page_size=64, heads=16, rank=512, rope=64, head_dim=192, v_head_dim=128))


def layer_checks(make: Make, place: Place, subject: Subject) -> Iterator[Check]:
    """For each kind of attention and of cache that the capabilities cover, in the first sizes and
    dtype that fit: two layers with all facts that go together, then two with the others."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    dtypes = [name for name in DTYPES if name in getattr(capabilities, "dtypes", DTYPES)]
    for kind, sizes, fp8 in (("mha", HEADS, HEADS_FP8), ("mla", LATENTS, LATENT_FP8)):
        for first in ((), (fp8,)):
            for case, dtype, rows in product(sizes, dtypes, (MIXED, DECODES)):
                placed = replace(with_pages_for(case, capabilities), rows=rows, dtype=DTYPES[dtype], device=device)
                if pairs := _combine(placed, first, capabilities):
                    for names, layers in pairs.items():
                        yield Check("-".join(("layers_differ", kind, *names, dtype)), partial(_tells_layers_apart, make, place, layers))
                    break


def _combine(case: Case, first: tuple[Difference, ...], capabilities: Any) -> dict[tuple[str, ...], tuple[Case, Case]]:
    """Pairs of layers by the names of their facts, so few that each fact of the capabilities is in
    one."""
    pairs: dict[tuple[str, ...], tuple[Case, Case]] = {}
    left = list(DIFFERENCES)
    base = _vary((replace(case, scores=SCORES[0]), replace(case, scores=SCORES[1], seed=case.seed + 50)), first)
    while _fits(base, capabilities):
        layers, names = base, [each.name for each in first]
        for each in tuple(left):
            if _fits(wider := _vary(layers, (each,)), capabilities):
                layers = wider
                names.append(each.name)
                left.remove(each)
        if pairs and len(names) == len(first):  # the others are not supported
            break
        pairs[tuple(names)] = layers
    return pairs


def _vary(layers: tuple[Case, Case], differences: tuple[Difference, ...]) -> tuple[Case, Case]:
    one, other = layers
    for each in differences:
        one, other = replace(one, **each.layers[0]), replace(other, **each.layers[1])
    return one, other


def _fits(layers: tuple[Case, Case], capabilities: Any) -> bool:
    phases = requirements(layers[0]).phases
    mixed = ("mixed",) if "extend" in phases else ()
    return not any(capabilities.unsupported(replace(requirements(case), phases=(*phases, *mixed))) for case in layers)


def _tells_layers_apart(make: Make, place: Place, layers: tuple[Case, Case]) -> None:
    """Each layer is computed by its own facts in each step, and the steps have pages of their
    own."""
    backend = make(layers[0])
    known = [make_inputs(case) for case in layers]
    for step in range(STEPS):
        inputs = [_make_step(case, each, layer, step) for layer, (case, each) in enumerate(zip(layers, known, strict=True))]
        for each in inputs[1:]:
            each.pages = inputs[0].pages
        placed = [place(backend, case, each) for case, each in zip(layers, inputs, strict=True)]
        for layer, out in enumerate(_run(backend, layers[0], inputs, placed)):
            case, spec = layers[layer], inputs[layer].spec
            tolerance = TOLERANCE[case.dtype] * max(1.0, *case.kv_scales)
            what = f"step {step}, the layer of number {layer} of two of equal shape ({spec})"
            require_near(out.double().cpu(), reference(case, inputs[layer]), what, tolerance, is_relative=False)


def _make_step(case: Case, known: Inputs, layer: int, step: int) -> Inputs:
    """Tensors and pages of a step, with the layer's own facts and projections."""
    known.spec = known.spec if known.spec.layer == layer else replace(known.spec, layer=layer)
    return replace(make_inputs(replace(case, seed=case.seed + 100 * step)), spec=known.spec, weight=known.weight)


def _run(backend: AttentionBackend, case: Case, inputs: list[Inputs], placed: list[Placed]) -> Iterator[torch.Tensor]:
    """The results of one step's layers, which have one plan and one cache."""
    caches = [PlainKVCache(case.page_size, each.batch.kv.layer(0), each.batch.kv.scales(0)) for each in placed]
    kv = LayeredKVCache(case.page_size, caches)
    batch = planned(backend, replace(placed[0].batch, kv=kv))
    for each, one in zip(inputs, placed, strict=True):
        yield one.spread().run(backend, each.spec, batch)
