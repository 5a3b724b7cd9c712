"""`SchedulerRig`: a scheduler with a `FakeRunner`, driven step by step and checked against what an
unconstrained run would yield.

Used by the scheduler's own tests and by the conformance checks of policies. Must not know a policy
by name.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.cache import (
    EvictableNode,
    EvictionContext,
    EvictionPolicy,
    PrefixCache,
    PrefixCacheCapabilities,
    PrefixCacheContext,
)
from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.runner import PendingStep, UnsampledStep
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingContext, SchedulingPolicy
from frame.core.kv_cache.page_allocator import PageAllocator
from frame.core.messages import Finish, Generate, SessionPin, StepTokens, TokenLogprobs
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.planner import POLICY_MATCH_WINDOW
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.core.scheduling.step_features import NoTiers, RequestMedia, RequestTiers
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.plugins.loader import load_registry
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.drafters import Script, ScriptedDrafter
from frame.testing.fake_runner import FakeRunner, continuation
from frame.testing.page_allocators import make_allocator

if TYPE_CHECKING:
    from pydantic import BaseModel


IsInvalid = Callable[[Sequence[int]], bool]  # of a row's tokens: whether its logits are not finite
TIGHT_VOCAB = 97  # of `make_tight_config`
PATIENCE = 4  # steps that a request may wait with room for it: for a prefill of its prefix to be committed


@functools.cache
def load_cache_class(reuses: bool) -> type[PrefixCache]:
    """frame's own prefix cache of the highest rank that stores prefixes, or that stores none."""
    registry = load_registry(installed=False)
    for record in registry.records("prefix_cache"):
        if isinstance(record.capabilities, PrefixCacheCapabilities) and record.capabilities.reuses == reuses:
            return registry.load(record)
    raise LookupError(f"no prefix cache of frame has reuses={reuses}")


class OldestFirst(EvictionPolicy):
    """Least recently used: the eviction order of a rig without one."""

    def __init__(self, context: EvictionContext = EVICTION, options: BaseModel | None = None) -> None:
        super().__init__(context, options)

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.last_access,)


class InOrder(SchedulingPolicy):
    """Schedules requests in the order of their arrival."""

    def __init__(self, context: SchedulingContext = SCHEDULING, options: BaseModel | None = None) -> None:
        super().__init__(context, options)

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Sequence[SchedulableRequest]:
        return waiting


@dataclass(slots=True)
class Expected:
    """What a request asked for, and what came."""

    message: Generate
    whole: list[int]  # every token of an unconstrained run
    got: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cached: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    pooled: bytes = b""


class SchedulerRig:
    """Runs requests and remembers what they should and did yield.

    `step` builds and launches one batch and commits those that are due (with overlap one stays in
    flight). After every step it checks pages, locks and slots, and that no request waits longer
    than `PATIENCE` steps while there is room.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulingPolicy,
        eviction: EvictionPolicy | None = None,
        prefix_cache: bool | PrefixCache = True,  # frame's own, none, or this one
        is_invalid: IsInvalid | None = None,
        media: RequestMedia | None = None,
    ) -> None:
        self.config = config
        self.now = 0.0
        self.requests: dict[str, Expected] = {}
        self.max_rows = 0
        pools, self.allocator, self.runner = self.make_memory(is_invalid)
        cache = prefix_cache
        if isinstance(cache, bool):
            taken = (eviction or OldestFirst()) if cache else None
            cache = load_cache_class(cache)(PrefixCacheContext(config.page_size, config.num_pages, taken, pools))
        self.scheduler = assemble_scheduler(
            config, cache, self.allocator, policy, clock=lambda: self.now, media=media, make_tiers=self.make_tiers
        )
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        self._kept_waiting: dict[str, int] = {}  # steps in a row

    def make_tiers(self, kv_manager: KVCacheManager) -> RequestTiers:
        """The cache tiers behind the prefix cache."""
        return NoTiers()

    def make_memory(self, is_invalid: IsInvalid | None) -> tuple[tuple[PagePool, ...], PageAllocator, FakeRunner]:
        """The pools of the cache groups, their allocator, and a runner that uses them."""
        config = self.config
        pool = PagePool("tokens", config.num_pages, config.page_size)
        sizes = (config.num_pages, config.page_size, config.max_running, config.max_pages, config.vocab_size)
        return (pool,), make_allocator(config.num_pages), FakeRunner(*sizes, is_invalid)

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        namespace: str = "",
        deadline: float | None = None,
        grammar: Callable[[], Grammar] | None = None,
        media: Sequence[MediaItem] = (),
        transfer: KVTransfer | None = None,
        pin: SessionPin | None = None,
    ) -> str:
        """Queue a request; it must not be refused. `params.seed` must be set when the temperature
        is above 0; `grammar` makes one at its beginning. -> rid."""
        rid = f"request-{len(self.requests)}"
        message = Generate(
            rid=rid, token_ids=list(tokens), params=params, priority=priority, namespace=namespace, deadline=deadline, media=list(media),
            transfer=transfer, pin=pin,
        )  # fmt: skip
        refused = self.scheduler.add_request(message, grammar() if grammar is not None else None)
        assert refused is None, f"{rid} was refused: {refused.error}"
        self.requests[rid] = Expected(message, self._whole(tokens, params, grammar() if grammar is not None else None))
        return rid

    def enable_drafts(self, script: Script, num_steps: int) -> ScriptedDrafter:
        """Draft with `script` from now on. Call it before the first request."""
        drafter = ScriptedDrafter(script)
        self.scheduler.speculation.enable(drafter, num_steps)
        return drafter

    def abort(self, rid: str) -> None:
        self.scheduler.abort([rid])
        self._receive(self.scheduler.drain_outputs())

    def step(self) -> bool:
        """One turn of an engine's loop; False when there was nothing to launch, to commit or to
        end."""
        preempted = self.scheduler.get_load()["preempted"]
        batch = self.scheduler.schedule_batch(self.now)
        if batch is not None or not self._in_flight or not self.scheduler.speculation.is_active:  # else drafts wait for a commit
            self._check_admission(batch, self.scheduler.get_load()["preempted"] > preempted)
        if batch is not None:
            self.max_rows = max(self.max_rows, len(batch.slots))
            self._check_budget(batch)
            self._in_flight.append((batch, self.runner.launch(batch)))
        worked = bool(self._in_flight)
        keep = 1 if self.config.overlap and batch is not None else 0
        while len(self._in_flight) > keep:
            self.commit()
        if batch is not None and batch.has_deferred_grammar_mask:
            self._sample()
        ended = self.scheduler.drain_outputs()
        self._receive(ended)
        self.scheduler.check_integrity()
        return worked or ended is not None

    def commit(self) -> None:
        """Commit the oldest step in flight, if there is one."""
        if self._in_flight:
            batch, pending = self._in_flight.popleft()
            self._receive(self.scheduler.commit(batch, pending.wait()))

    def _sample(self) -> None:
        """Draw the tokens of the step that was launched last."""
        for batch, pending in self._in_flight:
            if batch.has_deferred_grammar_mask and isinstance(pending, UnsampledStep):
                pending.sample(self.scheduler.fill_deferred_mask(batch))

    def run(self, max_steps: int = 10_000) -> None:
        """Step until idle, then check everything."""
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                break
            assert self.step(), "requests wait, but nothing is scheduled and nothing is in flight"
        else:
            raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler.get_load()}")
        self.check()

    def check(self) -> None:
        """All requests ended as they must; all pages and slots are back."""
        for rid, request in self.requests.items():
            self._check_request(rid, request)
        self.scheduler.check_integrity()
        self.scheduler.flush_cache()
        lost = len(self.allocator.pages_out())
        assert not lost, f"{lost} pages did not come back"

    def _check_request(self, rid: str, request: Expected) -> None:
        assert request.finish is not None, f"{rid} never finished"
        assert request.got == request.whole[: len(request.got)], f"{rid} yielded {request.got}, an unconstrained run yields {request.whole}"
        ended_early = request.finish.reason == "abort" or request.finish.code in (
            "non_finite_logits",
            "invalid_request",
            "deadline_exceeded",
        )
        count, expected = len(request.got), len(request.whole)
        assert ended_early or count == expected, f"{rid} ended after {count} of {expected} tokens: {request.finish}"
        assert not request.got or request.cached is not None, f"{rid} was not told how many tokens were cached"
        if request.message.params.logprobs is not None:
            told = [token for each in request.logprobs for token in each.token_ids]
            assert told == request.got, f"{rid} has log-probabilities of {told} for {request.got}"
        if request.message.params.prompt_logprobs is not None and request.got:
            logprobs = request.prompt_logprobs
            assert logprobs is not None, f"{rid} has no log-probabilities of its prompt"
            is_of_prompt = logprobs.token_ids == list(request.message.token_ids) and logprobs.logprobs[0] is None
            assert is_of_prompt, f"{rid} has log-probabilities of {logprobs.token_ids} for its prompt"
            assert None not in logprobs.logprobs[1:], f"{rid} lacks the log-probability of prompt token {logprobs.logprobs.index(None, 1)}"

    def _whole(self, tokens: Sequence[int], params: SamplingParams, grammar: Grammar | None) -> list[int]:
        limit = min(self.config.max_context, self.config.capacity + 1) - len(tokens)
        count = limit if params.max_tokens is None else min(limit, params.max_tokens)
        whole = continuation(tokens, params, params.seed or 0, self.config.vocab_size, count, grammar)
        stops = params.ends(self.config.eos_ids)
        ends = [i + 1 for i, token in enumerate(whole) if token in stops and i + 1 >= params.min_tokens]
        return whole[: ends[0]] if ends else whole

    def _check_budget(self, batch: ScheduledBatch) -> None:
        prompt_tokens = _count_prompt_tokens(batch)
        is_within = prompt_tokens <= self.config.token_budget and len(batch.slots) <= self.config.max_running
        assert is_within, f"step {batch.step} has {prompt_tokens} prompt tokens in {len(batch.slots)} rows"

    def _check_admission(self, batch: ScheduledBatch | None, has_preempted: bool) -> None:
        """The scheduler is work-conserving: with budget, slots and pages left, it admits a waiting
        request within a few steps."""
        scheduler, kept = self.scheduler, {}
        prompt_tokens = 0 if batch is None else _count_prompt_tokens(batch)
        waiting = scheduler._queue.head(POLICY_MATCH_WINDOW)
        if waiting and prompt_tokens < self.config.token_budget and scheduler._running.table.num_free and not has_preempted:
            planner = scheduler._planner
            maximum = max(map(planner._count_pages_for, waiting))
            groups = scheduler._running.kv_manager.groups
            has_room = groups is None or all(groups.has_room(request.num_tokens, planner._growth_reserve) for request in waiting)
            if has_room and planner._count_reserved_pages() + maximum < scheduler._running.kv_manager.num_available:
                kept = {request.rid: self._kept_waiting.get(request.rid, 0) + 1 for request in waiting}
        self._kept_waiting = kept
        for rid, steps in kept.items():
            assert steps <= PATIENCE, f"{rid} waits for the {steps}th step in a row, though there is room for it"

    def _receive(self, tokens: StepTokens | None) -> None:
        if tokens is None:
            return
        for i, rid in enumerate(tokens.rids):
            request = self.requests[rid]
            assert request.finish is None, f"{rid} got tokens after its end"
            request.got += tokens.token_ids[i]
            request.finish = tokens.finishes.get(i)
            if i in tokens.num_cached_tokens:
                assert request.cached is None, f"{rid} was told twice how many tokens were cached"
                request.cached = tokens.num_cached_tokens[i]
            if i in tokens.logprobs:
                request.logprobs.append(tokens.logprobs[i])
            request.prompt_logprobs = tokens.prompt_logprobs.get(i, request.prompt_logprobs)
            request.pooled = tokens.pooled.get(i, request.pooled)


def make_tight_config(page_size: int, num_pages: int, **changes: Any) -> SchedulerConfig:
    """A scheduler of few slots and tokens a step, whose pages run out with `num_pages` of them."""
    values: dict[str, Any] = {"max_running": 5, "token_budget": 12, "max_context": 60, "vocab_size": TIGHT_VOCAB, "eos_ids": (3,)}
    return SchedulerConfig(page_size=page_size, num_pages=num_pages, **{**values, **changes})


def add_requests(rig: SchedulerRig, seed: int, namespaces: Sequence[str] = ("",), abort_share: float = 0.0) -> None:
    """Run 40 requests with common prefixes, random lengths and pauses between them."""
    rng, size = random.Random(seed), rig.config.page_size
    stems = [[rng.randrange(TIGHT_VOCAB) for _ in range(rng.randint(size + 1, 24 + size))] for _ in range(4)]
    for number in range(40):
        params = SamplingParams(max_tokens=rng.randint(1, 24), temperature=rng.choice((0.0, 1.0)), seed=number)
        tokens = [*rng.choice(stems), *(rng.randrange(TIGHT_VOCAB) for _ in range(rng.randint(0, 6)))]
        rid = rig.add(tokens, params, priority=rng.randint(0, 2), namespace=rng.choice(namespaces))
        for _ in range(rng.choice((0, 0, 1, 3))):
            rig.step()
        if rng.random() < abort_share:
            rig.abort(rid)
    rig.run()


def _count_prompt_tokens(batch: ScheduledBatch) -> int:
    """Tokens of the extend rows without a draft."""
    counts = batch.num_scheduled[batch.num_decodes :]
    return int(counts.sum() if batch.num_drafts is None else counts[batch.num_drafts[batch.num_decodes :] == 0].sum())
