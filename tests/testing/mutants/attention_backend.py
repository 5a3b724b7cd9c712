"""Wrong attention backends: bugs in masks, numbers and heads, and those of `attention_state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from tests.testing.mutants.attention_state import MUTANTS
from tests.testing.plain_attention import PlainAttention, Row

__all__ = ["MUTANTS"]

mutant = MUTANTS

# masks --------------------------------------------------------------------------------------------


@mutant
class SeesTheNextToken(PlainAttention):
    """Lets a query see the position after its own."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, replace(row, start=row.start + 1), q, k)


@mutant
class SeesOtherBranches(PlainAttention):
    """Lets a token of a tree see all tokens of its row before it."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, replace(row, sees=None), q, k)


@mutant
class BlindToItself(PlainAttention):
    """Hides a query's own position, except at position 0."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        at, keys = torch.arange(q.shape[0])[:, None] + row.start, torch.arange(k.shape[0])[None]
        own = (keys == at) & (at > 0) if spec.causal and spec.sliding_window is None else keys < 0
        return super().hidden(spec, row, q, k) | own


@mutant
class ExtendsStartAtZero(PlainAttention):
    """Masks an extend as if it had no cached prefix."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, row if row.is_decode else replace(row, start=0), q, k)


@mutant
class IgnoresPrefix(PlainAttention):
    """Computes an extend over this step's tokens alone."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        before = torch.arange(k.shape[0])[None] < row.start
        return super().hidden(spec, row, q, k) | (before & (not row.is_decode))


@mutant
class IgnoresSelection(PlainAttention):
    """Attends to all keys where a layer selects some."""

    def choose(self, batch: ForwardBatch, row: Row) -> torch.Tensor | None:
        return None


@mutant
class SelectsForTheRow(PlainAttention):
    """Lets every token of a row attend to what its first token selects, and to itself."""

    def choose(self, batch: ForwardBatch, row: Row) -> torch.Tensor | None:
        chosen = super().choose(batch, row)
        if chosen is None:
            return None
        own = torch.arange(chosen.shape[1])[None] == torch.arange(chosen.shape[0])[:, None] + row.start
        return chosen[:1] | own


def with_spec(change: Callable[[AttentionSpec, Row], AttentionSpec]) -> Any:
    """The method `hidden` for a layer that is changed first."""
    return lambda self, spec, row, q, k: PlainAttention.hidden(self, change(spec, row), row, q, k)


def widen_window(spec: AttentionSpec, row: Row) -> AttentionSpec:
    return spec if spec.sliding_window is None else replace(spec, sliding_window=spec.sliding_window + 1)


mutant.each(
    PlainAttention,
    "hidden",
    (
        "IgnoresWindow",
        "Computes full attention in layers with a sliding window.",
        with_spec(lambda spec, row: replace(spec, sliding_window=None)),
    ),
    ("WindowOffByOne", "Does not count the query's own position in the window.", with_spec(widen_window)),
    (
        "WindowInDecodesOnly",
        "Applies the sliding window to decodes alone.",
        with_spec(lambda spec, row: spec if row.is_decode else replace(spec, sliding_window=None)),
    ),
    (
        "WindowForChunks",
        "Computes a sliding window in layers that attend in chunks.",
        with_spec(lambda spec, row: replace(spec, chunked=False)),
    ),
)


@mutant
class ChunkOfTheFirstQuery(PlainAttention):
    """Hides the keys before the chunk of a row's first query from all its queries."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(replace(spec, sliding_window=None), row, q, k)
        if not spec.chunked or spec.sliding_window is None:
            return super().hidden(spec, row, q, k)
        return hidden | (torch.arange(k.shape[0]) < row.start // spec.sliding_window * spec.sliding_window)


@mutant
class CausalEncoder(PlainAttention):
    """Masks the layers of an encoder as a decoder's."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(replace(spec, causal=True), row, q, k)


@mutant
class SplitKeysForgotten(PlainAttention):
    """Reads at most 256 keys of a decode, as if the other splits were never merged."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        late = torch.arange(k.shape[0])[None] < max(0, k.shape[0] - 256)
        return super().hidden(spec, row, q, k) | (late & row.is_decode)


@mutant
class LongRowsCut(PlainAttention):
    """Has room for 2048 keys in a row and leaves out the oldest ones of longer rows."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, row, q, k) | (torch.arange(k.shape[0])[None] < k.shape[0] - 2048)


@mutant
class ManyRowsCut(PlainAttention):
    """Launches 64 rows and leaves the results of further ones at zero."""

    def rows(self, batch: ForwardBatch) -> list[Row]:
        return super().rows(batch)[:64]

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        return torch.cat((out[: self.rows(batch)[-1].tokens.stop], torch.zeros_like(out[self.rows(batch)[-1].tokens.stop :])))


# numbers ------------------------------------------------------------------------------------------


@mutant
class DefaultScale(PlainAttention):
    """Scales by head_dim ** -0.5 whatever the layer says."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(replace(spec, scale=spec.head_dim**-0.5), products)


@mutant
class NoMaximum(PlainAttention):
    """Does not subtract the maximum before exp, which overflows for large scores."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        weights = torch.exp(scores)
        total = weights.sum(-1, keepdim=True)
        return weights / (total if spec.sinks is None else total + torch.exp(spec.sinks.float())[:, None, None])


@mutant
class HalfScores(PlainAttention):
    """Limits the products of queries and keys to 65504, the maximum of float16."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(spec, products.clamp(-65504, 65504))


@mutant
class LowMask(PlainAttention):
    """Hides keys with a score of -50 instead of minus infinity."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(spec, scores.clamp(min=-50))


@mutant
class IgnoresSoftCap(PlainAttention):
    """Leaves out the soft cap."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(replace(spec, soft_cap=None), products)


@mutant
class SoftCapAfterMask(PlainAttention):
    """Caps the scores after the mask, so that hidden keys have the score -cap."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(replace(spec, soft_cap=None), products)

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(spec, scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap))


@mutant
class IgnoresSinks(PlainAttention):
    """Leaves out the attention sinks."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(replace(spec, sinks=None), scores)


@mutant
class OneSink(PlainAttention):
    """Uses the sink of the first head for all heads."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        sinks = None if spec.sinks is None else spec.sinks[:1].expand_as(spec.sinks)
        return super().weigh(replace(spec, sinks=sinks), scores)


@mutant
class IgnoresCacheScale(PlainAttention):
    """Reads an fp8 cache without its scale."""

    def gather(self, part: torch.Tensor, slots: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        return super().gather(part, slots, 1.0)


@mutant
class SwapsCacheScales(PlainAttention):
    """Scales the keys of an fp8 cache as values, and the values as keys."""

    def read(self, spec: AttentionSpec, batch: ForwardBatch, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(replace(spec, k_scale=spec.v_scale, v_scale=spec.k_scale), batch, row)


# heads --------------------------------------------------------------------------------------------


@mutant
class InterleavedHeads(PlainAttention):
    """Maps query head h to KV head h modulo the number of KV heads."""

    def share(self, spec: AttentionSpec, part: torch.Tensor) -> torch.Tensor:
        return part.repeat(1, spec.num_heads // part.shape[1], 1)


@mutant
class FirstKeyHead(PlainAttention):
    """Reads the first KV head for all query heads."""

    def share(self, spec: AttentionSpec, part: torch.Tensor) -> torch.Tensor:
        return part[:, :1].expand(-1, spec.num_heads, -1) if part.shape[1] < spec.num_heads else part


@mutant
class DenseQueries(PlainAttention):
    """Reads queries as if the tokens lay one after the other in memory."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        flat = torch.as_strided(q, q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1), q.storage_offset())
        return super().run(spec, flat, *rest)


@mutant
class ForgetsRotatedPart(PlainAttention):
    """Leaves out the rotated part of the queries in latent attention."""

    def run_mla(self, layer: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().run_mla(layer, q_nope, torch.zeros_like(q_rope), *rest)
