"""Tensor-parallel steps: `follow` runs rank 0's batches on the ranks >= 1, and `LeadingRunner`
sends them from rank 0.

Only rank 0 has a scheduler, so ranks cannot diverge. Must not know a request or a client.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from frame.core.interfaces.runner import DeviceLost, ModelRunner, ProfileError, UnsampledStep
from frame.core.ipc.transport import Profile, SwitchBackend, Traced

if TYPE_CHECKING:
    import numpy as np

    from frame.core.interfaces.batch import ScheduledBatch, StepResult
    from frame.core.interfaces.runner import PendingStep, ProfileRequest
    from frame.core.ipc.transport import BatchReceiver, BatchSender


log = logging.getLogger(__name__)


class LeadingRunner(ModelRunner):
    """Rank 0's runner. It sends each batch to the followers before its own launch, so that all
    ranks compute at the same time.

    A step that fails on one rank leaves the others waiting in a collective, so every failure raises
    DeviceLost.
    """

    def __init__(self, runner: ModelRunner, followers: BatchSender) -> None:
        self._runner = runner
        self._followers = followers

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        self._followers.send(batch)
        try:
            step = self._runner.launch(batch)
            return LedUnsampledStep(step) if isinstance(step, UnsampledStep) else LedStep(step)
        except Exception as error:
            raise DeviceLost(f"rank 0 failed beside its followers: {error}") from error

    @property
    def can_switch_backend(self) -> bool:
        return self._runner.can_switch_backend

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

    def close(self) -> None:
        self._followers.close()
        self._runner.close()


class LedStep:
    """A step that all ranks run."""

    def __init__(self, step: PendingStep) -> None:
        self._step = step

    def wait(self) -> StepResult:
        try:
            return self._step.wait()
        except Exception as error:
            raise DeviceLost(f"rank 0 failed beside its followers: {error}") from error


class LedUnsampledStep(LedStep, UnsampledStep):
    """A step that all ranks run and whose tokens only this rank draws."""

    def __init__(self, step: UnsampledStep) -> None:
        super().__init__(step)
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


def follow(runner: ModelRunner, batches: BatchReceiver, observer: RankObserver | None = None) -> None:
    """Run batches until rank 0 stops. Each step is awaited after the next launch, as rank 0 does
    with overlap.

    Raises the error of a failed step: a rank that missed a step cannot rejoin the others, so its
    process ends.
    """
    in_flight: PendingStep | None = None
    try:
        while (batch := batches.receive()) is not None:
            if isinstance(batch, Profile):
                batches.reply(_profile(runner, batch))
                continue
            if isinstance(batch, SwitchBackend):
                if in_flight is not None:
                    in_flight.wait()
                in_flight = None
                runner.switch_backend()
                continue
            if isinstance(batch, Traced):
                if observer is not None:
                    observer.on_end(batch)
                continue
            if observer is not None:
                observer.on_launch(batch)
            launched = runner.launch(batch)
            if in_flight is not None:
                in_flight.wait()
            in_flight = launched
    finally:
        runner.close()
        batches.close()


def _profile(runner: ModelRunner, order: Profile) -> str:
    """-> the error of a failed profile request; empty on success. Steps continue in both cases."""
    try:
        runner.profile(order.request)
    except ProfileError as error:
        log.error("no profile of this rank: %s", error)
        return str(error)
    return ""
