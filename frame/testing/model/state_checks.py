"""Checks of models: what a model keeps between steps, shares with another one, and changes in the
process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.testing.generators import require_bounded
from frame.testing.model.session import Checkpoint, make_plugin
from frame.testing.model.tools import Tools
from frame.testing.torch_calls import unchanged_torch

BASE = 77_000.0  # of the rotary embedding of a second model


def check_process_is_left_as_it_is(tools: Tools) -> None:
    """Building, loading and a step leave the settings of the process and of torch."""
    with unchanged_torch("the model changes"):
        tools.open(dtype=torch.bfloat16).step((0, tools.prompt(3)))


def check_steps_leave_nothing(tools: Tools) -> None:
    """Steps leave no tensor behind."""
    session, tokens = tools.open(), tools.prompt(3, seed=1)
    held = _Holder(session.model)

    def work(number: int) -> None:
        session.step((0, tokens))
        session.computed[0] = 0
        held.update()

    require_bounded(held, work, 60, "steps of three tokens", slack=10, factor=1.0)


class _Holder:
    """What a model, its modules and its class hold besides parameters, for `count_elements`, which
    follows no class by itself."""

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules())
        self.held = [vars(kind) for kind in type(model).__mro__ if kind.__module__.split(".")[0] != "torch" and kind is not object]
        self.own: list[Any] = []

    def update(self) -> None:
        """Attributes may be made by a step."""
        shared = ("context", "model_config")
        self.own = [value for each in self._modules for name, value in vars(each).items() if name not in shared and name[0] != "_"]


def check_two_models(tools: Tools) -> None:
    """Another model of the class, with another rotary base, runs in the middle of a step: neither
    changes the other's result, and they share no tensor. A draft model is one, and so are the ranks
    of a process."""
    tokens, others = tools.prompt(9, seed=1), tools.prompt(9, seed=2)
    backend = make_plugin("attention_backend", "torch_native", build_context(tools.subject.setting.device, torch.float32, 16))
    first, second = tools.open(attention=backend), Tools(tools.subject, _change_base(tools.checkpoint)).open()
    expected = first.step((0, tokens))[0], second.step((0, others))[0]
    run, inside = backend.run, list[torch.Tensor]()

    def run_both(*arguments: Any) -> torch.Tensor:
        if not inside:
            inside.append(second.step((1, others))[0])
        result: torch.Tensor = run(*arguments)
        return result

    backend.run = run_both
    result = first.step((1, tokens))[0]
    tools.compare(result, expected[0], "a step during which another model of the class runs")
    if inside:
        tools.compare(inside[0], expected[1], "a step in the middle of another model's")
    places = {tensor.data_ptr(): name for name, tensor in _list_tensors(first.model)}
    shared = sorted(places[tensor.data_ptr()] for _, tensor in _list_tensors(second.model) if tensor.data_ptr() in places)
    assert not shared, f"two models with other rotary bases share {', '.join(shared[:4])}"


def _change_base(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a rotary base of 77,000."""
    config = dict(checkpoint.model_config.config)
    ropes = config.get("rope_parameters")
    if isinstance(ropes, dict) and "rope_theta" in ropes:
        config["rope_parameters"] = {**ropes, "rope_theta": BASE}
    else:
        config["rope_theta"] = BASE
    return replace(checkpoint, model_config=replace(checkpoint.model_config, config=config))


def _list_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in (*model.named_parameters(), *model.named_buffers()) if each.numel() and not each.is_mkldnn]
