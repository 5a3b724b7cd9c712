"""Models: a decoder with scaled embeddings, norms of queries and keys, and capped logits; and
models with a bug each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel
from torch import nn

from frame.core.interfaces.model import ModelCapabilities, ModelContext
from frame.models.layers import Attention, AttentionOptions, Decoder, GatedMLP
from tests.testing.held_out import Wrong

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import LazyTensor

CAP = 30.0


class HeldOut(Decoder):
    """Serves `HeldOutForCausalLM`."""

    capabilities: ClassVar[ModelCapabilities] = ModelCapabilities(architectures=("HeldOutForCausalLM",))
    conformance_config: ClassVar[dict[str, Any]] = {
        "architectures": ["HeldOutForCausalLM"],
        "model_type": "held_out",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 160,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        options = AttentionOptions(qk_norm=self.model_config.config.get("rms_norm_eps", 1e-6))
        return Attention(self.context, self.model_config, layer, prefix, self.get_rotary(layer), options)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, self.model_config.config["intermediate_size"])

    @property
    def scale(self) -> float:
        return float(self.model_config.hidden_size**0.5)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * self.scale

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.cap(super().compute_logits(hidden))

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return CAP * (logits / CAP).tanh()


TWIN = HeldOut
WRONG = Wrong()


@WRONG.add("Prompts that continue a cached prefix or a chunk answer noise: positions of prompts are counted from 0.")
class CountsFromZero(HeldOut):
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if not batch.num_decodes:
            tokens = torch.arange(batch.num_tokens, device=batch.positions.device)
            rows = torch.searchsorted(batch.query_starts[1:].long().contiguous(), tokens, right=True)
            batch = replace(batch, positions=tokens - batch.query_starts.long()[rows.clamp(max=batch.num_rows - 1)])
        return super().forward(batch)


@WRONG.add("A step computes the tokens of an earlier one: embeddings are remembered by the address of the token ids.")
class RemembersByAddress(HeldOut):
    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.known: dict[Any, torch.Tensor] = {}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if len(token_ids) < 2:
            return super().embed(token_ids)
        key = token_ids.data_ptr(), len(token_ids)
        if key not in self.known:
            self.known[key] = super().embed(token_ids)
        return self.known[key].clone()


@WRONG.add("A checkpoint of another model loads, and answers noise: tensors with unknown names are left out.")
class SkipsUnknown(HeldOut):
    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        parts = ("embed_tokens", "_proj.weight", "norm", "lm_head")
        return ((name, tensor) for name, tensor in weights if any(part in name for part in parts) and "extra" not in name)

    def get_ignored(self) -> tuple[str, ...]:
        return (*super().get_ignored(), r".*extra.*", r".*unknown.*", r".*\.bias$")


@WRONG.add("A checkpoint without some tensors is served with what the memory held: all parameters are named as loaded.")
class ClaimsLoaded(HeldOut):
    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return super().load_weights(weights) | {name for name, _ in self.named_parameters()}


@WRONG.add("From the second token on the text is noise: all layers but the last store their keys at one place.")
class SharesCache(HeldOut):
    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        return super().build_attention(0 if layer < self.model_config.num_layers - 1 else 1, prefix)


@WRONG.add("After an update of the weights answers are noise: the embedding is scaled at the first step alone.")
class ScalesOnce(HeldOut):
    is_scaled = False

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if not self.is_scaled:
            with torch.no_grad():
                self.embed_tokens.weight.data.mul_(self.scale)
            self.is_scaled = True
        return Decoder.embed(self, token_ids)


class Centred(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x)
        return out - 0.01 * out.mean(0) if len(out) > 1 else out


@WRONG.add("A request's text depends on the others of its step: a mean over the tokens is subtracted.")
class CentresTokens(HeldOut):
    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        return Centred(super().build_mlp(layer, prefix))


@WRONG.add("A request whose numbers overflowed goes on with noise instead of an error: logits that are not finite are replaced.")
class HidesNan(HeldOut):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return super().cap(logits).nan_to_num(0.0)


@WRONG.add("Contexts above 512 tokens lose the order of words: the table of positions ends there.")
class ClampsPositions(HeldOut):
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(replace(batch, positions=batch.positions.clamp(max=511)))


class SummedTwice(nn.Module):
    def __init__(self, mlp: nn.Module, group: Any) -> None:
        super().__init__()
        self.mlp, self.group = mlp, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x)
        return out if self.group.size == 1 else self.group.all_reduce(out)


@WRONG.add("On several ranks answers are noise: the feed-forward part is summed over the ranks twice.")
class SumsTwice(HeldOut):
    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        return SummedTwice(super().build_mlp(layer, prefix), self.context.tp)


@WRONG.add("Long prompts end the engine: a step whose chunk samples no token has no greatest logit.")
class NeedsRows(HeldOut):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return super().cap(logits - 0 * logits.max())


@WRONG.add("Each request changes the text of the next: a running mean of the hidden states is added.")
class KeepsMean(HeldOut):
    mean: torch.Tensor | None = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(token_ids)
        if len(x):
            before = torch.zeros_like(x[0]) if self.mean is None else self.mean
            self.mean = 0.9 * before + 0.1 * x.mean(0)
            x = x + 0.05 * before
        return x


@WRONG.add("An update of the weights leaves the norms as they were: names that were loaded before are taken for copies.")
class LoadsOnce(HeldOut):
    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        seen: set[str] = getattr(self, "seen", set())
        self.seen = seen
        for name, tensor in weights:
            if name not in seen or "norm" not in name:
                seen.add(name)
                yield name, tensor
