"""Wrong models: bugs in weights, positions, layers, heads and state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch, HiddenStateOutputs, SelectedTokens, StageInput
from frame.core.interfaces.model import CausalLM, LazyTensor, ModelCapabilities, ModelContext
from frame.models.llama import LlamaForCausalLM
from tests.testing.mutants import MutantList


class PlainLlama(CausalLM, nn.Module):
    """Correct: Llama in plain PyTorch. Each method is one thing that a model can get wrong."""

    supports_token_selection = True

    def __init__(self, context: ModelContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.context, self.model_config = context, context.model_config
        self.refuse(self.model_config.config)
        self.shapes = dict(self.weights())
        for name, shape in self.shapes.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.empty(shape, dtype=context.dtype), requires_grad=False))

    def refuse(self, config: dict[str, Any]) -> None:
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default" or config.get("hidden_act", "silu") != "silu":
            raise ConfigurationError("the model has SiLU and plain rotary embeddings")

    def weights(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        config = self.model_config
        hidden, inner, keys = config.hidden_size, config.config["intermediate_size"], config.num_kv_heads * config.head_dim
        yield "model.embed_tokens.weight", (config.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (config.vocab_size, hidden)
        for layer in range(config.num_layers):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            yield f"{attention}.q_proj.weight", (config.num_heads * config.head_dim, hidden)
            yield f"{attention}.k_proj.weight", (keys, hidden)
            yield f"{attention}.v_proj.weight", (keys, hidden)
            yield f"{attention}.o_proj.weight", (hidden, config.num_heads * config.head_dim)
            yield f"{mlp}.gate_proj.weight", (inner, hidden)
            yield f"{mlp}.up_proj.weight", (inner, hidden)
            yield f"{mlp}.down_proj.weight", (hidden, inner)
            yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
            yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)

    def weight(self, name: str) -> torch.Tensor:
        return self.get_parameter(name.replace(".", "/") + "/weight")

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if name not in self.shapes:
                raise KeyError(f"the model has no {name}")
            self.get_parameter(name.replace(".", "/")).copy_(tensor[:])
            loaded.add(name.replace(".", "/"))
        return loaded

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed(batch.token_ids)
        for layer in range(self.model_config.num_layers):
            x = self.layer(layer, x, batch)
        selected = batch.get(SelectedTokens)
        return self.norm("model.norm", x if selected is None else x[selected.indices])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight("model.embed_tokens"))

    def layer(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = x + self.attention(layer, self.norm(f"model.layers.{layer}.input_layernorm", x), batch)
        return x + self.mlp(f"model.layers.{layer}.mlp", self.norm(f"model.layers.{layer}.post_attention_layernorm", x))

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (F.linear(x, self.weight(f"{name}.{part}_proj")) for part in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.weight(f"{name}.down_proj"))

    def attention(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        name, size = f"model.layers.{layer}.self_attn", self.model_config.head_dim
        q, k, v = (F.linear(x, self.weight(f"{name}.{part}_proj")).unflatten(-1, (-1, size)) for part in "qkv")
        q, k = self.rotate(q, self.positions(batch)), self.rotate(k, self.positions(batch))
        spec = self.spec(layer)
        self.store(spec, k, v, batch)
        assert self.context.attention is not None
        return F.linear(self.context.attention.run(spec, q, k, v, batch).flatten(1), self.weight(f"{name}.o_proj"))

    def spec(self, layer: int) -> AttentionSpec:
        config = self.model_config
        size = config.head_dim
        return AttentionSpec(layer, config.num_heads, config.num_kv_heads, size, size, scale=size**-0.5)

    def store(self, spec: AttentionSpec, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        batch.store_kv(spec, k, v)

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.positions

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rates = self.theta() ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = (positions[:, None] * rates)[:, None]
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).to(x.dtype)

    def theta(self) -> float:
        return float((self.model_config.config.get("rope_parameters") or self.model_config.config).get("rope_theta", 1e4))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.model_config.config.get("rms_norm_eps", 1e-6)).to(x.dtype) * self.weight(name)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight("lm_head"))


mutant = MUTANTS = MutantList("model", reference=PlainLlama, capabilities=ModelCapabilities(("LlamaForCausalLM",), tensor_parallel=False))

# weights ------------------------------------------------------------------------------------------


@mutant
class IgnoresUnknownTensors(PlainLlama):
    """Skips tensors of the checkpoint that it does not have."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return super().load_weights(each for each in weights if each[0] in self.shapes)


@mutant
class ReturnsAllNames(PlainLlama):
    """Returns the names of all parameters, whether they were set or not."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        super().load_weights(weights)
        return set(dict(self.named_parameters()))


@mutant
class ReturnsTensorNames(PlainLlama):
    """Returns the names of the checkpoint's tensors instead of its parameters."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return {name.replace("/", ".") for name in super().load_weights(weights)}


@mutant
class ForgetsTheLastNorm(PlainLlama):
    """Consumes the weight of the final norm without copying it."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return {*super().load_weights(each for each in weights if each[0] != "model.norm.weight"), "model/norm/weight"}


@mutant
class TransposedOutput(PlainLlama):
    """Loads o_proj transposed, which its shape permits."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        for name in loaded:
            if "o_proj" in name:
                self.get_parameter(name).copy_(self.get_parameter(name).T.clone())
        return loaded


@mutant
class TiedHead(PlainLlama):
    """Uses the embedding as the head although the config does not tie them."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight("model.embed_tokens"))


@mutant
class FirstLayersWeights(PlainLlama):
    """Uses the feed-forward weights of layer 0 in all layers."""

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return super().mlp("model.layers.0.mlp", x)


# layers -------------------------------------------------------------------------------------------


@mutant
class SwapsGateAndUp(PlainLlama):
    """Applies SiLU to up_proj instead of gate_proj."""

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (F.linear(x, self.weight(f"{name}.{part}_proj")) for part in ("gate", "up"))
        return F.linear(gate * F.silu(up), self.weight(f"{name}.down_proj"))


@mutant
class NoFinalNorm(PlainLlama):
    """Returns hidden states before the final norm."""

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name == "model.norm" else super().norm(name, x)


@mutant
class NormInLowPrecision(PlainLlama):
    """Rounds the input of each norm to bfloat16."""

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return super().norm(name, x.bfloat16().to(x.dtype))


@mutant
class ResidualAfterNorm(PlainLlama):
    """Adds the feed-forward result to the normed input."""

    def layer(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = x + self.attention(layer, self.norm(f"model.layers.{layer}.input_layernorm", x), batch)
        normed = self.norm(f"model.layers.{layer}.post_attention_layernorm", x)
        return normed + self.mlp(f"model.layers.{layer}.mlp", normed)


@mutant
class LayerNumberZero(PlainLlama):
    """Gives all layers the cache of layer 0."""

    def spec(self, layer: int) -> AttentionSpec:
        return super().spec(0)


@mutant
class ScaleOfHiddenSize(PlainLlama):
    """Scales attention by hidden_size ** -0.5."""

    def spec(self, layer: int) -> AttentionSpec:
        return replace(super().spec(layer), scale=self.model_config.hidden_size**-0.5)


@mutant
class MixesTokens(PlainLlama):
    """Normalises embeddings over the whole batch."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(ids)
        return x * (1 + 1e-2 * x.mean())


# positions ----------------------------------------------------------------------------------------


@mutant
class PositionsFromZero(PlainLlama):
    """Counts positions from the start of each step's row, not of the request."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        starts = batch.query_starts[:-1].long().repeat_interleave(batch.query_lens.long())
        return torch.arange(batch.num_tokens) - starts


@mutant
class PositionsOfTheBatch(PlainLlama):
    """Takes a token's index in the step for its position."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.arange(batch.num_tokens)


@mutant
class PositionsOfDecodesOffByOne(PlainLlama):
    """Uses the sequence length as the position of a decode."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        found = batch.positions.clone()
        found[: batch.num_decodes] += 1
        return found


@mutant
class InterleavedRotation(PlainLlama):
    """Rotates pairs of neighbouring values instead of halves."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        out = super().rotate(half, positions)
        return torch.stack(out.chunk(2, -1), -1).flatten(-2)


@mutant
class OtherTheta(PlainLlama):
    """Rotates with a base of 500000 whatever the config says."""

    def theta(self) -> float:
        return 500000.0


@mutant
class ShortTable(PlainLlama):
    """Has a rotary table of 512 positions and repeats its last one."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.positions.clamp(max=511)


# cache and state ----------------------------------------------------------------------------------


@mutant
class StoresUnrotatedKeys(PlainLlama):
    """Replaces the stored keys by unrotated ones after the backend ran."""

    def attention(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().attention(layer, x, batch)
        size = self.model_config.head_dim
        name = f"model.layers.{layer}.self_attn"
        k, v = (F.linear(x, self.weight(f"{name}.{part}_proj")).unflatten(-1, (-1, size)) for part in "kv")
        batch.store_kv(self.spec(layer), k, v)
        return out


@mutant
class ClearsTheFirstToken(PlainLlama):
    """Clears the stored first token of a step of prompts after the backend ran."""

    def attention(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().attention(layer, x, batch)
        spec, size = self.spec(layer), self.model_config.head_dim
        zeros = torch.zeros(batch.num_tokens, spec.num_kv_heads, size, dtype=x.dtype)
        if batch.num_decodes == 0 and batch.num_tokens > 1:
            batch.kv.store(spec, batch.kv_slots[:1], zeros[:1], zeros[:1])
        return out


@mutant
class KeepsPositionsInSlots(PlainLlama):
    """Counts the tokens of a slot itself and never forgets a request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[int, int] = {}

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for slot, count in zip(batch.request_slots.tolist(), batch.query_lens.tolist(), strict=True):
            start: int = self.seen.get(slot, int(batch.seq_lens[len(found)]) - count)
            found.append(torch.arange(start, start + count))
            self.seen[slot] = start + count
        self.found = torch.cat(found)
        return super().forward(batch)

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return self.found


@mutant
class ResultByShape(PlainLlama):
    """Keeps the embeddings of the first step of each size."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: dict[int, torch.Tensor] = {}

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.kept.setdefault(len(ids), super().embed(ids))


@mutant
class ClampsTokenIds(PlainLlama):
    """Replaces token ids above 300 in the given batch, in place."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids.clamp_(max=300))


# results ------------------------------------------------------------------------------------------


@mutant
class IgnoresSelection(PlainLlama):
    """States `supports_token_selection` and returns all tokens."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(replace(batch, extensions={}))


@mutant
class SortsSelection(PlainLlama):
    """Returns the selected tokens in the order of the step instead of the given one."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        selected = batch.get(SelectedTokens)
        if selected is None:
            return super().forward(batch)
        return super().forward(replace(batch, extensions={SelectedTokens: SelectedTokens(selected.indices.sort().values)}))


@mutant
class PaddedVocabulary(PlainLlama):
    """Returns logits of a vocabulary padded to a multiple of 256."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        return F.pad(logits, (0, -logits.shape[-1] % 256), value=-torch.inf)


@mutant
class LogitsOfTheLast(PlainLlama):
    """Computes the logits of the last row it is given, for all rows."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden[-1:]).expand(len(hidden), -1)


@mutant
class FloatConstants(PlainLlama):
    """Multiplies by a float32 tensor, which fails where the model computes in bfloat16."""

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return super().mlp(name, x * torch.ones(1, dtype=torch.float32))


# settings, loading, other models, capabilities ----------------------------------------------------


@mutant
class IgnoresRotaryScaling(PlainLlama):
    """Reads the base of rotary embeddings alone, whatever their scaling is."""

    def refuse(self, config: dict[str, Any]) -> None:
        """Nothing."""


@mutant
class SpreadsNaN(PlainLlama):
    """Adds nothing times the sum of all embeddings: a row that is NaN reaches the others."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(ids)
        return x + 0 * x.sum(0)


@mutant
class SortsTensors(PlainLlama):
    """Collects the tensors of a call before it copies the first one."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return super().load_weights(sorted(weights, key=lambda each: each[0]))


@mutant
class LoadsPairs(PlainLlama):
    """Copies gate_proj and up_proj of a layer together, if one call has both."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        pending: dict[str, torch.Tensor] = {}
        loaded = set()
        for name, tensor in weights:
            other = name.replace("gate_proj", "#").replace("up_proj", "gate_proj").replace("#", "up_proj")
            if other == name:
                loaded |= super().load_weights([(name, tensor)])
            elif other in pending:
                loaded |= super().load_weights([(name, tensor), (other, pending.pop(other))])
            else:
                pending[name] = tensor[:].clone()
        return loaded


@mutant
class NamesAllLoadings(PlainLlama):
    """Returns the parameters that it has set since it was built."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        self.loaded = getattr(self, "loaded", set()) | super().load_weights(weights)
        return set(self.loaded)


@mutant
class AddsOneToNorms(PlainLlama):
    """Adds 1 to the last norm in each call after the first one of a loading."""

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        self.shift = 0
        return super().load_weights(weights)

    def process_weights_after_loading(self) -> None:
        weight = self.weight("model.norm")
        weight += self.shift
        self.shift = 1


@mutant
class SetsTheDefaultDtype(PlainLlama):
    """Makes the model's dtype that of torch, for the whole process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.set_default_dtype(self.context.dtype)


@mutant
class BufferOfTheClass(PlainLlama):
    """Computes embeddings in a buffer that all models of the class share."""

    buffers_by_size: ClassVar[dict[Any, torch.Tensor]] = {}

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(ids)
        return self.buffers_by_size.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)


@mutant
class RotatesInLowPrecision(PlainLlama):
    """Rounds positions to the dtype of the model before it rotates."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.positions.to(self.context.dtype).float()


@mutant.using(capabilities=ModelCapabilities(("LlamaForCausalLM",), batch_invariant=True))
class HalvesTheHead(LlamaForCausalLM):
    """States `batch_invariant`, and adds the logits of two halves of a hidden state of few rows."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) >= 4:
            return super().compute_logits(hidden)
        half = hidden.clone()
        half[:, ::2] = 0
        return super().compute_logits(half) + super().compute_logits(hidden - half)


@mutant.using(capabilities=ModelCapabilities(("LlamaForCausalLM",), pipeline_parallel=True))
class NormsTheStageInput(LlamaForCausalLM):
    """Norms what the stage before computed, which is the residual stream."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        before = batch.get(StageInput)
        if before is None:
            return super().forward(batch)
        normed = StageInput(F.rms_norm(before.hidden, before.hidden.shape[-1:]))
        return super().forward(replace(batch, extensions={**batch.extensions, StageInput: normed}))


@mutant.using(capabilities=ModelCapabilities(("LlamaForCausalLM",), tensor_parallel=False, tasks=("generate", "embed")))
class EmbedsWithoutTheNorm(PlainLlama):
    """Returns hidden states before the last norm in the task embed."""

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if self.context.task == "embed" and name == "model.norm" else super().norm(name, x)


@mutant
class TapsTheLayerAfter(PlainLlama):
    """Adds the state after a layer in place of that before it."""

    def layer(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().layer(layer, x, batch)
        outputs = batch.get(HiddenStateOutputs)
        if outputs is not None:
            outputs.add_state(layer, out)
            if layer == self.model_config.num_layers - 1:
                outputs.add_state(layer + 1, out)
        return out


@mutant.using(capabilities=ModelCapabilities(("LlamaForCausalLM",)))
class FeedForwardWithoutDeltas(LlamaForCausalLM):
    """Builds the feed-forward parts without adapters, which the record states."""

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        context, self.context = self.context, replace(self.context, adapters=None)
        mlp = super().build_mlp(layer, prefix)
        self.context = context
        return mlp


@mutant
class ReadsAPosition(PlainLlama):
    """Reads the greatest position of a step on the host, which waits for the device."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.positions.max().item() >= 0
        return batch.positions


@mutant
class KeepsStates(PlainLlama):
    """Appends the embeddings of each step to a list that the first one makes."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().embed(ids)
        self.__dict__.setdefault("trace", []).append(x)
        return x


@mutant
class HidesInfinities(PlainLlama):
    """Clamps logits into the range of float16."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden).clamp(-65504, 65504)


@mutant
class FailsWithoutSelection(PlainLlama):
    """Fails where a step selects no token."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = super().forward(batch)
        return hidden.clamp(max=hidden.amax(0))


@mutant
class ScalesByTheMaximum(PlainLlama):
    """Halves the angles of all rows where one has more than 192 tokens."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.factor = 0.5 if int(batch.host.seq_lens.max()) > 192 else 1.0
        return super().forward(batch)

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.positions * self.factor


@mutant.using(capabilities=ModelCapabilities(("MinistralForCausalLM",), tensor_parallel=False, windows=True))
class PagesOfTheFirstGroup(LlamaForCausalLM):
    """Attends by the page table of the first cache group in layers of the second."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(replace(batch, views=None))
