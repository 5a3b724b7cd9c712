"""The interface of model runners, which run scheduled batches on a device. Slots, tokens and pages
only; must not know a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.weight_transfer import TransferPart

MAX_PROFILE_STEPS = 2000
# What a pause does with running requests: end them, let them end, or let them go on later, with
# their KV or computed anew.
PauseMode = Literal["abort", "wait", "keep", "retract"]
MEMORY_TAGS = ("weights", "kv_cache")  # of memory that an engine can release while it sleeps
MAX_SLEEP_LEVEL = 2  # 1: weights are kept in host memory; 2: they are dropped
NO_ROOM = -1  # in place of a number of blocks: a tier had no buffers
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


class WeightOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to every rank: replace the weights by those of a checkpoint, or only check that its
    names, shapes and types are those of the model."""

    folder: str
    is_check: bool = False


class MemoryOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to every rank: end its steps, then release the memory of some tags ("weights",
    "kv_cache"), or map that of others again. `drops_weights`: their values are not kept, and an
    update brings new ones."""

    released: list[str] = []
    mapped: list[str] = []
    drops_weights: bool = False


class TransferOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to every rank: one stage of an update by the tensors of a trainer.
    `frame.loading.tensor_update` documents the actions."""

    action: Literal["open", "join", "await_join", "close", "begin", "check", "receive", "drop", "load", "check_names", "commit", "cancel"]
    channel: str = ""  # "KIND/NAME": the plugin, and the trainer's name of the connection
    info: dict[str, Any] = {}  # of `open` and `join`
    part: TransferPart | None = None  # of `check` and `receive`
    is_last: bool = False  # of `check`: no part follows, so that names that are missing are an error
    is_partial: bool = False  # of `check` and `check_names`: tensors may be missing


class TierOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to the ranks of attention group `group`: the method `action` of a KV cache tier, or a
    copy of the job's blocks to pages or from pages. Replies: to load, commit and copies, once they
    have ended."""

    group: int
    job: int
    action: Literal["load", "store", "commit", "drop", "clear", "copy_to_pages", "copy_from_pages"]
    tier: int = 0  # not of copies: its number, nearest first
    keys: list[bytes] = []  # of load and store
    pages: np.ndarray | None = None  # of copies, int32
    spans: list[tuple[int, int]] = []  # of copy_from_pages: for each tier that stores the job's blocks, the range of `pages`


class TierReply(msgspec.Struct, frozen=True):
    """What a rank has done of `TierOrder` number `number`: the leading blocks that a tier has
    loaded or stored (or `NO_ROOM`), and why it failed."""

    number: int
    num_blocks: int = 0
    error: str = ""


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

    def update_weights(self, order: WeightOrder | TransferOrder, beat: Callable[[], object]) -> str:
        """Carry out an order on all ranks, when no step is in flight; calls `beat` meanwhile. ->
        why it failed, one sentence; empty if it was carried out. After an order that writes has
        failed, the weights are a mixture, and no step may run."""
        return "this engine cannot update its weights"

    def change_memory(self, order: MemoryOrder, beat: Callable[[], object]) -> str:
        """Carry out an order on all ranks, when no step is in flight; calls `beat` meanwhile. ->
        why it failed, one sentence; empty if it was carried out."""
        return "this engine cannot release its memory" if order.released or order.mapped else ""

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

    def update_weights(self, order: WeightOrder | TransferOrder, beat: Callable[[], object]) -> str:
        return self._runner.update_weights(order, beat)

    def change_memory(self, order: MemoryOrder, beat: Callable[[], object]) -> str:
        return self._runner.change_memory(order, beat)

    def close(self) -> None:
        self._runner.close()


def unwrap_runner(runner: ModelRunner) -> ModelRunner:
    """The innermost runner."""
    while isinstance(runner, WrappedRunner):
        runner = runner._runner  # noqa: SLF001 - of this module
    return runner
