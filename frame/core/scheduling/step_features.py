"""`StepGrammars` and `Speculation`: what the scheduler calls for requests with a grammar and for
drafted tokens.

Used by the scheduler's parts, which get the implementations of `frame.structured_output` and
`frame.speculation` through constructors. Must not know a grammar backend or a drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from frame.core.interfaces.batch import AdapterLoad, DraftOrder, SlotSetup
from frame.core.interfaces.drafter import Drafter, Drafts, TreeShape
from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.core.scheduling.running import StepPlan, StepRecord

_OFF = Finish("error", error="this server has no adapters; serve with --enable-lora", code="invalid_request", param="model")
_NO_PAGES = np.empty(0, np.int32)
_NO_MEDIA = Finish("error", error="this server reads text alone; remove images, videos and audio", code="invalid_request", param="messages")


class PromptBudget(Protocol):
    """Chooses how many prompt tokens a step has, by the time that earlier ones took."""

    def choose(self, step: int, num_decodes: int, now: float) -> int:
        """Most prompt tokens of a step beside so many decodes. It is planned at `now`."""

    def record_step(self, record: StepRecord, now: float) -> None:
        """A step is committed at `now`."""


class StepGrammars(Protocol):
    """Grammars of running requests: accepts sampled tokens and fills token masks. After each step
    `take_stopped` returns the requests that must leave the device because of a slow call, and
    `take_resolved` those whose slow call has ended."""

    @property
    def num_jumped(self) -> int:
        """Forced tokens that no step sampled, since the start."""

    def __len__(self) -> int:
        """The number of held requests."""

    def start_request(self, request: Request) -> Finish | None:
        """Prepare the grammar of a request that arrives; it accepts the output of a recovered one.
        Returns how the request ends on failure. None: it continues."""

    def accept_tokens(self, drawn: Sequence[tuple[Request, Sequence[int]]], num_rows: int) -> list[Finish | None]:
        """Accept sampled tokens, of which only a request's last may end it. Returns for each
        request how it ends. None: it continues. num_rows: rows of the step, with and without a
        grammar. The next masks may be unfinished until `wait_for_masks`."""

    def wait_for_masks(self) -> None:
        """Wait for the masks that `accept_tokens` has begun. Every other method does so first."""

    def fill_masks(self, table: RequestTable, slots: np.ndarray) -> np.ndarray | None:
        """Return the allowed tokens of a step's samples as bits, int32 [slots, words], and append
        forced tokens to their requests. slots: those of the samples; rows without a grammar allow
        all tokens. All steps before it must be committed. None: no slot has a grammar."""

    def trim_drafts(self, table: RequestTable, slots: np.ndarray, drafts: Drafts, *, is_late: bool = False) -> Drafts:
        """Cut the drafts of slots with a grammar before the first token that it does not allow or
        that ends it, and keep their masks for `fill_masks`. Forced tokens, slow grammars and trees
        get no draft. is_late: the drafts are in the step in flight, so that all of them get masks;
        a request without them leaves the device."""

    def stop_request(self, request: Request) -> None:
        """Let a request leave the device until its next mask is filled."""

    def take_stopped(self) -> list[Request]:
        """Remove and return the requests that must leave the device because of a slow call."""

    def hold_request(self, request: Request) -> None:
        """Hold a request that has left the device."""

    def take_resolved(self) -> list[tuple[Request, Finish | None]]:
        """Remove and return the held requests whose call has ended, each with how it ends. None: it
        continues."""

    def release_request(self, request: Request) -> bool:
        """Release a held request and abandon its call. Returns whether it was held."""

    def close(self) -> None:
        """End the threads."""


class Speculation(Protocol):
    """Drafts of running requests, from the drafter to their verification, as arrays by slot."""

    tree: TreeShape | None  # None: drafts are chains

    @property
    def is_active(self) -> bool:
        """Whether there is a drafter, which has not failed."""

    @property
    def num_ahead(self) -> int:
        """Tokens after a row's last one that a device drafter stores; 0: there is none."""

    @property
    def next_length(self) -> int:
        """The draft length of the next step."""

    @property
    def overlaps(self) -> bool:
        """Whether steps with drafts overlap now: their ids stay on the device."""

    @property
    def may_draft(self) -> bool:
        """Whether the next step has drafts."""

    def enable(self, drafter: Drafter, num_steps: int, *, is_adaptive: bool = False, tree: TreeShape | None = None) -> None:
        """Draft up to `num_steps` tokens a row from now on. is_adaptive: as many as raise the
        output rate. tree: the drafts may be trees, which the attention backend must read. Called
        before the first request."""

    def update(self, setups: Sequence[SlotSetup], released: Sequence[int]) -> int:
        """A step is scheduled: release slots, then set slots up. -> the step's draft length."""

    def needs_order(self, *, has_prompts: bool) -> bool:
        """Whether a device drafter does anything after this step."""

    def propose(self, slots: np.ndarray) -> Drafts | None:
        """The drafts of slots whose next decode has been scheduled; None: there is none. A row has
        a draft if its tokens are committed and the request may get more than one token; a grammar
        cuts the draft. slots: intp [n]."""

    def note_order(self, slots: np.ndarray, order: DraftOrder | None) -> None:
        """The slots that sample in the step being scheduled, and what the drafter does after it."""

    def count_device_drafts(self, slots: np.ndarray) -> Drafts | None:
        """As `propose`, of drafts that stay on the device: the counts alone. The tokens before them
        may be in flight."""

    def mask_device_drafts(self, slots: np.ndarray) -> np.ndarray | None:
        """Make the masks of grammars along the drafts of `count_device_drafts`, once the tokens
        before them are committed. slots: those of the step's samples. -> the most tokens that each
        slot may output, int32 [slots of the table]; None: no draft has a grammar."""

    def bound_accepted(self, counts: np.ndarray) -> np.ndarray:
        """The most tokens that may be accepted of a draft of so many: of a tree one branch."""

    def fill_rows(self, slots: np.ndarray, drafts: Drafts) -> np.ndarray:
        """The token ids of rows with drafts, int32: the last committed token, then the draft."""

    def observe(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """New output tokens of slots: int32 [n, width], of which `counts` [n] are valid."""

    def store(self, slots: np.ndarray, drafts: np.ndarray | None) -> None:
        """The drafts of a device drafter after the tokens that `observe` was called with: int32 [n,
        k]. None: it made none of those that were ordered, since its model has failed."""

    def record_step(self, record: StepRecord, now: float) -> None:
        """A step is committed at `now` (seconds, monotonic)."""

    def count(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, nodes: np.ndarray | None = None) -> None:
        """Take in the verified drafts of a step: tokens by row. slots: those of the rows. nodes: of
        trees: the node of each output, int64 [rows, n]."""

    def describe_load(self) -> dict[str, Any]:
        """Counters since the start, named as in `Heartbeat`."""


class RequestAdapters(Protocol):
    """Adapters on the device. A running request holds the place of its adapter. Methods ignore
    requests without one."""

    def start_request(self, request: Request) -> Finish | None:
        """A request with an adapter arrives. Sets `adapter_start` and `adapter_key`. Returns how
        the request ends if its adapter is not loaded. None: it continues."""

    def finish_request(self, request: Request) -> None:
        """The request is forgotten."""

    def begin_pass(self, queue: Iterable[Request], count: int, now: float) -> list[Request]:
        """Return the first `count` waiting requests that a step may start, in order."""

    def acquire(self, request: Request, *, is_idle: bool) -> bool:
        """Give a request its adapter's place (`adapter_place`), and copy the adapter there if it is
        not on the device. Returns False if it waits. is_idle: no request runs."""

    def release(self, request: Request) -> None:
        """Take the request's place back, if it has one."""

    def take_loads(self) -> list[AdapterLoad]:
        """Remove and return the copies that the next step begins with."""

    def repeat_loads(self, loads: Sequence[AdapterLoad]) -> None:
        """A step failed, so that the device may lack these copies: make them again."""

    def is_on_device(self, request: Request) -> bool:
        """Whether the request could start now as far as its adapter is concerned."""

    def choose_victims(self, first: Request, eligible: Sequence[Request]) -> list[Request]:
        """Choose running requests whose preemption frees a place for a waiting request."""

    def describe_load(self) -> dict[str, Any]:
        """Gauges and counters, named as in `Heartbeat`."""


class NoAdapters:
    """The scheduler's adapters where they are off; implements `RequestAdapters`."""

    def finish_request(self, request: Request) -> None: ...
    def release(self, request: Request) -> None: ...
    def repeat_loads(self, loads: Sequence[AdapterLoad]) -> None: ...

    def start_request(self, request: Request) -> Finish | None:
        return _OFF if request.adapter else None

    def begin_pass(self, queue: Iterable[Request], count: int, now: float) -> list[Request]:
        return list(islice(queue, count))

    def acquire(self, request: Request, *, is_idle: bool) -> bool:
        return True

    def take_loads(self) -> list[AdapterLoad]:
        return []

    def is_on_device(self, request: Request) -> bool:
        return True

    def choose_victims(self, first: Request, eligible: Sequence[Request]) -> list[Request]:
        return []

    def describe_load(self) -> dict[str, Any]:
        return {}


class RequestMedia(Protocol):
    """Media of requests: the cache keys and positions of their placeholders, and the rows of the
    device's table that hold the encoders' output. All methods but `start_request`, `release`,
    `fail_step` and `take_inputs` are called for requests with media alone."""

    def start_request(self, request: Request) -> Finish | None:
        """A request arrives. Sets `media_layout`, `prompt_keys` and `position_offset`. Returns how
        it ends if its media cannot be served. None: it continues."""

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request may start now as far as its media are concerned."""

    def count_next(self, request: Request, start: int) -> int:
        """Tokens from `start` on that a chunk must hold together; 0: any number."""

    def limit_chunk(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        """The tokens of a chunk, at most `count`, whose items have rows, or can get them, and can
        be encoded in this step. The item after them may get rows, and be encoded by layers."""

    def schedule_chunk(self, request: Request, start: int, count: int, step: int) -> None:
        """A chunk that `limit_chunk` allowed is in the step: hold the rows of its items, and order
        those to be encoded that are not in the table."""

    def release(self, request: Request) -> None:
        """The request leaves the device."""

    def take_inputs(self, plan: StepPlan, num_tokens: int) -> dict[str, Any]:
        """The fields of `ScheduledBatch` that concern media, of a step whose `token_ids` are
        `num_tokens`, the last of them those of `plan.chunks`."""

    def fail_step(self, step: int, running: Sequence[Request]) -> list[Request]:
        """A step failed: nothing in the table is valid. -> requests with rows in later steps, which
        may have read what is missing, and those whose items it or a later one encoded by layers."""

    def describe_load(self) -> dict[str, Any]:
        """Gauges and counters, named as in `Heartbeat`."""


class NoMedia:
    """The scheduler's media where model or server read none; implements `RequestMedia`."""

    def schedule_chunk(self, request: Request, start: int, count: int, step: int) -> None: ...
    def release(self, request: Request) -> None: ...

    def start_request(self, request: Request) -> Finish | None:
        return _NO_MEDIA if request.media else None

    def may_start(self, request: Request) -> bool:
        return True

    def count_next(self, request: Request, start: int) -> int:
        return 0

    def limit_chunk(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        return count

    def take_inputs(self, plan: StepPlan, num_tokens: int) -> dict[str, Any]:
        return {}

    def fail_step(self, step: int, running: Sequence[Request]) -> list[Request]:
        return []

    def describe_load(self) -> dict[str, Any]:
        return {}


class RequestTiers(Protocol):
    """Cache tiers behind the prefix cache: reads the missing part of a waiting request's prefix
    back, and stores prefixes of the cache."""

    def poll(self, now: float) -> None:
        """Take in the copies that have ended: insert loaded prefixes, unlock stored ones. Called
        before each step is planned, and while no step can be planned."""

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request starts now; False while a part of its prefix is being loaded,
        which the call may begin. True for a request that is to compute it."""

    def is_loading(self, request: Request) -> bool:
        """Whether the request waits for a load."""

    def forget(self, request: Request) -> None:
        """The request starts or ends, and does not wait for a load any more."""

    def offer(self, request: Request, keys: np.ndarray) -> None:
        """The prefix cache holds the pages of these cache keys, a whole number of pages, in the
        request's namespace: they may be stored."""

    def invalidate_blocks(self) -> None:
        """The prefix cache is about to be flushed: no request may read blocks that are stored now.
        Raises RuntimeError if copies do not end, in which case pages would stay in the cache."""

    def list_held_pages(self) -> tuple[np.ndarray, np.ndarray]:
        """(pages in transit to the prefix cache, which are allocated; pages of the prefix cache
        that copies lock), int32."""

    def list_handles(self) -> list[Any]:
        """The locked handles of the prefix cache."""

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way."""

    def describe_load(self) -> dict[str, Any]:
        """Gauges and counters, named as in `Heartbeat`."""

    def close(self) -> None:
        """Stop copies and tiers."""


class NoTiers:
    """The scheduler's tiers where there are none; implements `RequestTiers`."""

    is_busy = False

    def poll(self, now: float) -> None: ...
    def forget(self, request: Request) -> None: ...
    def offer(self, request: Request, keys: np.ndarray) -> None: ...
    def invalidate_blocks(self) -> None: ...
    def close(self) -> None: ...

    def may_start(self, request: Request) -> bool:
        return True

    def is_loading(self, request: Request) -> bool:
        return False

    def list_held_pages(self) -> tuple[np.ndarray, np.ndarray]:
        return _NO_PAGES, _NO_PAGES

    def list_handles(self) -> list[Any]:
        return []

    def describe_load(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """What a scheduler is given of the rooms above it."""

    grammars: StepGrammars
    speculation: Speculation
    adapters: RequestAdapters = NoAdapters()  # noqa: RUF009 - it has no state
    media: RequestMedia = NoMedia()  # noqa: RUF009 - it has no state
    tiers: RequestTiers = NoTiers()  # noqa: RUF009 - it has no state
    prompt_budget: PromptBudget | None = None  # None: `SchedulerConfig.token_budget`

    def release(self, request: Request) -> None:
        """A request leaves the device."""
        self.adapters.release(request)
        self.media.release(request)
