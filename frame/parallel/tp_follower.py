"""Steps of several ranks: `follow` runs rank 0's batches on the ranks >= 1, and `LeadingRunner`
sends them from rank 0. In a pipeline, the last stage sends rank 0 the results.

Only rank 0 has a scheduler, so ranks cannot diverge. Must not know a request or a client.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from frame.core.blame import explain
from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import (
    AdapterOrder,
    DeviceLost,
    MemoryOrder,
    ModelRunner,
    PendingOrder,
    PendingStep,
    ProfileError,
    ProfileRequest,
    TierOrder,
    TierReply,
    TransferOrder,
    UnsampledStep,
    WeightOrder,
    WrappedRunner,
)
from frame.parallel.rank_channels import (
    BatchReceiver,
    BatchSender,
    GrammarMask,
    Order,
    Profile,
    ResultReceiver,
    ResultSender,
    SwitchBackend,
    Traced,
)
from frame.parallel.rank_watch import RankWatch

log = logging.getLogger(__name__)

ORDER_POLL = 20  # milliseconds between looks at orders that take a while
TIER_POLL = 1  # milliseconds between looks at tiers that have work
WEIGHTS_TIMEOUT = 600.0  # seconds that a follower may take longer than rank 0 to load weights


class LeadingRunner(WrappedRunner):
    """Rank 0's runner. It sends each batch to the followers before its own launch, so that all
    ranks compute at the same time.

    A step that fails on one rank leaves the others waiting in a collective, so every failure raises
    DeviceLost. `results`: those of steps come from another rank.
    """

    def __init__(
        self, runner: ModelRunner, followers: BatchSender, results: ResultReceiver | None = None, watch: RankWatch | None = None
    ) -> None:
        super().__init__(runner)
        self._followers = followers
        self._results = results
        self._watch = watch

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        self._followers.send(batch)
        if self._watch is not None:
            self._watch.step = batch.step
        try:
            step = self._runner.launch(batch)
            if self._results is not None:
                remote = RemoteStep(step, self._watch, self._results, batch.step)
                return RemoteUnsampledStep(remote, self._followers) if batch.has_deferred_grammar_mask else remote
            return LedUnsampledStep(step, self._watch) if isinstance(step, UnsampledStep) else LedStep(step, self._watch)
        except Exception as error:
            raise DeviceLost(f"rank 0 failed beside its followers: {error}") from error

    def switch_backend(self) -> None:
        self._followers.send_order(SwitchBackend())
        try:
            self._runner.switch_backend()
        except Exception as error:
            raise DeviceLost(f"rank 0 failed beside its followers: {error}") from error

    def profile(self, request: ProfileRequest | None) -> str:
        """Raises ProfileError if any rank fails; the other ranks have carried out the request
        then."""
        path = self._runner.profile(request)
        problems = self._followers.ask(Profile(request))
        if problems:
            raise ProfileError(f"the profile request succeeded on rank 0 but failed on other ranks: {'; '.join(problems)}")
        return path

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        self._followers.send_order(order)
        return LedOrder(self._runner.start_order(order), self._followers, self._followers.await_replies())

    def update_weights(self, order: WeightOrder | TransferOrder, beat: Callable[[], object]) -> str:
        self._followers.send_order(order)
        error = self._runner.update_weights(order, beat)
        problems = self._followers.collect_replies(WEIGHTS_TIMEOUT, beat)
        return error or "; ".join(problems)

    def change_memory(self, order: MemoryOrder, beat: Callable[[], object]) -> str:
        self._followers.send_order(order)
        error = self._runner.change_memory(order, beat)
        problems = self._followers.collect_replies(WEIGHTS_TIMEOUT, beat)
        return error or "; ".join(problems)

    def close(self) -> None:
        self._followers.close()
        if self._results is not None:
            self._results.close()
        self._runner.close()


class LedOrder:
    """An order that all ranks carry out."""

    def __init__(self, order: PendingOrder, followers: BatchSender, number: int) -> None:
        self._order = order
        self._followers = followers
        self._number = number
        self._problems: list[str] | None = None

    def poll(self) -> str | None:
        if self._problems is None:
            self._problems = self._followers.poll_replies(self._number)
        error = self._order.poll()
        if error is None or self._problems is None:
            return None
        return error or "; ".join(self._problems)


def watch_wait(watch: RankWatch | None, what: str) -> contextlib.AbstractContextManager[None]:
    """The context of a wait, reported if it takes long."""
    return contextlib.nullcontext() if watch is None else watch.waiting(what)


class LedStep:
    """A step that all ranks run."""

    def __init__(self, step: PendingStep, watch: RankWatch | None) -> None:
        self._step = step
        self._watch = watch

    def wait(self) -> StepResult:
        try:
            with watch_wait(self._watch, "its device"):
                return self._step.wait()
        except Exception as error:
            raise DeviceLost(f"rank 0 failed beside its followers: {error}") from error


class RemoteStep(LedStep):
    """A step whose result another rank sends."""

    def __init__(self, step: PendingStep, watch: RankWatch | None, results: ResultReceiver, number: int) -> None:
        super().__init__(step, watch)
        self._results = results
        self._number = number

    def wait(self) -> StepResult:
        super().wait()
        try:
            with watch_wait(self._watch, "the result"):
                return self._results.receive(self._number)
        except Exception as error:
            raise DeviceLost(f"step {self._number} failed on the rank that samples: {error}") from error


class RemoteUnsampledStep(UnsampledStep):
    """A step whose tokens another rank draws."""

    def __init__(self, step: RemoteStep, followers: BatchSender) -> None:
        self._step = step
        self._followers = followers

    def sample(self, mask: np.ndarray | None) -> None:
        self._followers.send_order(GrammarMask(mask))

    def wait(self) -> StepResult:
        return self._step.wait()


class LedUnsampledStep(LedStep, UnsampledStep):
    """A step that all ranks run and whose tokens only this rank draws."""

    def __init__(self, step: UnsampledStep, watch: RankWatch | None) -> None:
        super().__init__(step, watch)
        self._unsampled = step

    def sample(self, mask: np.ndarray | None) -> None:
        try:
            self._unsampled.sample(mask)
        except Exception as error:
            raise DeviceLost(f"rank 0 failed beside its followers: {error}") from error


class RankObserver(Protocol):
    """Observes the steps of a rank."""

    def on_launch(self, batch: ScheduledBatch) -> None:
        """Called before the rank launches a batch."""

    def on_end(self, traced: Traced) -> None:
        """Called when rank 0 has ended a traced request."""


class OrderedTiers(Protocol):
    """A follower's KV cache tiers. `frame.kv_tiers.follower` documents the methods."""

    @property
    def is_busy(self) -> bool: ...
    def start_order(self, order: TierOrder, number: int) -> None: ...
    def poll(self) -> Sequence[TierReply]: ...
    def close(self) -> None: ...


class ResultThread:
    """Waits for steps in a thread and sends their results, so that the next step can be launched
    meanwhile."""

    def __init__(self, sender: ResultSender) -> None:
        self._sender = sender
        self._steps: queue.Queue[PendingStep | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def add(self, step: PendingStep) -> None:
        """Send the result of a step once it is there. Waits where two steps are in flight."""
        self._steps.put(step)

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._sender.send(step.wait())
            except Exception as error:
                log.exception("a step failed")
                self._sender.send_failure(explain(error))
        self._sender.close()


def follow(
    runner: ModelRunner,
    batches: BatchReceiver,
    observer: RankObserver | None = None,
    results: ResultSender | None = None,
    watch: RankWatch | None = None,
    group: int = 0,
    tiers: OrderedTiers | None = None,
) -> None:
    """Run batches until rank 0 stops. Each step is awaited after the next launch, as rank 0 does
    with overlap. `results`: this rank's results count, and are sent. `group`: number
    of its attention group. `tiers`: of its KV cache.

    Raises the error of a failed step: a rank that missed a step cannot rejoin the others, so its
    process ends. It does not wait for its device then, which may wait for other ranks.
    """
    in_flight: PendingStep | None = None
    thread = None if results is None else ResultThread(results)
    orders: dict[int, PendingOrder] = {}  # by number; those that take a while
    with contextlib.closing(batches):
        while (batch := _receive(batches, orders, tiers, group)) is not None:
            if isinstance(batch, Profile):
                batches.reply(_profile(runner, batch))
                continue
            if isinstance(batch, AdapterOrder):
                orders[batches.order_number] = runner.start_order(batch)
                continue
            if isinstance(batch, SwitchBackend | WeightOrder | TransferOrder | MemoryOrder):
                if in_flight is not None:
                    in_flight.wait()
                in_flight = None
                if isinstance(batch, MemoryOrder):
                    batches.reply(runner.change_memory(batch, int))
                elif not isinstance(batch, SwitchBackend):
                    batches.reply(runner.update_weights(batch, int))
                else:
                    runner.switch_backend()
                continue
            if isinstance(batch, Traced):
                if observer is not None:
                    observer.on_end(batch)
                continue
            if isinstance(batch, GrammarMask):
                if batch.group == group and thread is not None and isinstance(in_flight, UnsampledStep):
                    in_flight.sample(batch.mask)
                    thread.add(in_flight)
                    in_flight = None
                continue
            if observer is not None:
                observer.on_launch(batch)
            if watch is not None:
                watch.step = batch.step
            launched = runner.launch(batch)
            if thread is not None and not isinstance(launched, UnsampledStep):
                thread.add(launched)
                continue
            if in_flight is not None:
                with watch_wait(watch, "its device"):
                    in_flight.wait()
            in_flight = launched
        if thread is not None:
            thread.close()
        if tiers is not None:
            tiers.close()
        runner.close()


def _receive(
    batches: BatchReceiver, orders: dict[int, PendingOrder], tiers: OrderedTiers | None, group: int
) -> ScheduledBatch | Order | None:
    """The next batch or order. Replies to the orders that have ended meanwhile, and passes those
    for tiers on."""
    while True:
        for number, order in list(orders.items()):
            if (error := order.poll()) is not None:
                batches.reply(error, number)
                del orders[number]
        is_copying = tiers is not None and tiers.is_busy
        if tiers is not None and is_copying:
            for reply in tiers.poll():
                batches.reply(reply.error, reply.number, reply.num_blocks)
        if (orders or is_copying) and not batches.wait_message(TIER_POLL if is_copying else ORDER_POLL):
            continue
        received = batches.receive()
        if not isinstance(received, TierOrder):
            return received
        if tiers is not None and received.group == group:
            tiers.start_order(received, batches.order_number)


def _profile(runner: ModelRunner, order: Profile) -> str:
    """-> the error of a failed profile request; empty on success. Steps continue in both cases."""
    try:
        runner.profile(order.request)
    except ProfileError as error:
        log.error("no profile of this rank: %s", error)
        return str(error)
    return ""
