"""A tiny checkpoint of an architecture, and a model over a plain paged cache, step by step. For the
suite of models.

Attention is that of `torch_native`, which has a suite of its own, so that a difference is the
model's. Must not know the scheduler or the model runner.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from frame.checkpoint.model_config import read_model_config
from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.cache_groups import LayerCache
from frame.core.interfaces.collective import Collective
from frame.core.interfaces.model import Model, ModelConfig, ModelContext
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.rank_context import Task
from frame.core.interfaces.weight_format import FormatContext
from frame.core.kv_cache.geometry import kv_geometry
from frame.entrypoints.tools.bench.paged_batches import Pages, PlainKVCache, Rows, build_context, forward_batch
from frame.forward.declared_caches import model_geometry
from frame.interfaces.weights import WeightSourceContext
from frame.loading.loader import allocate_parameters, expected_shapes, process_weights_after_loading
from frame.loading.weight_reader import read_weights
from frame.testing.attention.steps import LayeredKVCache
from frame.testing.checkpoints import TINY, load_reference, make_checkpoint
from frame.testing.conformance import SkipCheck, Subject
from frame.testing.gemm_kernels import load_own_plugins, make_gemm_kernels
from frame.testing.tensors import unchanged

LENGTH = 2304  # tokens of a slot
Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """The configuration of a tiny model. `folder` holds weights of transformers' model of the same
    architecture; None: there is none, and weights are random."""

    model_config: ModelConfig
    folder: Path | None = None

    @torch.no_grad()
    def reference(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """transformers' result for a prompt: logits [tokens, vocab], of an encoder hidden states
        [tokens, hidden_size]; None without a model of transformers."""
        if self.folder is None:
            return None
        out = _reference(self.folder)(torch.tensor([list(tokens)]))
        result: torch.Tensor = out.last_hidden_state if self.model_config.encoder else out.logits
        return result[0]


def compute_reference(folder: Path, tokens: Sequence[int]) -> torch.Tensor | None:
    """transformers' result for a checkpoint, as `Checkpoint.reference`; None where transformers
    cannot read it."""
    try:
        with torch.no_grad():
            out = load_reference(folder)(torch.tensor([list(tokens)]))
    except Exception:  # noqa: BLE001 - of any class, by the model
        return None
    result: torch.Tensor = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]
    return result


_reference = lru_cache(maxsize=2)(load_reference)


@lru_cache(maxsize=32)
def make_tiny(architecture: str, is_encoder: bool) -> Checkpoint:
    """A checkpoint of an architecture in `TINY`, written once in a process."""
    folder = make_checkpoint(architecture, Path(_folder().name) / architecture)
    return Checkpoint(replace(read_model_config(folder), encoder=is_encoder), folder)


def make_configured(config: Mapping[str, Any], is_encoder: bool) -> Checkpoint:
    """A model of which there is a config.json alone."""
    with tempfile.TemporaryDirectory(prefix="frame-conformance-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        return Checkpoint(replace(read_model_config(folder), encoder=is_encoder))


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="frame-conformance-")


def find_checkpoints(subject: Subject) -> Iterator[Checkpoint]:
    """Tiny checkpoints of the plugin: of its class attribute `conformance_config`, else of its
    architectures that `frame.testing.checkpoints` has."""
    capabilities = subject.record.capabilities
    is_encoder = bool(getattr(capabilities, "encoder", False))
    config = getattr(subject.target, "conformance_config", None)
    if config is not None:
        yield make_configured(config, is_encoder)
        return
    names = getattr(capabilities, "architectures", None)
    for architecture in ("Olmo2ForCausalLM",) if names is None else names:
        if architecture in TINY:
            yield make_tiny(architecture, is_encoder)


def make_plugin(kind: str, name: str, context: Any) -> Any:
    """One of frame's own plugins."""
    registry = load_own_plugins()
    return registry.load(registry.get(kind, name))(context)


def build_model_context(
    subject: Subject, checkpoint: Checkpoint, dtype: torch.dtype, group: Collective | None = None, **changes: Any
) -> ModelContext:
    """The context of a model with PyTorch's attention and unquantized weights, on one rank or on
    that of `group`. changes: fields of the context."""
    config = checkpoint.model_config
    deterministic: bool = changes.get("deterministic", False)
    bare: BuildContext = build_context(subject.setting.device, dtype, 16, deterministic=deterministic)
    bare = replace(bare, limits=replace(bare.limits, max_context=min(bare.limits.max_context, max(config.max_context, LENGTH))))
    if group is not None:
        bare = replace(bare, tp=group, plan=ParallelPlan(tp=group.size))
    task: Task = "generate" if "generate" in getattr(subject.record.capabilities, "tasks", ("generate",)) else "embed"
    context = replace(
        bare,
        task=task,
        attention=make_plugin("attention_backend", "torch_native", bare),
        weight_format=make_plugin("weight_format", "none", FormatContext(dtype)),
        gemm_kernels=make_gemm_kernels(bare),
        moe_runner=make_plugin("moe_runner", "torch_native", bare) if config.num_experts else None,
        moe_dispatcher=make_plugin("moe_dispatcher", "all_reduce", bare) if config.num_experts else None,
    )
    return ModelContext.from_build(replace(context, **changes), config)


def build(
    subject: Subject, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, group: Collective | None = None, **changes: Any
) -> Any:
    """The model with parameters of NaN, except those that a checkpoint need not have. changes:
    fields of its context."""
    with torch.device("meta"):
        model = subject.target(build_model_context(subject, checkpoint, dtype, group, **changes), subject.options)
    assert isinstance(model, nn.Module), f"{type(model).__name__} is no torch.nn.Module"
    allocate_parameters(model, torch.device(subject.setting.device))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not getattr(parameter, "optional", False):
                parameter.fill_(torch.nan)
    return model


def read(model: Any, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Weights:
    """The tensors of the checkpoint by name; random ones where it has none."""
    registry = load_own_plugins()
    source = registry.load(registry.get("weight_source", "dummy" if checkpoint.folder is None else "safetensors"))
    context = WeightSourceContext(checkpoint.folder or Path(), torch.device("cpu"), dtype, expected_shapes=partial(expected_shapes, model))
    tensors: Any = read_weights(source(context))
    return [(name, draw_vector(name, tensor, dtype) if checkpoint.folder is None else tensor) for name, tensor in tensors]


def draw_vector(name: str, tensor: Any, dtype: torch.dtype) -> Any:
    """A random vector of the tensor's size, near 0 for a bias and near 1 for another one; a tensor
    of more dimensions stays. With biases of 0 and equal factors, mistakes with them do not show."""
    if len(tensor.shape) != 1:
        return tensor
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = 0.1 * torch.randn(tensor.shape, generator=generator)
    return (noise if name.endswith("bias") else 1 + noise).to(dtype)


@torch.no_grad()
def load(
    subject: Subject, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, group: Collective | None = None, **changes: Any
) -> Any:
    """The model with the checkpoint's weights, ready to run. changes: fields of its context."""
    model = build(subject, checkpoint, dtype, group, **changes)
    model.load_weights(iter(read(model, checkpoint, dtype)))
    process_weights_after_loading(model)
    return model.eval().requires_grad_(False)


def list_caches(model: Model, config: ModelConfig, page_size: int, ranks: int = 1) -> list[tuple[int, LayerCache]]:
    """What each layer stores of every token, and the number of its cache group. Raises SkipCheck
    for a model that stores other things."""
    groups = model_geometry(model, kv_geometry(config, ranks, page_size, "float32")).groups
    others = {group.kind for group in groups} - {"tokens", "window"}
    if others:
        raise SkipCheck(f"the suite has no cache of kind {' or '.join(sorted(others))}; compare served tokens with transformers instead")
    return sorted(((number, layer) for number, group in enumerate(groups) for layer in group.layers), key=lambda each: each[1].layer)


class Session:
    """A model and its requests. Unused pages are NaN, and those of a cache group are not those of
    another."""

    def __init__(self, subject: Subject, checkpoint: Checkpoint, model: Model, page_size: int = 16, slots: int = 5, ranks: int = 1) -> None:
        config, context = checkpoint.model_config, getattr(model, "context", None)
        self.subject, self.model, self.page_size = subject, model, page_size
        bare = build_context(subject.setting.device, torch.float32, page_size)
        self.backend: AttentionBackend = make_plugin("attention_backend", "torch_native", bare) if context is None else context.attention
        if getattr(subject.record.capabilities, "expands_mla", False):
            config = replace(config, kind="mha", latent=None, num_kv_heads=config.num_heads)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())  # type: ignore[attr-defined]
        make = partial(torch.full, fill_value=torch.nan, dtype=dtype, device=subject.setting.device)
        caches, count = list_caches(model, config, page_size, ranks), slots * -(-LENGTH // page_size)
        self.groups = {layer.layer: group for group, layer in caches}  # by layer
        ends = [count * number for number in range(1 + max(self.groups.values(), default=0), 0, -1)]  # pages of the first are no others'
        layers = [PlainKVCache(page_size, []) for _ in range(config.num_layers)]  # those of other stages stay empty
        for group, cache in caches:
            layers[cache.layer] = PlainKVCache(page_size, [make((ends[group], page_size, *each.shape)) for each in cache.tensors])
        self.kv = LayeredKVCache(page_size, layers)
        self.computed = [0] * slots
        orders = [end - count + np.random.default_rng(7).permutation(count).astype(np.int32) for end in ends]
        self.pages = [
            Pages(page_size, end, order.astype(np.int32).reshape(slots, -1), np.zeros(0, np.int32), [])
            for end, order in zip(ends, orders, strict=True)
        ]  # by group

    def batch(self, rows: Sequence[tuple[int, Sequence[int]]], num_decodes: int) -> ForwardBatch:
        """The batch of one step, with the backend's plan."""
        batch, *others = (self._make_batch(rows, num_decodes, group) for group in range(len(self.pages)))
        views = {layer: others[group - 1] for layer, group in self.groups.items() if group}
        return replace(batch, views=views or None)

    def _make_batch(self, rows: Sequence[tuple[int, Sequence[int]]], num_decodes: int, group: int) -> ForwardBatch:
        """The batch as layers of one cache group need it."""
        size, places, table = self.page_size, [], self.pages[group].table
        before = tuple(self.computed[slot] for slot, _ in rows)
        for (slot, tokens), start in zip(rows, before, strict=True):
            positions = np.arange(start + len(tokens))
            places.append(table[slot, positions // size].astype(np.int64) * size + positions % size)
        pages = replace(self.pages[group], slots=np.array([slot for slot, _ in rows], dtype=np.int32), places=places)
        layout = Rows(before, tuple(len(tokens) for _, tokens in rows), num_decodes)
        batch = forward_batch(layout, pages, self.kv, self.subject.setting.device)
        ids = torch.tensor([token for _, tokens in rows for token in tokens], device=batch.token_ids.device)
        batch = replace(batch, token_ids=ids, logits_indices=torch.arange(len(ids), device=ids.device), group=group)
        return replace(batch, plan=self.backend.plan(batch))

    @torch.inference_mode()
    def step(self, *rows: tuple[int, Sequence[int]], selected: Sequence[int] | None = None) -> list[torch.Tensor]:
        """rows: (slot, next tokens); rows of one token with a past become decodes, which come
        first. The results of all their tokens by row; with `selected`, of these tokens of the step,
        as one tensor."""
        decodes = [row for row in rows if len(row[1]) == 1 and self.computed[row[0]]]
        ordered = [*decodes, *(row for row in rows if row not in decodes)]
        batch = self.batch(ordered, len(decodes))
        if selected is not None:
            batch.extensions[SelectedTokens] = SelectedTokens(torch.tensor(list(selected), dtype=torch.int64))
        tensors = {name: value for name in ForwardBatch.__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)}
        with unchanged(tensors, "forward"):
            hidden = self.model.forward(batch)
            out = hidden if getattr(self.subject.record.capabilities, "encoder", False) else self.model.compute_logits(hidden)
        for slot, tokens in ordered:
            self.computed[slot] += len(tokens)
        if selected is not None:
            return [out]
        count = sum(len(tokens) for _, tokens in rows)
        assert out.shape[0] == count, f"the result has {out.shape[0]} rows for {count} tokens"
        parts = dict(zip([slot for slot, _ in ordered], out.float().cpu().split([len(tokens) for _, tokens in ordered]), strict=True))
        return [parts[slot] for slot, _ in rows]

    def share(self, leader: int, slot: int, tokens: int) -> None:
        """A prefix hit: the slot's first pages become those of `leader`."""
        count = tokens // self.page_size
        for pages in self.pages:
            pages.table[slot, :count] = pages.table[leader, :count]
        self.computed[slot] = count * self.page_size

    def release(self, slot: int) -> None:
        """The request ends, and the next one gets its slot and pages, which are NaN again."""
        for layer, group in self.groups.items():
            for part in self.kv.layers[layer].parts:
                part[torch.from_numpy(self.pages[group].table[slot].astype(np.int64))] = torch.nan
        self.computed[slot] = 0
