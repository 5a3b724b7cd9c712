"""Scheduler and runner in one thread, without transport or text: what tests of models, backends and
caches drive.

The two come from `frame.entrypoints.processes.build_engine`, or are made by hand. Must not
know a plugin or a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.runner import UnsampledStep
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate, StepTokens

if TYPE_CHECKING:
    from frame.core.engine import EngineScheduler
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.interfaces.media import MediaItem
    from frame.core.interfaces.runner import ModelRunner, PendingStep

MAX_STEPS = 100_000


class LocalLoop:
    """`generate` runs token-id prompts to their end; `stats` counts what a test wants to know of
    how it came about."""

    def __init__(self, scheduler: EngineScheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.stats = {"steps": 0, "mixed": 0, "decode": 0, "extend": 0, "cached": 0}
        self._number = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        media: Sequence[Sequence[MediaItem]] = (),
    ) -> list[list[int]]:
        """The output tokens of every prompt; media: the items of each. Raises RuntimeError when a
        request is refused or does not end."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        rids = [self.add_request(*request) for request in zip(prompts, each, media or [()] * len(prompts), strict=True)]
        outputs: dict[str, list[int]] = {rid: [] for rid in rids}
        ended: set[str] = set()
        for tokens in self.run_checked():
            for index, rid in enumerate(tokens.rids):
                outputs[rid].extend(tokens.token_ids[index])
            ended |= {tokens.rids[index] for index in tokens.finishes}
        if ended != set(rids):
            raise RuntimeError(f"requests {sorted(set(rids) - ended)} did not end")
        return [outputs[rid] for rid in rids]

    def pool(self, prompts: Sequence[Sequence[int]], second_text_starts: Sequence[int] = ()) -> np.ndarray:
        """The vector of every prompt, float32 [prompts, width], of a model that embeds or
        classifies. Raises RuntimeError as above."""
        starts = second_text_starts or [0] * len(prompts)
        both = zip(prompts, starts, strict=True)
        rids = [self.add_request(prompt, SamplingParams(), second_text_start=start) for prompt, start in both]
        vectors: dict[str, np.ndarray] = {}
        for tokens in self.run_checked():
            for index in tokens.finishes:
                vectors[tokens.rids[index]] = np.frombuffer(tokens.pooled[index], np.float32)
        return np.stack([vectors[rid] for rid in rids])

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        media: Sequence[MediaItem] = (),
        second_text_start: int = 0,
        adapter: str = "",
    ) -> str:
        """Queue a request. adapter: digest of one that is loaded. -> its rid. Raises RuntimeError
        when it is refused."""
        self._number += 1
        rid, tokens = f"r{self._number}", list(prompt)
        message = Generate(rid, tokens, params, media=list(media), second_text_start=second_text_start, adapter=adapter)
        refusal = self.scheduler.add_request(message)
        if refusal is not None:
            raise RuntimeError(f"request {rid} is refused: {refusal.error}")
        return rid

    def run_checked(self) -> Iterator[StepTokens]:
        """All steps. Raises RuntimeError when a request ends with an error."""
        for tokens in self.run_steps():
            self.stats["cached"] += sum(tokens.num_cached_tokens.values())
            for index, finish in tokens.finishes.items():
                if finish.reason == "error":
                    raise RuntimeError(f"request {tokens.rids[index]} failed: {finish.error}")
            yield tokens

    def run_steps(self) -> Iterator[StepTokens]:
        """Yields the `StepTokens` of every step until nothing is left to do, one step behind when
        the scheduler overlaps."""
        in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        depth = 1 if self.scheduler.config.overlap else 0
        for _ in range(MAX_STEPS):
            batch = self.scheduler.schedule_batch(time.monotonic())
            if batch is not None:
                self._count(batch)
                in_flight.append((batch, self.runner.launch(batch)))
            if in_flight and (batch is None or len(in_flight) > depth):
                launched, pending = in_flight.popleft()
                tokens = self.scheduler.commit(launched, pending.wait())
                if in_flight and isinstance(step := in_flight[0][1], UnsampledStep):
                    step.sample(self.scheduler.fill_deferred_mask(in_flight[0][0]))
                yield tokens
            ended = self.scheduler.drain_outputs()
            if isinstance(ended, StepTokens):
                yield ended
            if batch is None and not in_flight and self.scheduler.is_idle:
                return
        raise RuntimeError(f"nothing ended within {MAX_STEPS} steps")

    def _count(self, batch: ScheduledBatch) -> None:
        rows = len(batch.slots)
        kind = "decode" if batch.num_decodes == rows else "mixed" if batch.num_decodes else "extend"
        self.stats["steps"] += 1
        self.stats[kind] += 1
