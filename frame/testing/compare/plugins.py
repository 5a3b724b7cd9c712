"""Compares a plugin with a reference plugin of its kind: serves models with each and finds the
first token, step and layer where they differ, or gives both the same texts or grammars.

`python -m frame.testing.compare.plugins KIND NAME REFERENCE [FILE…]` prints one line a subject;
`frame plugins check NAME --against REFERENCE` runs it. Exit codes: 0 equal, 1 different or nothing
compared, 78 a plugin failed. Must not know a plugin by name.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.config.server_sections import PluginsSection
from frame.core.blame import blaming
from frame.core.errors import ConfigurationError, PluginError
from frame.core.interfaces.model import ModelCapabilities
from frame.core.interfaces.runner import unwrap_runner
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.offline.engine import Engine
from frame.entrypoints.processes.build_engine import build_engine
from frame.interfaces.kinds import KINDS
from frame.plugins.loader import load_configured
from frame.testing.checkpoints import TINY, make_checkpoint
from frame.testing.compare.texts import Verdict, compare_grammars, compare_parsers
from frame.testing.local_loop import LocalLoop

if TYPE_CHECKING:
    from frame.core.interfaces.plugin import PluginRecord
    from frame.plugins.registry import Registry

TOKENS = 200
PLAIN: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("LlamaForCausalLM", {}),
    ("Qwen3ForCausalLM", {}),
    ("MistralForCausalLM", {"sliding_window": 48}),
    ("MixtralForCausalLM", {}),
    ("DeepseekV2ForCausalLM", {}),
)
EXPERTS = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
# The kinds whose plugins compute or order what the engine serves; greedy tokens must not depend on
# them.
SERVED = (
    "model",
    "attention_backend",
    "gemm_kernel",
    "moe_runner",
    "moe_dispatcher",
    "scheduling_policy",
    "eviction_policy",
    "kv_allocator",
    "prefix_cache",
    "weight_source",
    "drafter",
    "platform",
)
RANKED = ("collective", "launcher")  # those that serve with two ranks in processes of their own
PARSERS = ("reasoning_parser", "tool_call_parser")
# Kinds of which two plugins have nothing to be equal in.
NOT_COMPARED: Mapping[str, str] = MappingProxyType(
    {
        "adapter": "two formats read different files",
        "weight_transfer": "each receives from trainers of its own and computes no tokens",
        "kv_tier": "each keeps blocks in a place of its own and computes no tokens",
        "modality": "two plugins read different files",
        "weight_format": "two formats store different weights, so the tokens differ",
        "logits_processor": "each changes the tokens of requests by parameters of its own",
        "http_extension": "each serves routes of its own and computes no tokens",
        "cli_command": "each is a command of its own and computes no tokens",
        "sampler": "each draws tokens in its own way",
        "pooler": "each pools in its own way, so the vectors differ",
        "key_store": "each knows keys of its own and computes no tokens",
        "routing_policy": "each chooses replicas, and computes no tokens",
        "tracer": "each writes spans to a place of its own and computes no tokens",
        "stat_logger": "each writes figures to a place of its own and computes no tokens",
    }
)
_PROMPTS = (3, 40, 130, 70)  # tokens; the last one begins with the second
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of a layer's greatest value
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.\d+$")


@dataclass(slots=True)
class _Run:
    """Served tokens of every prompt, seconds and steps, and where recorded the hidden states:
    by step, by layer, float32 [tokens, hidden]."""

    tokens: list[list[int]]
    seconds: float
    steps: int
    dtype: str
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)


def compare(
    record: PluginRecord,
    reference: PluginRecord,
    folders: Mapping[str, Path],
    settings: Mapping[str, Mapping[str, Any]],
    num_tokens: int = TOKENS,
) -> Iterator[Verdict]:
    """Serve each model of `folders` with the plugin and with the reference, greedily, `num_tokens`
    tokens a prompt. `settings`: further settings, by section.

    Raises PluginError for a plugin that fails.
    """
    serve = _serve_ranks if record.kind in RANKED else _serve
    for name, folder in folders.items():
        try:
            runs = [serve(each, folder, settings, num_tokens) for each in (record, reference)]
        except ResolveError as error:
            yield Verdict(name, skipped=str(error).splitlines()[0])
            continue
        ours, other = runs
        speeds = (1000 * ours.seconds / ours.steps, 1000 * other.seconds / other.steps)
        problem = ""
        if ours.tokens != other.tokens and record.kind in RANKED:
            problem = _describe_token(ours, other)
        elif ours.tokens != other.tokens:
            recorded = [_serve(each, folder, settings, num_tokens, is_recorded=True) for each in (record, reference)]
            problem = _describe(recorded[0], recorded[1]) if recorded[0].tokens != recorded[1].tokens else _describe_token(ours, other)
        yield Verdict(name, speeds, problem)


def check_kind(record: PluginRecord) -> None:
    """Raise PluginError unless plugins of the kind can be compared."""
    if (reason := NOT_COMPARED.get(record.kind)) is not None:
        raise PluginError(f"two plugins of the kind {record.kind} cannot be compared: {reason}; check it with --conformance")


def make_models(record: PluginRecord, folder: Path) -> dict[str, Path]:
    """Five tiny checkpoints that the plugin can be compared on, by name: for a model plugin its own
    architectures, with different weights; for plugins of experts, models with experts. Two for a
    kind that starts processes."""
    disable_progress_bar()
    models: Sequence[tuple[str, Mapping[str, Any]]] = PLAIN
    if record.kind in RANKED:
        models = (PLAIN[0], PLAIN[3])
    if record.kind.startswith("moe_"):
        models = [(name, {}) for name in EXPERTS]
    if isinstance(record.capabilities, ModelCapabilities) and record.capabilities.architectures is not None:
        known = [name for name in record.capabilities.architectures if name in TINY]
        if not known:
            raise PluginError(f"no tiny checkpoint of {' or '.join(record.capabilities.architectures)} can be made; use --conformance")
        models = [(known[seed % len(known)], {"seed": seed}) for seed in range(5)]
    return {_name(*each): make_checkpoint(each[0], folder / str(number), **each[1]) for number, each in enumerate(models)}


def _name(architecture: str, changes: Mapping[str, Any]) -> str:
    return " ".join([architecture, *(f"{key}={value}" for key, value in changes.items())])


def _serve(
    record: PluginRecord, folder: Path, settings: Mapping[str, Mapping[str, Any]], num_tokens: int, *, is_recorded: bool = False
) -> _Run:
    """Serve the prompts with one plugin. The KV cache is too small for all of them, so that
    requests are preempted, and a second round finds cached prefixes."""
    more: dict[str, Any] = {"execution": {"cuda_graph_max_bs": 0, "prompt_graph_max_tokens": 0}} if is_recorded else {}
    prepared = prepare(_configure(record, folder, settings, num_tokens, more))
    far = InProcessTransport.pair(lambda _: None)[1]
    engine = build_engine(prepared.resolved, prepared.registry, far)[0]
    loop = LocalLoop(engine.scheduler, engine.runner)
    prompts = _make_prompts(prepared.resolved.model.vocab_size)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    try:
        with blaming("while it serves"), _recording(engine.runner) as states:
            began = time.perf_counter()
            tokens = loop.generate(prompts, params) + loop.generate(prompts[1:], params)
            seconds = time.perf_counter() - began
            return _Run(tokens, seconds, loop.stats["steps"], prepared.resolved.dtype, states=states if is_recorded else [])
    finally:
        engine.scheduler.close()
        engine.runner.close()


def _serve_ranks(record: PluginRecord, folder: Path, settings: Mapping[str, Mapping[str, Any]], num_tokens: int) -> _Run:
    """Serve the prompts with one plugin on two ranks."""
    config = _configure(record, folder, settings, num_tokens, {"parallel": {"tp": 2}})
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    try:
        with Engine(config=config) as engine:
            prompts = _make_prompts(engine.control("server_info")["vocab_size"])
            began = time.perf_counter()
            outputs = [*engine.generate(prompts, params), *engine.generate(prompts[1:], params)]
            seconds = time.perf_counter() - began
            info = engine.control("server_info")
    except (RuntimeError, OSError) as error:  # the start or the end of a process
        raise PluginError(f"{record.kind} {record.name!r} does not serve {folder} on two ranks: {error}") from error
    return _Run([output.token_ids for output in outputs], seconds, info["step"], info["dtype"])


def _configure(
    record: PluginRecord, folder: Path, settings: Mapping[str, Mapping[str, Any]], num_tokens: int, more: Mapping[str, Mapping[str, Any]]
) -> FrameConfig:
    """The configuration that serves a model with one plugin. `settings` replace those of here,
    `more` is added to these."""
    max_length = max(_PROMPTS) + 1 + num_tokens
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "skip_tokenizer_init": True, "max_context": max_length + 1},
        "cache": {"max_total_tokens": 2 * max_length + 64},
        "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 64},
    }
    for name, values in (*more.items(), *settings.items()):
        sections[name] = {**sections.get(name, {}), **values}
    section, _, setting = KINDS[record.kind].key.partition(".")
    sections.setdefault(section, {})[setting] = record.name
    return FrameConfig.model_validate(sections)


def _make_prompts(vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(6, vocab_size, size).tolist() for size in _PROMPTS]
    prompts[3][: _PROMPTS[1]] = prompts[1]
    return prompts


@contextmanager
def _recording(runner: Any) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Record the hidden states of the model's layers in every step, float32 on the CPU."""
    states: list[dict[str, torch.Tensor]] = []
    launch = runner.launch

    def launching(batch: Any) -> Any:
        states.append({})
        return launch(batch)

    def hook(name: str) -> Any:
        def noting(module: Any, inputs: Any, output: Any) -> None:
            states[-1][name] = _hidden(output).float().cpu().clone()

        return noting

    rank: Any = unwrap_runner(runner)
    handles = [module.register_forward_hook(hook(name)) for name, module in rank.model.named_modules() if _LAYER.search(name)]
    runner.launch = launching
    try:
        yield states
    finally:
        del runner.launch
        for handle in handles:
            handle.remove()


def _hidden(output: Any) -> torch.Tensor:
    """The hidden states [tokens, hidden] of a layer's output, whose parts are summands."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [part.sum(1) if part.dim() == 3 and len(parts) > 1 else part for part in parts if isinstance(part, torch.Tensor)]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor if tensor.shape == total.shape else total
    return total


def _describe(ours: _Run, other: _Run) -> str:
    """Where two runs part: the first token, and the first step and layer whose hidden states are
    further apart than rounding explains."""
    problem = _describe_token(ours, other)
    tolerance = _TOLERANCE[ours.dtype]
    for step, (mine, theirs) in enumerate(zip(ours.states, other.states, strict=False)):
        for layer, right in theirs.items():
            left = mine.get(layer)
            if left is None or left.shape != right.shape:
                return f"{problem}; the steps differ from step {step} on"
            apart = float((left - right).abs().max() / right.abs().max().clamp_min(1e-6)) if right.numel() else 0.0
            if not apart <= tolerance:
                share = f"{apart:.2g} of the largest value"
                return f"{problem}; the first different hidden states are those of step {step}, {layer}, by {share}"
    return f"{problem}; no hidden states differ by more than rounding before that"


def _describe_token(ours: _Run, other: _Run) -> str:
    """The first token, by position, that differs between two runs."""
    places = [
        (place, number)
        for number, (mine, theirs) in enumerate(zip(ours.tokens, other.tokens, strict=True))
        for place, pair in enumerate(zip(mine, theirs, strict=True))
        if pair[0] != pair[1]
    ]
    place, number = min(places)
    return f"differs: token {place} of request {number} is {ours.tokens[number][place]} instead of {other.tokens[number][place]}"


def main(kind: str, name: str, reference: str, *paths: str) -> int:
    """Compare two plugins and print the verdicts; returns the exit code."""
    try:
        registry = load_configured(PluginsSection(paths=paths))
        record, other = registry.get(kind, name), registry.get(kind, reference)
        check_kind(record)
        with tempfile.TemporaryDirectory(prefix="frame-compare-") as folder:
            verdicts = []
            for verdict in _compare_kind(record, other, registry, Path(folder), paths):
                sys.stdout.write(f"  {verdict}\n")
                sys.stdout.flush()
                verdicts.append(verdict)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 78
    return int(any(verdict.problem for verdict in verdicts) or all(verdict.skipped for verdict in verdicts))


def _compare_kind(
    record: PluginRecord, reference: PluginRecord, registry: Registry, folder: Path, paths: Sequence[str]
) -> Iterator[Verdict]:
    if record.kind in PARSERS:
        return compare_parsers(record, reference, registry)
    if record.kind == "grammar_backend":
        return compare_grammars(record, reference, registry)
    return compare(record, reference, make_models(record, folder), {"plugins": {"paths": paths}})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
