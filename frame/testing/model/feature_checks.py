"""Checks of models: what their capabilities state, and extensions of a batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ForwardBatch, HiddenStateOutputs, SelectedTokens, StageInput
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.model import checkpoint_tasks
from frame.core.interfaces.rank_context import Pipeline, Task
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.testing.conformance import SkipCheck
from frame.testing.model.session import Session, build, make_plugin, read
from frame.testing.model.tools import Tools
from frame.testing.torch_calls import TorchCalls

FAR = 2000  # first positions that few numbers of bfloat16 tell apart
# of a layer's attention or dense feed-forward part
PROJECTION = re.compile(r"\.\d+\.(self_attn\.[qkvo]|mlp\.gate|mlp\.up|mlp\.down)_proj\.weight$")


def _states(tools: Tools, name: str) -> bool:
    return bool(getattr(tools.subject.record.capabilities, name, False))


@torch.inference_mode()
def check_bfloat16_at_far_positions(tools: Tools) -> None:
    """Positions that bfloat16 has no numbers for have results near those of float32."""
    tokens = tools.prompt(40, seed=4)
    start = max(0, min(FAR, tools.checkpoint.model_config.max_context - len(tokens) - 1))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        session = tools.open(dtype=dtype)
        batch = session.batch([(0, tokens)], 0)
        hidden = session.model.forward(replace(batch, positions=batch.positions + start))
        results.append(session.model.compute_logits(hidden).float().cpu())
    distance = float(((results[1] - results[0]).norm(dim=-1) / results[0].norm(dim=-1)).median())
    assert distance <= 0.05, f"in bfloat16, the median relative error from position {start} on is {distance:.2e}, allowed 5e-02"


def check_rows_are_batch_invariant(tools: Tools) -> None:
    """In the deterministic mode, a token's bits depend on the tokens up to it alone."""
    if not _states(tools, "batch_invariant"):
        raise SkipCheck("the record does not state `batch_invariant`")
    tokens, session = tools.prompt(40, seed=1), tools.open(deterministic=True)
    (whole,) = session.step((0, tokens))
    parts = [session.step((1, tokens[:17]), (2, tools.prompt(30, seed=2)))[0]]
    parts += [session.step((1, tokens[17:39]))[0], session.step((1, tokens[39:]))[0]]
    for what, first, stop in (("a chunk beside another row", 0, 17), ("a chunk alone", 17, 39), ("a decode", 39, 40)):
        same = torch.equal(torch.cat(parts)[first:stop], whole[first:stop])
        assert same, f"the logits of {what} have other bits than in a whole prompt, in the deterministic mode"


@torch.inference_mode()
def check_stages_of_a_pipeline(tools: Tools) -> None:
    """Two stages compute what one model does: the first with a prompt's chunks, and a decode."""
    count = tools.checkpoint.model_config.num_layers
    if not _states(tools, "pipeline_parallel") or count < 2:
        raise SkipCheck("the record does not state `pipeline_parallel`, or the model has one layer")
    group, ranges = LocalGroup(), (range(count // 2), range(count // 2, count))
    places = [Pipeline(index=index, size=2, layers=layers, hidden=group, tokens=group) for index, layers in enumerate(ranges)]
    try:
        stages = [tools.open(pipeline=place) for place in places]
    except ConfigurationError as error:
        raise SkipCheck(str(error)) from error
    tokens, results = tools.prompt(30, seed=1), []
    for part in (tokens[:20], tokens[20:29], tokens[29:]):
        rows, num_decodes, batches = [(0, part)], int(len(part) == 1), []
        for stage in stages:
            batches.append(stage.batch(rows, num_decodes))
            stage.computed[0] += len(part)
        hidden = stages[0].model.forward(batches[0])
        last = replace(batches[1], extensions={StageInput: StageInput(hidden)})
        results.append(stages[1].model.compute_logits(stages[1].model.forward(last)).float().cpu())
    tools.compare(torch.cat(results), tools.expected(tokens), "a prompt in two stages")


@torch.inference_mode()
def check_tasks_have_one_result(tools: Tools) -> None:
    """A language model that embeds or classifies has the hidden states, and to classify the logits,
    that it has to generate."""
    tasks: tuple[Task, ...] = getattr(tools.subject.record.capabilities, "tasks", ("generate",))
    others = [task for task in tasks if task != "generate" and task in checkpoint_tasks(tools.checkpoint.model_config.architecture)]
    if "generate" not in tasks or not others:
        raise SkipCheck("the record states one task")
    session, tokens = tools.open(), tools.prompt(20, seed=1)
    expected = session.model.forward(session.batch([(0, tokens)], 0))
    logits = session.model.compute_logits(expected)
    for task in others:
        model = tools.open(task=task)
        hidden = model.model.forward(model.batch([(0, tokens)], 0))
        tools.compare(hidden.float().cpu(), expected.float().cpu(), f"hidden states in the task {task}")
        if task == "classify":
            tools.compare(model.model.compute_logits(hidden).float().cpu(), logits.float().cpu(), "logits in the task classify")


@torch.inference_mode()
def check_hidden_state_outputs(tools: Tools) -> None:
    """A model that adds the states of `HiddenStateOutputs` adds all of them: the last is what
    `forward` returns, and a tap has one value, whichever others there are."""
    session, tokens = tools.open(), tools.prompt(20, seed=1)
    count = tools.checkpoint.model_config.num_layers
    outputs = [HiddenStateOutputs(frozenset(layers)) for layers in (range(count + 1), (0,))]
    for each in outputs:
        batch = session.batch([(0, tokens)], 0)
        hidden = session.model.forward(replace(batch, extensions={HiddenStateOutputs: each}))
    if not any(each.states for each in outputs):
        raise SkipCheck("the model has no hidden-state outputs")
    for each in outputs:
        assert each.states.keys() == each.layers, f"the model adds the states {sorted(each.states)} of {sorted(each.layers)}"
    tools.compare(outputs[0].states[count].float().cpu(), hidden.float().cpu(), f"the hidden-state output {count}")
    tools.compare(outputs[0].states[0].float().cpu(), outputs[1].states[0].float().cpu(), "the hidden-state output 0")
    repeated = [layer for layer in range(count) if torch.equal(outputs[0].states[layer], outputs[0].states[layer + 1])]
    assert not repeated, f"the hidden-state outputs {repeated[0]} and {repeated[0] + 1} are equal"


class _Names:
    """`AdapterLayers` that notes which layers ask for deltas."""

    adapts_routers = False

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def add_layer(self, names: Any, *arguments: Any, **options: Any) -> Any:
        self.asked |= set(names)
        return SimpleNamespace(gemm=None)

    def add_latent_layer(self, name: str, *arguments: Any) -> Any:
        return self.add_layer((name,))


def check_projections_have_deltas(tools: Tools) -> None:
    """Where some projections of a layer have the deltas of adapters, all have."""
    if not _states(tools, "adapters"):
        raise SkipCheck("the record does not state `adapters`")
    names = _Names()
    plain = [name for name, tensor in read(build(tools.subject, tools.checkpoint), tools.checkpoint) if len(tensor.shape) == 2]
    build(tools.subject, tools.checkpoint, adapters=names)
    if not names.asked:
        raise SkipCheck("the model is not made of layers that have deltas; adapters for it are refused")
    bare = {name.removesuffix(".weight") for name in plain if PROJECTION.search(name)} - names.asked
    assert not bare, f"the record states `adapters`, and {', '.join(sorted(bare)[:4])} have no deltas"


class _Calls(TorchCalls):
    """Calls of a model, and not those of its attention, cache and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.on_host: list[torch.Tensor] = []  # whose values wait for nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth or (args and any(args[0] is each for each in self.on_host)):
            return func(*args, **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.tensor and "device" not in (kwargs or {}):
            self.on_host.append(result)
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def ignore(self, target: Any, *names: str) -> Any:
        """Do not count the calls inside these methods of an object. -> the object"""
        for name in names:
            if callable(method := getattr(target, name, None)):
                setattr(target, name, self._wrap(method))
        return target

    def _wrap(self, method: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            with self.pause():
                return method(*arguments, **options)

        return run


@torch.inference_mode()
def check_steps_do_not_wait(tools: Tools) -> None:
    """A step of decodes of a model with `graphs` waits for no value on the device."""
    if not _states(tools, "graphs"):
        raise SkipCheck("the record does not state `graphs`")
    calls, bare = _Calls(), build_context(tools.subject.setting.device, torch.float32, 16)
    backend = calls.ignore(make_plugin("attention_backend", "torch_native", bare), "run")
    changes: dict[str, Any] = {"attention": backend}
    if tools.checkpoint.model_config.num_experts:
        runner = make_plugin("moe_runner", "torch_native", bare)
        changes["moe_runner"] = calls.ignore(runner, "run", "run_parts", "multiply_pairs")
    session = tools.open(**changes)
    calls.ignore(session.kv, "store")
    session.step((0, tools.prompt(5)), (1, tools.prompt(9)))
    _compute(session, session.batch([(0, [7]), (1, [8])], 2))  # what the first step of this form prepares
    batch = session.batch([(0, [7]), (1, [8])], 2)
    with calls:
        _compute(session, batch)
    assert not calls.waits, f"the record says `graphs`, and a step of decodes waits for values in {', '.join(sorted(calls.waits))}"


def _compute(session: Session, batch: ForwardBatch) -> torch.Tensor:
    if getattr(session.model, "supports_token_selection", False):
        batch.extensions[SelectedTokens] = SelectedTokens(batch.logits_indices)
    return session.model.compute_logits(session.model.forward(batch))
