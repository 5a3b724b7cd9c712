"""Scheduler and runner in one process, without transport or text: what tests of models, backends and caches drive.

Takes what `frame.entrypoints.prepare` yields, so that plugins are chosen and loaded as in a server. Knows no plugin by name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from frame.core.allocator import PagedAllocator
from frame.core.interfaces.build import Collective
from frame.core.messages import Generate, Tokens
from frame.core.model_parts import Loaded, Parts
from frame.core.model_runner import TorchModelRunner, build_runner
from frame.core.no_cache import NoCache
from frame.core.parallel import LocalGroup
from frame.core.radix_cache import RadixCache
from frame.core.sampling_params import SamplingParams
from frame.core.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.interfaces.runner import PendingStep
    from frame.core.resolved import Resolved
    from frame.plugins.registry import Registry

MAX_STEPS = 100_000


class LocalLoop:
    """`generate` runs token-id prompts to their end; `stats` counts what a test wants to know of how it came about."""

    def __init__(self, resolved: Resolved, registry: Registry, tp: Collective | None = None) -> None:
        self.resolved = resolved
        self.runner: TorchModelRunner = build_runner(resolved, load_parts(resolved, registry), tp or LocalGroup())
        self.scheduler = make_scheduler(resolved, registry, self.runner.capacity.num_pages)
        self.stats = {"steps": 0, "mixed": 0, "decode": 0, "extend": 0}
        self._number = 0

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
        """The output tokens of every prompt. Raises RuntimeError when a request is refused or does not end."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        rids = []
        for prompt, wanted in zip(prompts, each, strict=True):
            self._number += 1
            rids.append(f"r{self._number}")
            refusal = self.scheduler.add(Generate(rid=rids[-1], token_ids=list(prompt), params=wanted))
            if refusal is not None:
                raise RuntimeError(f"request {rids[-1]} is refused: {refusal.error}")
        outputs: dict[str, list[int]] = {rid: [] for rid in rids}
        ended: set[str] = set()
        for tokens in self._steps():
            for index, rid in enumerate(tokens.rids):
                outputs[rid].extend(tokens.token_ids[index])
            for index, finish in tokens.finishes.items():
                ended.add(tokens.rids[index])
                if finish.reason == "error":
                    raise RuntimeError(f"request {tokens.rids[index]} failed: {finish.error}")
        if ended != set(rids):
            raise RuntimeError(f"requests {sorted(set(rids) - ended)} did not end")
        return [outputs[rid] for rid in rids]

    def _steps(self) -> Iterator[Tokens]:
        """Yields the `Tokens` of every step until nothing is left to do, one step behind when the scheduler overlaps."""
        in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        depth = 1 if self.resolved.overlap else 0
        for _ in range(MAX_STEPS):
            batch = self.scheduler.next_batch(time.monotonic())
            if batch is not None:
                self._count(batch)
                in_flight.append((batch, self.runner.launch(batch)))
            if in_flight and (batch is None or len(in_flight) > depth):
                launched, pending = in_flight.popleft()
                yield self.scheduler.commit(launched, pending.wait())
            ended = self.scheduler.drain_outputs()
            if isinstance(ended, Tokens):
                yield ended
            if batch is None and not in_flight and self.scheduler.is_idle:
                return
        raise RuntimeError(f"nothing ended within {MAX_STEPS} steps")

    def _count(self, batch: ScheduledBatch) -> None:
        rows = len(batch.slots)
        kind = "decode" if batch.num_decodes == rows else "mixed" if batch.num_decodes else "extend"
        self.stats["steps"] += 1
        self.stats[kind] += 1


def load_parts(resolved: Resolved, registry: Registry) -> Parts:
    """The chosen classes, as the server's composition root loads them."""

    def load(kind: str) -> list[Loaded[Any]]:
        loaded: list[Loaded[Any]] = []
        for choice in resolved.plugins.get(kind, []):
            record = registry.get(kind, choice.name)
            loaded.append(Loaded(registry.load(record), registry.options(record, choice.options)))
        return loaded

    def one(kind: str) -> Loaded[Any] | None:
        return next(iter(load(kind)), None)

    (model,), (attention,) = load("model"), load("attention_backend")
    return Parts(
        model=model.target,
        attention=attention,
        quantization=one("quantization_method"),
        moe_runner=one("moe_runner"),
        moe_dispatcher=one("moe_dispatcher"),
        processors=tuple(load("logits_processor")),
    )


def make_scheduler(resolved: Resolved, registry: Registry, num_pages: int) -> Scheduler:
    """A scheduler with the chosen policies and cache over a pool of `num_pages` pages."""

    def make(kind: str) -> Any:
        choice = resolved.choice(kind)
        record = registry.get(kind, choice.name)
        target, options = registry.load(record), registry.options(record, choice.options)
        return target() if options is None else target(options)

    config = SchedulerConfig(
        page_size=resolved.page_size,
        num_pages=num_pages,
        max_running=resolved.max_running_requests,
        token_budget=resolved.chunked_prefill_size,
        max_context=resolved.max_context,
        vocab_size=resolved.facts.vocab_size,
        eos_ids=resolved.facts.eos_token_ids,
        overlap=resolved.overlap,
    )
    plain = resolved.user.cache.prefix == "none"
    cache = NoCache(resolved.page_size) if plain else RadixCache(resolved.page_size, make("eviction_policy"))
    return Scheduler(config, cache, PagedAllocator(num_pages), make("scheduling_policy"))
