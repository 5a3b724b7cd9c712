"""`RankContext`: device, dtype, group and limits of one rank, known before any part of the model is
built.

Attention backends, MoE runners and MoE dispatchers are built from it; `BuildContext` adds them for
the model. Imports the interfaces of platform, collective and plan only: all others may use
this page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from frame.core.interfaces.collective import Collective
from frame.core.interfaces.parallel import ONE_RANK, ParallelPlan
from frame.core.interfaces.platform import HOST, Platform

if TYPE_CHECKING:
    import torch

Task = Literal["generate", "embed", "classify"]
T = TypeVar("T")


class LoadCode(Protocol):
    """Imports a class of a checkpoint's own Python code: `reference` ("module.Class") as in its
    JSON files, `part` for error texts."""

    def __call__(self, part: str, reference: str) -> Any: ...


class Track(Protocol):
    """Yields the items, and shows the user how many the loop has done of the work that `title`
    names."""

    def __call__(self, items: Sequence[T], title: str) -> Iterable[T]: ...


def track_silently(items: Sequence[T], title: str) -> Iterable[T]:
    """The `Track` of ranks and tests that show nothing."""
    return items


@dataclass(frozen=True, slots=True)
class Limits:
    """The maximum sizes of a step. Buffers of fixed address have these sizes."""

    max_running_requests: int
    max_tokens_per_step: int
    max_context: int  # tokens of a sequence, prompt and output
    page_size: int  # tokens
    max_drafted: int = 0  # tokens of a draft
    verifies_trees: bool = False  # drafts may be trees
    # rows of one token each at most, if more than running requests: a decode graph has one for each
    # drafted token too, and cross-attention one for each token of a step
    max_single_rows: int = 0

    @property
    def max_decodes(self) -> int:
        """The most rows of one token each."""
        return max(self.max_running_requests, self.max_single_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's place in a pipeline of `size` stages. The two groups connect the ranks of all
    stages that have the same tensor-parallel rank: `hidden` from each stage to the next one,
    `tokens` from the last stage to the first."""

    index: int  # of the stage
    size: int
    layers: range  # of this stage
    hidden: Collective
    tokens: Collective

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What is fixed before a rank's backends and model are built."""

    device: torch.device
    dtype: torch.dtype  # of the model's computations
    tp: Collective  # the tensor-parallel group, of one stage and one attention group
    experts: Collective | None = None  # the ranks of all attention groups; None: `tp`
    pipeline: Pipeline | None = None  # None: this rank has all layers
    limits: Limits
    task: Task = "generate"
    load_code: LoadCode | None = None  # None: model.trust_remote_code is false
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: `dtype`
    platform: Platform = HOST  # of `device`
    plan: ParallelPlan = ONE_RANK
    deterministic: bool = False  # execution.deterministic: no row's bits depend on other rows
    track: Track = track_silently

    @property
    def ep_group(self) -> Collective:
        """The ranks among which whole experts are divided."""
        return self.tp if self.experts is None else self.experts

    def __post_init__(self) -> None:
        if self.platform.device.type != self.device.type:
            raise TypeError(f"a context on {self.device} needs its platform, not {type(self.platform).__name__}")
