"""The interface of model runners, which run scheduled batches on a device. Slots, tokens and pages
only; must not know a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import msgspec

from frame.core.interfaces.batch import ScheduledBatch, StepResult

if TYPE_CHECKING:
    import numpy as np

MAX_PROFILE_STEPS = 2000
MAX_SINGLE_TOKEN_ROWS = 64  # prompt tokens of a step that a decode graph may compute as rows of one token each


class DeviceLost(RuntimeError):  # noqa: N818 - named after the event
    """The device cannot run another step, and the engine ends. After any other error of a step its
    requests run one at a time, and those that fail again end."""


class PendingStep(Protocol):
    """A launched step, which may still run on the device."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        ...


class AdapterOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to every rank: read an adapter into host memory, or (folder empty) forget it."""

    digest: str  # SHA-256 of its files, hexadecimal
    folder: str = ""  # with adapter_config.json and adapter_model.safetensors


class PendingOrder(Protocol):
    """An order that the ranks carry out while steps run."""

    def poll(self) -> str | None:
        """The error of an order that has ended, one sentence, empty where every rank has carried it
        out; None: it has not ended."""
        ...


class ProfileError(RuntimeError):
    """A profile cannot be started or stopped."""


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A profile of the next steps."""

    num_steps: int = 50  # 1 to `MAX_PROFILE_STEPS`
    name: str = "frame"  # of the trace file

    def problem(self) -> str | None:
        if not 1 <= self.num_steps <= MAX_PROFILE_STEPS:
            return f"num_steps is {self.num_steps}; a profile may have 1 to {MAX_PROFILE_STEPS} steps"
        return None


class UnsampledStep(ABC):
    """A `PendingStep` of a batch with `has_deferred_grammar_mask`: the forward pass is launched,
    the tokens are not drawn."""

    @abstractmethod
    def sample(self, mask: np.ndarray | None) -> None:
        """Draw the tokens. Called once, before the next batch is launched. mask: as
        `ScheduledBatch.grammar_mask`."""

    @abstractmethod
    def wait(self) -> StepResult: ...


class ModelRunner(ABC):
    """Runs steps in the order of their launch.

    Contract: `launch` is asynchronous where the device allows it. The next batch may be launched
    before the last one is waited for; it reads last tokens on the device. For a batch with
    `has_deferred_grammar_mask`, `launch` returns an `UnsampledStep`. `ScheduledBatch.setups` sets
    up a slot before its first use, `released` ends its use.
    """

    @abstractmethod
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step."""

    @property
    def can_switch_backend(self) -> bool:
        """Whether an attention backend that was compiled in the background is ready for use."""
        return False

    def switch_backend(self) -> None:
        """Use that backend from now on, on all ranks. Called when no step is in flight; may take
        seconds."""

    def profile(self, request: ProfileRequest | None) -> str:
        """Start a profile, or stop it (None). -> path of the trace. Raises ProfileError."""
        raise ProfileError("profiling is off; serve with --profile-dir FOLDER")

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        """Begin to load or unload an adapter, on all ranks."""
        raise RuntimeError("this runner has no adapters")

    @abstractmethod
    def close(self) -> None:
        """Release the device and stop other ranks."""


class WrappedRunner(ModelRunner):
    """Another runner, of which a subclass changes some methods; the others call it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        return self._runner.launch(batch)

    @property
    def can_switch_backend(self) -> bool:
        return self._runner.can_switch_backend

    def switch_backend(self) -> None:
        self._runner.switch_backend()

    def profile(self, request: ProfileRequest | None) -> str:
        return self._runner.profile(request)

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        return self._runner.start_order(order)

    def close(self) -> None:
        self._runner.close()
