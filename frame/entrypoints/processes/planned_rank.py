"""`PlannedRank`: a rank's models on the meta device, built as a start builds them: memory, and
whether the checkpoint's headers fit them.

Used by `frame plan` and `frame config check`. Opens no device and reads no weights.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frame.config.resolution.platform import get_capabilities
from frame.config.resolved import Resolved
from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionBackend, AttentionSpec
from frame.core.interfaces.collective import CollectiveContext, LocalGroup
from frame.core.interfaces.gemm_kernel import GemmKernel
from frame.core.interfaces.model import ModelContext
from frame.core.interfaces.moe import MoERunner
from frame.core.interfaces.platform import DeviceMemory, HostPlatform, PlatformContext
from frame.core.interfaces.rank_context import Pipeline, RankContext
from frame.core.kv_cache.geometry import kv_geometry
from frame.entrypoints.processes.build_engine import load_device_drafter, load_head_format, load_kernels
from frame.entrypoints.processes.components import Loaded, Parts, build_context, prepare_drafter
from frame.entrypoints.processes.join_groups import Groups
from frame.entrypoints.processes.memory_plan import MemoryPlan, plan_rank
from frame.forward.declared_caches import model_geometry
from frame.loading.loader import Checkpoint, load_weights
from frame.plugins.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.gemm_kernel import Gemm, GroupedGemm
    from frame.core.interfaces.moe import DispatchOutput
    from frame.core.interfaces.weight_format import CanonicalWeight
    from frame.core.kv_cache.geometry import KVGeometry

_log = logging.getLogger(__name__)


class PlannedPlatform(HostPlatform):
    """The meta device: tensors have sizes and no memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


class PlannedAttention(AttentionBackend):
    """A backend of which the layers read the capabilities alone."""

    def __init__(self, context: RankContext, capabilities: Any) -> None:
        super().__init__(context)
        self.capabilities = capabilities  # type: ignore[misc]

    def plan(self, batch: ForwardBatch) -> Any:
        raise NotImplementedError

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        raise NotImplementedError


class PlannedKernel(GemmKernel):
    """A kernel of another machine that cannot be imported here. Keeps weights in canonical form."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        raise NotImplementedError

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        raise NotImplementedError


class PlannedRunner(MoERunner):
    """A MoE runner that is never called."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        raise NotImplementedError


class PlannedGpuRunner(PlannedRunner):
    """Multiplies float8 experts as they are stored."""

    takes_fp8 = ("block", "output")


class PlannedRank:
    """A rank of one stage of a pipeline. Raises what the start raises when it builds its models."""

    def __init__(self, resolved: Resolved, registry: Registry, stage: int = 0) -> None:
        self._resolved = resolved
        self._parts = parts = _load_parts(resolved, registry)
        self._context = _build_context(resolved, parts, stage)
        with torch.device("meta"):
            self.model: Any = parts.model.build(ModelContext.from_build(self._context, resolved.model))

    @cached_property
    def _drafter(self) -> tuple[Any, Checkpoint] | None:
        """The model of a device drafter, and its checkpoint."""
        if (prepared := prepare_drafter(self._resolved, self._parts, self.model, self._context)) is None:
            return None
        with torch.device("meta"):
            return prepared[0](), prepared[2]

    @property
    def geometry(self) -> KVGeometry:
        """The KV cache of the rank, with the layers of a drafter."""
        resolved = self._resolved
        uniform = kv_geometry(resolved.model, self._context.tp.size, resolved.page_size, resolved.kv_dtype)
        return model_geometry(self.model, uniform, self._drafter and self._drafter[0])

    def plan_memory(self, before: DeviceMemory) -> MemoryPlan | None:
        """The memory on a device in the state `before`; None for a model that builds its layers
        while it loads. Raises CapacityError."""
        return plan_rank(self._resolved, self._context, self.model, self._drafter and self._drafter[0], before=before)

    def check_weights(self) -> bool:
        """Compare the headers of the files with the models. Raises CheckpointError as loading does.
        -> False where a weight format needs values to go on."""
        target = Checkpoint(Path(self._resolved.model_path), self._parts.weight_source.build, self._resolved.user.model.seed)
        try:
            for model, checkpoint in ((self.model, target), *([self._drafter] if self._drafter else [])):
                load_weights(model, checkpoint, is_dry=True)
        except ConfigurationError:
            raise
        except Exception:  # noqa: BLE001 - of any operation on a tensor without values
            _log.debug("the weights are not checked", exc_info=True)
            return False
        return True


def _build_context(resolved: Resolved, parts: Parts, stage: int) -> BuildContext:
    """The context of a rank of one stage, on the meta device."""
    plan = resolved.plan
    tp = LocalGroup(CollectiveContext(0, plan.attention_tp))
    experts = LocalGroup(CollectiveContext(0, plan.tp)) if plan.num_groups > 1 else None
    pipeline = None
    if plan.pp > 1:
        others = LocalGroup(CollectiveContext(stage, plan.pp))
        layers = plan.find_layers(stage, resolved.model.num_layers)
        pipeline = Pipeline(index=stage, size=plan.pp, layers=layers, hidden=others, tokens=others)
    return build_context(resolved, parts, PlannedPlatform(PlatformContext()), Groups(tp, experts, pipeline))


def _load_parts(resolved: Resolved, registry: Registry) -> Parts:
    """The plugins that decide the sizes of a model."""

    def load(kind: str) -> Any:
        return Loaded(*registry.choose(resolved.choice(kind))) if resolved.plugins.get(kind) else None

    runner = PlannedRunner if get_capabilities(registry.get("platform", resolved.choice("platform").name)).is_host else PlannedGpuRunner
    capabilities = registry.get("attention_backend", resolved.choice("attention_backend").name).capabilities
    return Parts(
        model=load("model"),
        weight_source=load("weight_source"),
        attention=Loaded(lambda context, _: PlannedAttention(context, capabilities)),
        weight_format=load("weight_format"),
        gemm_kernels=load_kernels(resolved, registry, PlannedKernel),
        moe_runner=Loaded(runner) if resolved.plugins.get("moe_runner") else None,
        moe_dispatcher=load("moe_dispatcher"),
        drafter=load_device_drafter(resolved, registry),
        head_format=load_head_format(registry),
        draft=None if resolved.draft is None else _load_parts(resolved.draft, registry),
    )
