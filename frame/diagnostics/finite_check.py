"""`check_finite`: a warm-up step whose logits must be finite, and the search for the plugin whose
results are not.

Used by `components`. Must not know a plugin by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from frame.core.blame import describe, find_origin, remedy
from frame.core.errors import PluginError
from frame.core.execution.model_runner import SwitchingAttention
from frame.core.execution.warmup import idle_prompts

if TYPE_CHECKING:
    from frame.core.execution.model_runner import TorchModelRunner
    from frame.core.interfaces.batch import ScheduledBatch

# The methods of plugins that compute tensors from tensors; GEMM kernels are called by the modules
# that own them.
_METHODS = ("run", "run_parts", "run_mla", "dispatch", "combine")


def check_finite(runner: TorchModelRunner) -> None:
    """Run warm-up steps that draw a token. Raises PluginError that names the plugin whose result is
    not finite."""
    batches = list(idle_prompts(runner.context.limits, few=True, fresh=True))  # the first one with logits processors
    results = [runner.launch(batch).wait() for batch in batches]
    for result in results:
        if result.faults:
            raise PluginError(next(iter(result.faults.values())))
    if all(result.invalid is None for result in results):
        return
    if all(result.invalid is None for result in results[1:]):
        names = runner.processors.describe_all()
        raise PluginError(f"One of these yields NaN or infinity in a warm-up step: {names}; correct it, or exclude its package.")
    if runner.context.pipeline is not None:  # the other stages do not repeat the step
        raise PluginError("The model yields NaN or infinity in a warm-up step; check the weights, or find the plugin with parallel.pp: 1.")
    first = next(number for number, result in enumerate(results) if number and result.invalid is not None)
    raise PluginError(_search(runner, batches[first]))


def _search(runner: TorchModelRunner, batch: ScheduledBatch) -> str:
    """Repeat the step and name the first plugin with finite inputs and a result that is not."""
    faults: list[tuple[object, str]] = []

    def note(owner: object, place: str, inputs: Any, result: Any) -> None:
        if not faults and not _is_finite(result) and _is_finite(inputs):
            faults.append((owner, place))

    context = runner.context
    attention = context.attention
    backends = attention.backends if isinstance(attention, SwitchingAttention) else (attention,)
    with ExitStack() as stack:
        for plugin in (*backends, context.moe_runner, context.moe_dispatcher):
            stack.enter_context(_watched(plugin, note))
        stack.enter_context(_watched_modules(runner.model, note))
        runner.launch(batch).wait()
    owner, place = faults[0] if faults else (runner.model, "its output")
    culprit = owner if find_origin(owner) is not None else runner.model
    return f"{describe(culprit)} yields NaN or infinity in a warm-up step, in {place}; check the weights, or {remedy(culprit)}."


@contextmanager
def _watched(plugin: Any, note: Callable[[object, str, Any, Any], None]) -> Iterator[None]:
    """Note the results of a plugin's methods."""
    names = [name for name in _METHODS if plugin is not None and hasattr(plugin, name)]
    for name in names:
        setattr(plugin, name, _noting(plugin, name, getattr(plugin, name), note))
    try:
        yield
    finally:
        for name in names:
            delattr(plugin, name)


def _noting(plugin: object, name: str, method: Callable[..., Any], note: Callable[[object, str, Any, Any], None]) -> Callable[..., Any]:
    def noting(*arguments: Any) -> Any:
        result = method(*arguments)
        note(plugin, f"{type(plugin).__name__}.{name}", arguments, result)
        return result

    return noting


@contextmanager
def _watched_modules(model: Any, note: Callable[[object, str, Any, Any], None]) -> Iterator[None]:
    """Note the results of a model's modules, the inner ones first. The result of a module with the
    GEMM of a plugin is that of the GEMM."""

    def hook(name: str) -> Callable[..., None]:
        def noting(module: Any, inputs: Any, result: Any) -> None:
            gemm = getattr(module, "gemm", None)
            note(model if gemm is None or find_origin(gemm) is None else gemm, name, inputs, result)

        return noting

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.float()).all())
    return all(map(_is_finite, value)) if isinstance(value, tuple | list) else True
