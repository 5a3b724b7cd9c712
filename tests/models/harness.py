"""Runs a model step by step with naive parts: a page pool in plain tensors, attention row by row in
float32, batches built by hand.

The oracle of the model tests: slow, simple, and independent of the real pool, batch builder and
backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.checkpoint.model_config import read_model_config
from frame.checkpoint.remote_code import load_class
from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch, HostView, SequenceStates
from frame.core.interfaces.build import BuildContext, Collective, Limits
from frame.core.interfaces.cache_groups import LayerCache
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.media import MediaSpans
from frame.core.interfaces.model import CausalLM, LazyTensor, ModelConfig, ModelContext
from frame.core.interfaces.step_media import MediaSizes
from frame.core.interfaces.weight_format import FormatContext
from frame.core.kv_cache.geometry import kv_geometry
from frame.forward.declared_caches import model_geometry
from frame.interfaces.weights import WeightSourceContext
from frame.loading.loader import Checkpoint, load_model
from frame.loading.weight_reader import ReadAhead, read_weights
from frame.testing.gemm_kernels import load_own_plugins, make_gemm_kernels


class NaivePool:
    """Tensors of pages for each layer's widths; a layer's `LayerCache` of kind `snapshot` gets one
    state a slot. Unwritten entries of pages are large, so that reading one shows."""

    def __init__(self, layers: Sequence[LayerCache], pages: int, page_size: int, slots: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        self.data: dict[int, tuple[torch.Tensor, ...]] = {}
        for layer in layers:
            is_state = layer.kind == "snapshot"
            first, value = ((slots + 1,), 0.0) if is_state else ((pages, page_size), 1e4)
            self.data[layer.layer] = tuple(
                torch.full((*first, *tensor.shape), value, dtype=tensor.dtype or dtype) for tensor in layer.tensors
            )

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        for cache, new in zip(self.data[spec.layer], tensors, strict=True):
            cache.flatten(0, 1)[slots] = new

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.data[layer]


class NaiveAttention(AttentionBackend):
    """Attention of each row separately, in float32, by the definition."""

    capabilities = AttentionCapabilities(
        devices=("cpu",), kinds=("mha", "mla"), latent_heads=True, sliding_window=True, chunked=True, soft_cap=True, spans=True
    )

    def plan(self, batch: ForwardBatch) -> None:
        return None

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        keys, values = batch.kv.layer(spec.layer)
        spans = batch.get(MediaSpans) if spec.spans else None
        ends = torch.zeros(len(q), dtype=torch.int32) if spans is None else spans.ends
        rows = [self._row(spec, q[span], keys[places], values[places], ends[span]) for span, places in self._rows(batch)]
        return torch.cat(rows).to(q.dtype)

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        (cache,) = batch.kv.layer(layer.spec.layer)
        rank = layer.kv_lora_rank
        outs = []
        for index, (span, places) in enumerate(self._rows(batch)):
            past = cache[places]
            if index % 2:  # alternates between both forms
                k_nope, v = layer.expand(past[:, :rank])
                k = torch.cat((k_nope, past[:, None, rank:].expand(-1, k_nope.shape[1], -1)), -1)
                outs.append(self._row(layer.spec, torch.cat((q_nope[span], q_rope[span]), -1), k, v))
            else:
                q = torch.cat((layer.absorb(q_nope[span]), q_rope[span]), -1)
                outs.append(layer.unabsorb(self._row(layer.spec, q, past[:, None], past[:, None, :rank]).to(q.dtype)))
        return torch.cat(outs).to(q_nope.dtype)

    def _rows(self, batch: ForwardBatch) -> list[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
        rows, size = [], batch.kv.page_size
        for row in range(batch.num_rows):
            start, stop = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
            positions = torch.arange(int(batch.seq_lens[row]))
            pages = batch.page_table[batch.request_slots[row]].long()[positions // size]
            rows.append((slice(start, stop), (pages, positions % size)))
        return rows

    def _row(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        here = torch.arange(len(k) - len(q), len(k))[:, None]
        there = torch.arange(len(k))[None]
        hidden = there > (here if ends is None else torch.maximum(here, ends[:, None] - 1))
        if spec.sliding_window:
            window = spec.sliding_window
            hidden |= there < here // window * window if spec.chunked else there <= here - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@dataclass
class Session:
    """A model and its requests: `step` computes more tokens of some of them and returns the logits
    of all these tokens."""

    model: CausalLM
    model_config: ModelConfig
    page_size: int = 4
    slots: int = 8
    max_tokens: int = 256
    computed: dict[int, int] = field(default_factory=dict)
    make_attention: Callable[[BuildContext], AttentionBackend] = NaiveAttention
    backend: AttentionBackend | None = None

    def __post_init__(self) -> None:
        pages = -(-self.max_tokens // self.page_size)
        order = torch.randperm(self.slots * pages, generator=torch.Generator().manual_seed(7)) + 1  # page 0 stays unused
        self.page_table = order.view(self.slots, pages).to(torch.int32)
        self.pool = NaivePool(self.list_caches(), self.slots * pages + 1, self.page_size, self.slots, self._dtype())

    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())  # type: ignore[attr-defined]

    def list_caches(self) -> list[LayerCache]:
        """What the layers store: as the modules declare, or alike in all layers."""
        ranks = self.backend.context.tp.size if self.backend is not None else 1
        uniform = kv_geometry(self.model_config, ranks, self.page_size, "float32")
        declared = model_geometry(self.model, uniform)  # type: ignore[arg-type]
        return [layer for group in declared.groups for layer in group.layers]

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, Sequence[int]]], extensions: Mapping[type, Any] | None = None) -> list[torch.Tensor]:
        """rows: (slot, next tokens). Rows with one token and a past are decodes and come first.
        extensions: further ones of the batch. Returns logits [tokens, vocab] per row."""
        decodes = [row for row in rows if len(row[1]) == 1 and self.computed.get(row[0], 0)]
        ordered = decodes + [row for row in rows if row not in decodes]
        batch = self.batch(ordered, len(decodes), extensions or {})
        logits = self.model.compute_logits(self.model.forward(batch))
        for slot, tokens in ordered:
            self.computed[slot] = self.computed.get(slot, 0) + len(tokens)
        parts = dict(zip([slot for slot, _ in ordered], logits.split([len(tokens) for _, tokens in ordered]), strict=True))
        return [parts[slot] for slot, _ in rows]

    def batch(
        self, rows: Sequence[tuple[int, Sequence[int]]], num_decodes: int, extensions: Mapping[type, Any] | None = None
    ) -> ForwardBatch:
        starts = [self.computed.get(slot, 0) for slot, _ in rows]
        lens = [len(tokens) for _, tokens in rows]
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, lens, strict=True)])
        owners = torch.tensor([slot for slot, _ in rows]).repeat_interleave(torch.tensor(lens))
        pages = self.page_table[owners, positions // self.page_size].long()
        seq_lens = np.array([start + count for start, count in zip(starts, lens, strict=True)], np.int32)
        host = HostView(np.array([slot for slot, _ in rows], np.int32), np.array(lens, np.int32), seq_lens, self.page_table.numpy())
        fields: dict[str, Any] = {
            "num_decodes": num_decodes,
            "token_ids": torch.tensor([token for _, tokens in rows for token in tokens]),
            "positions": positions,
            "kv_slots": pages * self.page_size + positions % self.page_size,
            "request_slots": torch.from_numpy(host.slots).long(),
            "seq_lens": torch.from_numpy(seq_lens),
            "query_lens": torch.from_numpy(host.query_lens),
            "query_starts": torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32),
            "page_table": self.page_table,
            "logits_indices": torch.arange(len(positions)),
            "kv": self.pool,
            "host": host,
            "extensions": {SequenceStates: SequenceStates(torch.from_numpy(host.slots).long() + 1), **(extensions or {})},
        }
        assert self.backend is not None
        plan = self.backend.plan(ForwardBatch(**fields))
        return ForwardBatch(**fields, plan=plan)


def build_context(
    model_config: ModelConfig, tp: Collective | None = None, dtype: torch.dtype = torch.float32, **names: Any
) -> BuildContext:
    """A context with naive attention and in-tree parts by name. `names` may select another
    attention (class or plugin name), quantization method, and so on."""
    registry = load_own_plugins()
    tp = tp or LocalGroup()
    limits = Limits(8, 512, names.get("max_context", 512), 4)
    base: dict[str, Any] = {"device": torch.device("cpu"), "dtype": dtype, "tp": tp, "limits": limits, "kv_dtype": names.get("kv_dtype")}
    base["deterministic"] = names.get("deterministic", False)
    if "load_code" in names:
        base["load_code"] = names["load_code"]
    bare = BuildContext(**base)

    attention = names.get("attention", NaiveAttention)

    def part(kind: str, name: str) -> Any:
        return registry.load(registry.get(kind, name))

    return BuildContext(
        **base,
        attention=(part("attention_backend", attention) if isinstance(attention, str) else attention)(bare),
        weight_format=part("weight_format", names.get("quantization", "none"))(
            FormatContext(dtype, model_config.config.get("quantization_config"), names.get("folder")), names.get("format_options")
        ),
        gemm_kernels=make_gemm_kernels(bare, names.get("gemm_kernel")),
        moe_runner=names.get("moe_runner", part("moe_runner", "torch_native"))(bare) if model_config.num_experts else None,
        moe_dispatcher=part("moe_dispatcher", "all_reduce")(bare) if model_config.num_experts else None,
        adapters=names.get("adapters"),
        media=MediaSizes(256, 4096) if names.get("encoders", False) else None,
    )


def checkpoint_of(folder: Path, source: str = "safetensors") -> Checkpoint:
    """The checkpoint of a folder, read by an in-tree weight source."""
    registry = load_own_plugins()
    return Checkpoint(folder, registry.load(registry.get("weight_source", source)))


def weights_of(folder: Path, ahead: ReadAhead | None = None) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of a folder of safetensors files."""
    source = checkpoint_of(folder).open_source(WeightSourceContext(folder, torch.device("cpu"), torch.float32))
    return read_weights(source, ahead=ahead)


def open_session(
    folder: Path, tp: Collective | None = None, dtype: torch.dtype = torch.float32, model: str | None = None, **names: Any
) -> Session:
    """Load the checkpoint with the in-tree model for its architecture (or the plugin `model`)."""
    model_config = read_model_config(folder)
    registry = load_own_plugins()
    if model is None:
        candidates = [
            record for record in registry.records("model") if model_config.architecture in (record.capabilities.architectures or ())
        ]
        record = candidates[0]
    else:
        record = registry.get("model", model)
    if names.pop("trust_remote_code", False):
        names["load_code"] = partial(load_class, folder)
    context = build_context(model_config, tp, dtype, folder=folder, **names)
    made = partial(registry.load(record), ModelContext.from_build(context, model_config))
    built, _ = load_model(made, context, checkpoint_of(folder, names.get("load_format", "safetensors")))
    sizes = {"page_size": names.get("page_size", 4), "max_tokens": names.get("max_tokens", 256)}
    return Session(built, model_config, backend=context.attention, **sizes)
