"""Mamba-2 (arXiv 2405.21060), the state-space layer of Nemotron-H and Falcon-H1.

A layer stores one state a sequence: the past inputs of its convolution, and the matrix of each
head. Heads are split over the tensor-parallel ranks; with more ranks than groups, B and C are
replicated. Must not know a page or a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame.kernels.linear.invariant import silu
from frame.kernels.linear_attention import MixLayout
from frame.models.layers.linear import Linear, RowLinear, scale_range, split_range
from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
from frame.models.layers.linear_attention.gated_delta import build_by_head
from frame.models.layers.linear_attention.gated_norm import GatedNorm, GateKind
from frame.models.layers.linear_attention.mixer import StateMixer
from frame.models.layers.mlp import require_silu
from frame.models.layers.parameter import Range

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """The sizes of a layer in the whole model. `groups`: heads that share B and C; `state`: entries
    of B and C; `min_step`: lower limit of the time step; `bias`, `out_bias`: of in_proj and
    out_proj; `norm`: where the gate is applied, None: there is no norm; `multipliers`: of the
    projections z, x, B, C and dt."""

    hidden: int
    heads: int
    head: int
    groups: int
    state: int
    width: int  # of the convolution
    eps: float
    min_step: float
    bias: bool
    conv_bias: bool
    out_bias: bool
    norm: GateKind | None = "silu_first"
    multipliers: tuple[float, ...] = (1.0,) * 5

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> MambaSizes:
        """The sizes that config.json of a Nemotron-H names. Raises ConfigurationError for another
        activation than SiLU."""
        require_silu(config, "recurrent layers", "mamba_hidden_act")
        return cls(
            config["hidden_size"],
            config["mamba_num_heads"],
            config["mamba_head_dim"],
            config.get("n_groups") or config["mamba_n_groups"],
            config["ssm_state_size"],
            config.get("conv_kernel") or config.get("mamba_d_conv") or 4,
            config.get("layer_norm_epsilon", 1e-5),
            config.get("time_step_min", 0.001),
            bool(config.get("use_bias", False)),
            bool(config.get("use_conv_bias", True)),
            bool(config.get("use_bias", False)),
        )

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """The checkpoint's layers that hold several parts, for `split_layers`."""
        inner, shared = self.heads * self.head, self.groups * self.state
        conv = {"conv1d_x": inner, "conv1d_b": shared, "conv1d_c": shared}
        projections = {"in_proj_z": inner, "in_proj_x": inner, "in_proj_b": shared, "in_proj_c": shared, "in_proj_dt": self.heads}
        return {"conv1d": conv, "in_proj": projections}


class Mamba2(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. `prefix` is the checkpoint name that holds in_proj,
    conv1d, A_log, D, dt_bias, norm and out_proj."""

    def __init__(self, context: BuildContext, layer: int, prefix: str, sizes: MambaSizes, positions: StepPositions) -> None:
        super().__init__()
        self.sizes = sizes
        self._silu = silu if context.deterministic else F.silu
        heads, groups = split_range(context, "Mamba heads", sizes.heads), _split_groups(context, sizes)
        self.heads = (heads.size, groups.size)
        inner, shared = scale_range(heads, sizes.head), scale_range(groups, sizes.state)
        outputs = (inner, inner, shared, shared, heads)
        names = [f"{prefix}.{name}" for name in sizes.fused["in_proj"]]
        self.in_proj = Linear(context, names, Range.whole(sizes.hidden), outputs, sizes.bias)
        self.multipliers: torch.Tensor | None = None
        if set(sizes.multipliers) != {1.0}:
            factors = zip(outputs, sizes.multipliers, strict=True)
            vectors = [torch.full((span.size,), factor, dtype=context.dtype, device=context.device) for span, factor in factors]
            self.multipliers = torch.cat(vectors)
        spans = {f"{prefix}.conv1d_x": inner, f"{prefix}.conv1d_b": shared, f"{prefix}.conv1d_c": shared}
        conv = ShortConvolution(context, spans, sizes.width, sizes.conv_bias)
        places = (inner.size + shared.size, inner.size, 0)
        layout = MixLayout(heads.size, groups.size, sizes.state, sizes.head, places, delta=False, normalized=False)
        self.mixer = StateMixer(context, layer, layout, conv, positions, sizes.min_step)
        by_head = (build_by_head(f"{prefix}.{name}", heads) for name in ("A_log", "dt_bias", "D"))
        self.mixer.log_decay, self.mixer.bias, self.mixer.skip = by_head
        group = sizes.heads * sizes.head // sizes.groups
        self.norm = GatedNorm(context, f"{prefix}.norm", inner, group, sizes.eps, sizes.norm) if sizes.norm is not None else None
        self.out_proj = RowLinear(context, f"{prefix}.out_proj", sizes.heads * sizes.head, sizes.hidden, sizes.out_bias)

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """`rows` is unused: the order of tokens is in the state."""
        (heads, groups), sizes = self.heads, self.sizes
        inner, shared = heads * sizes.head, groups * sizes.state
        projected = self.in_proj(x)
        if self.multipliers is not None:
            projected *= self.multipliers
        gate, mixed, step = projected.split((inner, inner + 2 * shared, heads), -1)
        out = self.mixer(mixed, step, step, batch).flatten(1)
        gated = (out.float() * self._silu(gate.float())).to(out.dtype) if self.norm is None else self.norm(out, gate)
        return self.out_proj(gated)


def _split_groups(context: BuildContext, sizes: MambaSizes) -> Range:
    """This rank's groups; with more ranks than groups, the one of its heads."""
    ranks, groups = context.tp.size, sizes.groups
    if ranks <= groups or ranks % groups or sizes.norm is not None:  # a norm covers the heads of whole groups
        return split_range(context, "Mamba groups", groups)
    return Range(groups, context.tp.rank * groups // ranks, 1)
