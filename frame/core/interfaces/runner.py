"""What runs a scheduled batch on a device (`runner/1`). Knows no request: slots, tokens and pages only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import msgspec

from frame.core.interfaces.batch import ScheduledBatch, StepResult

if TYPE_CHECKING:
    import numpy as np

MAX_PROFILE_STEPS = 2000
MOST_SINGLE = 64  # given tokens of a step that may be computed as rows of one token each; of more, each is a row of attention too many


class DeviceLost(RuntimeError):  # noqa: N818 - the name of what happened
    """The device cannot run another step; the engine ends. Any other error of a step ends that step's requests only."""


class PendingStep(Protocol):
    """A step that was launched; the device may still be at work."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...


class ProfileError(RuntimeError):
    """A recording cannot be started or stopped; the sentence says why."""


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be recorded: this many steps, at most `MAX_PROFILE_STEPS`, under this name."""

    num_steps: int = 50
    name: str = "frame"

    def problem(self) -> str | None:
        if not 1 <= self.num_steps <= MAX_PROFILE_STEPS:
            return f"num_steps is {self.num_steps}; a profile may have 1 to {MAX_PROFILE_STEPS} steps"
        return None


class UnsampledStep(ABC):
    """A `PendingStep` of a batch whose `has_deferred_grammar_mask`: the device is at work on the logits, or has them."""

    @abstractmethod
    def sample(self, mask: np.ndarray | None) -> None:
        """Draw the tokens; called once, before the next batch is launched. mask: as `ScheduledBatch.grammar_mask`."""

    @abstractmethod
    def wait(self) -> StepResult: ...


class ModelRunner(ABC):
    """Runs steps in the order of their launch.

    Laws: `launch` returns before the device is done, where the device allows it; the next batch may be launched before the last
    was waited for, and then reads last tokens on the device. Of a batch whose `has_deferred_grammar_mask`, `launch` gives an
    `UnsampledStep`. State of a slot is set up by `ScheduledBatch.setups`,
    which come before the slot's first use, and is forgotten by `released`.
    """

    @abstractmethod
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step."""

    @property
    def can_switch_backend(self) -> bool:
        """Whether a backend whose kernels were compiled while another one served is ready to take over."""
        return False

    def switch_backend(self) -> None:
        """Let that backend take over, on all ranks. Called between two steps, when none is in flight; may take seconds."""

    def profile(self, request: ProfileRequest | None) -> str:
        """Start recording, or (None) stop it; the trace's path. Raises ProfileError."""
        raise ProfileError("profiling is off; serve with --profile-dir FOLDER")

    @abstractmethod
    def close(self) -> None:
        """Release the device and stop other ranks."""
