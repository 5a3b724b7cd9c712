"""Tensor parallelism of transformers' own layers, by the plan that each model brings (`tp_plan`).

Used by the fallback. Parameters are cut to this rank's part after the model is loaded on the host,
and the modules get hooks that exchange their inputs and outputs. Must not know an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    from frame.core.interfaces.build import Collective

# styles that leave a module whole on every rank
REPLICATED = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "sequence_parallel")
GATHERED = ("colwise_gather_output", "colwise_rep")  # styles whose outputs all ranks get, such as those of heads
COLUMNS = ("colwise", *GATHERED, "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")


def read_plan(model: Any) -> dict[str, str]:
    """Module or parameter pattern, with `*` for a number -> style. Raises ConfigurationError if the
    model has no plan, or one with a style that is not implemented here."""
    name = type(model).__name__
    plan = dict(getattr(model, "_tp_plan", None) or {})
    plan |= {f"{model.base_model_prefix}.{key}": style for key, style in (model.config.base_model_tp_plan or {}).items()}
    if not any(style in ROWS for style in plan.values()):
        raise ConfigurationError(f"{name} has no plan for tensor parallelism in transformers: set parallel.tp: 1.")
    known = (*REPLICATED, *COLUMNS, *ROWS, "moe_tp_experts")
    unknown = sorted({style for style in plan.values() if style not in known})
    if unknown:
        raise ConfigurationError(f"{name} splits layers by {', '.join(unknown)}, which is not implemented here: set parallel.tp: 1.")
    return plan


def find_styles(model: Any) -> dict[str, str]:
    """The style of each module that the plan names."""
    return {name: style for pattern, style in read_plan(model).items() for name, _ in _find(model, pattern)}


def find_row_split(model: nn.Module) -> frozenset[nn.Module]:
    """The modules of which each rank takes a part of the input."""
    modules = dict(model.named_modules())
    return frozenset(modules[name] for name, style in find_styles(model).items() if style in ROWS and name in modules)


def split_model(model: Any, tp: Collective, done: Container[str] = ()) -> None:
    """Cut the model's parameters to this rank's part, except those of the modules `done`, and add
    the exchanges. Raises ConfigurationError if a size is not a multiple of the number of ranks."""
    plan = read_plan(model)
    for pattern, style in plan.items():
        for name, target in _find(model, pattern):
            if isinstance(target, nn.Parameter):
                _split_experts(model, name, target, style, tp)
            elif style == "moe_tp_experts":
                target.register_forward_hook(_sum_output(tp))
            elif style in COLUMNS + ROWS:
                outputs = getattr(target, "out_features", 0)  # of linear layers, on all ranks
                if name not in done:
                    _cut_linear(name, target, style, tp)
                _add_exchanges(target, style, tp, outputs)


def _find(model: nn.Module, pattern: str) -> Iterator[tuple[str, Any]]:
    """The modules and stacked parameters whose names match."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    members: list[tuple[str, Any]] = [*model.named_modules(), *model.named_parameters()]
    for name, member in members:
        if matches(name) and (not isinstance(member, nn.Parameter) or member.dim() == 3):
            yield name, member


def _cut_linear(name: str, module: nn.Module, style: str, tp: Collective) -> None:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not isinstance(module, nn.Linear):
        raise ConfigurationError(f"{name} is a {type(module).__name__}, which cannot be split here: set parallel.tp: 1.")
    if style in COLUMNS:
        parts = 2 if style == "packed_colwise" else 1
        if style in GATHERED:  # the vocabulary may have any size: the last ranks hold rows of zeros, whose results are cut off
            weight, bias = _pad(weight, tp), None if bias is None else _pad(bias, tp)
        module.weight = _cut(name, weight, 0, tp, parts)
        if bias is not None:
            module.bias = _cut(name, bias, 0, tp, parts)
        module.out_features = module.weight.shape[0]
        return
    module.weight = _cut(name, weight, 1, tp)
    module.in_features = module.weight.shape[1]
    if bias is not None and tp.rank:
        module.bias.data.zero_()


def _pad(parameter: nn.Parameter, tp: Collective) -> nn.Parameter:
    """The parameter with rows of zeros up to a multiple of the ranks."""
    if not (missing := -len(parameter) % tp.size):
        return parameter
    return nn.Parameter(F.pad(parameter.data, (*[0, 0] * (parameter.dim() - 1), 0, missing)), requires_grad=False)


def _add_exchanges(module: nn.Module, style: str, tp: Collective, outputs: int) -> None:
    """outputs: of the module on all ranks."""
    if style in COLUMNS:
        if style in GATHERED:
            module.register_forward_hook(lambda _module, _inputs, output: tp.all_gather(output)[..., :outputs])
        return
    if style != "rowwise":
        module.register_forward_pre_hook(lambda _module, inputs: (inputs[0].chunk(tp.size, -1)[tp.rank], *inputs[1:]))
    module.register_forward_hook(_sum_output(tp))


def _split_experts(model: nn.Module, name: str, parameter: nn.Parameter, style: str, tp: Collective) -> None:
    """A stack of experts' weights [experts, outputs, inputs]."""
    owner_name, _, attribute = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if getattr(owner, "is_transposed", False):
        raise ConfigurationError(f"{name} is stored transposed, and cannot be split here: set parallel.tp: 1.")
    cut = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}.get(style)
    if cut is not None:
        setattr(owner, attribute, _cut(name, parameter, cut[0], tp, cut[1]))


def _cut(name: str, parameter: nn.Parameter, dim: int, tp: Collective, parts: int = 1) -> nn.Parameter:
    """This rank's part of each of `parts` equal pieces of a dimension."""
    size = parameter.shape[dim]
    if size % (parts * tp.size):
        raise ConfigurationError(f"the {size} values of {name} cannot be split into {tp.size} equal parts: set parallel.tp to a divisor.")
    pieces = [piece.chunk(tp.size, dim)[tp.rank] for piece in parameter.data.chunk(parts, dim)]
    return nn.Parameter(torch.cat(pieces, dim).contiguous(), requires_grad=False)


def _sum_output(tp: Collective) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that sums a module's output over the ranks."""

    def act(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return tp.all_reduce(output)

    return act
