"""Models with random adapters in some rows, against the same adapters merged into the weights:
prompts, chunks and decodes in one batch. Rows without an adapter do not change by a bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.models.layers.encoder import Encoder
from frame.plugins.moe_runners.torch_native import TorchNative
from tests.models.harness import NaiveAttention, Session, open_session
from tests.models.layers.random_adapters import RandomAdapters, follow_rows
from tests.models.ranks import on_ranks
from tests.models.test_logits import prompt

ARCHITECTURES = [
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
    "GptOssForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "MixtralForCausalLM",
    "Llama4ForCausalLM", "Phi3ForCausalLM", "CohereForCausalLM", "Olmo2ForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM",
    "KimiLinearForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM",
]  # fmt: skip
A, B, C = prompt(30, 1), prompt(25, 2), prompt(21, 3)
PLAN = [
    [(0, A[:20]), (2, C[:9])],
    [(0, A[20:21]), (1, B[:7]), (2, C[9:12])],
    [(1, B[7:24]), (0, A[21:22]), (2, C[12:13])],
    [(2, C[13:14]), (1, B[24:25]), (0, A[22:])],
    [(2, C[14:])],
]
PLACES = {0: 0, 1: 1, 2: -1}


def run(session: Session) -> dict[int, torch.Tensor]:
    """The logits of each slot."""
    got: dict[int, list[torch.Tensor]] = {}
    for rows in PLAN:
        for (slot, _), logits in zip(rows, session.step(rows), strict=True):
            got.setdefault(slot, []).append(logits)
    return {slot: torch.cat(pieces) for slot, pieces in got.items()}


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, exact: bool = True, **names: Any) -> RandomAdapters:
    """`exact`: rows that have no adapter do not change by a bit."""
    adapters = RandomAdapters()
    got, base = (run(follow_rows(open_session(folder, adapters=made, **names), made, places)) for made, places in (
        (adapters, PLACES), (RandomAdapters(), dict.fromkeys(PLACES, -1)),
    ))  # fmt: skip
    plain = run(open_session(folder, **names))
    for slot in PLACES:
        torch.testing.assert_close(base[slot], plain[slot], **({"atol": 0, "rtol": 0} if exact else {}))
    if any(".experts." in name for name in adapters.made):  # an expert's product of a row depends on its other rows
        torch.testing.assert_close(got[2], plain[2], atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(got[2], plain[2])
    for slot in (0, 1):
        with monkeypatch.context() as patch:
            adapters.merge_loads(PLACES[slot], patch)
            merged = run(open_session(folder, **names))
        assert ((merged[slot] - plain[slot]).abs() > 1e-2).float().mean() > 0.9
        torch.testing.assert_close(got[slot], merged[slot], atol=2e-4, rtol=2e-4)
    return adapters


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_have_their_adapters(architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compare(checkpoint(architecture, tie_word_embeddings=False), monkeypatch)


def test_latent_attention_of_a_backend_that_expands(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("DeepseekV3ForCausalLM", tie_word_embeddings=False, first_k_dense_replace=2)
    adapters = compare(folder, monkeypatch, attention="torch_native")
    assert "model.layers.1.self_attn.kv_b_proj" in adapters.made


def test_a_backend_without_latent_heads_has_no_deltas_of_their_projection(checkpoint: Callable[..., Path]) -> None:
    class Narrow(NaiveAttention):
        capabilities = replace(NaiveAttention.capabilities, latent_heads=False)

    adapters = RandomAdapters()
    open_session(checkpoint("DeepseekV3ForCausalLM"), adapters=adapters, attention=Narrow)
    assert "model.layers.1.self_attn.q_b_proj" in adapters.made
    assert "model.layers.1.self_attn.kv_b_proj" not in adapters.made


class PairRunner(TorchNative):
    """A runner with a matmul of pairs."""

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: Any, name: str) -> torch.Tensor:
        return torch.einsum("ti,tkoi->tko", x, getattr(experts, name)[ids]).flatten(0, 1)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM"])
def test_pairs_of_a_runner(architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose sums may be in another order than those of its fused products."""
    compare(checkpoint(architecture, tie_word_embeddings=False), monkeypatch, moe_runner=PairRunner, exact=False)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM"]
)
def test_two_ranks(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """A rank that pads the vocabulary, sums that are joined or sent in pieces."""
    folder = checkpoint(architecture, vocab_size=383)

    def open_rank(group: Any = None) -> dict[int, torch.Tensor]:
        adapters = RandomAdapters()
        return run(follow_rows(open_session(folder, group, adapters=adapters), adapters, PLACES))

    alone, ranks = open_rank(), on_ranks(2, open_rank)
    for slot, want in alone.items():
        assert torch.equal(ranks[0][slot], ranks[1][slot])
        torch.testing.assert_close(ranks[0][slot], want, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3MoeForCausalLM", "CohereForCausalLM", "Gemma4ForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM", "Gemma3ForCausalLM"],
)
def test_the_last_layer_selects_the_rows_of_adapters(architecture: str, checkpoint: Callable[..., Path]) -> None:
    chosen = torch.tensor([70, 3, 55, 31, len(A) - 1])

    def forward(indices: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states, logits), from fresh states."""
        adapters = RandomAdapters()
        session = follow_rows(open_session(checkpoint(architecture), adapters=adapters), adapters, PLACES)
        batch = session.batch([(0, A), (2, C), (1, B)], 0)
        if indices is None:
            hidden = session.model.forward(batch)
            return hidden, session.model.compute_logits(hidden)
        hidden = session.model.forward(replace(batch, extensions={**batch.extensions, SelectedTokens: SelectedTokens(indices)}))
        with adapters.select_rows(indices):
            return hidden, session.model.compute_logits(hidden)

    with torch.inference_mode():
        for some, every in zip(forward(chosen), forward(None), strict=True):
            torch.testing.assert_close(some, every[chosen], atol=1e-4, rtol=1e-4)
        assert len(forward(chosen[:0])[0]) == 0


class Bidirectional(NaiveAttention):
    """Over the tokens of a step. The mask does not matter here."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return torch.cat([self._row(spec, q[span], k[span], v[span]) for span, _ in self._rows(batch)])


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel"])
def test_encoders(architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "compute_logits", lambda model, hidden: hidden)
    adapters = compare(checkpoint(architecture), monkeypatch, attention=Bidirectional)
    assert {"embeddings.word_embeddings", "encoder.layer.1.attention.self.value"} < adapters.made.keys()


def test_layers_without_deltas(checkpoint: Callable[..., Path]) -> None:
    """Adapters that name them are refused, for they do not register."""
    names = set()
    for architecture in ("BertForSequenceClassification", "LlamaForSequenceClassification", "DeepseekV3ForCausalLM", "Qwen2MoeForCausalLM"):
        adapters = RandomAdapters()
        open_session(checkpoint(architecture), adapters=adapters)
        names |= adapters.made.keys()
    unknown = ("classifier", "pooler", "score")
    assert not [name for name in names if name.endswith(unknown)]
    layers = ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "mlp.shared_expert_gate", "mlp.gate")
    assert {"lm_head", *(f"model.layers.1.{layer}" for layer in layers)} < names


def test_folded_projections_step_aside(checkpoint: Callable[..., Path]) -> None:
    """In decodes, which use them without adapters."""
    adapters = RandomAdapters()
    session = follow_rows(open_session(checkpoint("DeepseekV3ForCausalLM"), adapters=adapters), adapters, {0: 1})
    session.step([(0, A[:5])])
    for layer in session.model.layers:
        layer.attention.folded = object()
    assert session.step([(0, A[5:6])])[0].isfinite().all()
    adapters.places, session.batch = None, partial(Session.batch, session)
    with pytest.raises(AttributeError):
        session.step([(0, A[6:7])])


def test_layers_of_a_drafter_have_no_deltas(checkpoint: Callable[..., Path]) -> None:
    adapters = RandomAdapters()
    model: Any = open_session(checkpoint("LlamaForCausalLM"), adapters=adapters).model
    before = set(adapters.made)
    model.build_draft_layer(2, "model.layers.2")
    assert set(adapters.made) == before
