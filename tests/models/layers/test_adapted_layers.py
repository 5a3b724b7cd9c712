"""Single layers whose rows have adapters: the vocabulary on several ranks, and experts where they
are whole, sliced or moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import Collective, LocalGroup
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.weight_format import FormatContext
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.linear import ColumnLinear
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.parameter import load_parameters
from frame.models.layers.router import RoutingRule
from frame.plugins.moe_dispatchers.all_gather_reduce_scatter import AllGatherReduceScatter
from frame.plugins.moe_dispatchers.all_reduce import AllReduce
from frame.plugins.moe_runners.torch_native import TorchNative
from frame.quantization.plain import Plain
from frame.testing.gemm_kernels import make_gemm_kernels
from tests.models.layers.random_adapters import RandomAdapters, RandomDelta
from tests.models.ranks import on_ranks

HIDDEN, INNER, EXPERTS = 16, 24, 6
PLACES = torch.tensor([0, -1, 1, 1, -1, 0, -1], dtype=torch.int32)


def make_context(adapters: RandomAdapters, tp: Collective | None = None, dispatcher: type = AllReduce, **fields: Any) -> BuildContext:
    base = {"device": torch.device("cpu"), "dtype": torch.float32, "limits": Limits(8, 512, 256, 4), "tp": tp or LocalGroup(), **fields}
    bare = BuildContext(**base)
    return BuildContext(
        **base, weight_format=Plain(FormatContext(torch.float32)), gemm_kernels=make_gemm_kernels(bare),
        moe_runner=TorchNative(bare), moe_dispatcher=dispatcher(bare), adapters=adapters,
    )  # fmt: skip


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_tied_head_and_its_embedding_have_deltas_of_their_own(ranks: int) -> None:
    """Of 10 ids, the last of three ranks holds two, and two rows of padding."""
    weight, ids, hidden = draw(10, HIDDEN), torch.tensor([0, 4, 9, 3, 5, 8, 9]), draw(len(PLACES), HIDDEN, seed=1)
    made = RandomAdapters()

    def act(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        adapters = RandomAdapters()
        context = make_context(adapters, group)
        embedding = VocabEmbedding(context, "embed", 10, HIDDEN)
        head = Head(context, "head", 10, HIDDEN, embedding)
        load_parameters(embedding, iter([("embed.weight", weight)]))
        head.process_weights_after_loading()
        made.made = dict(adapters.made)
        adapters.places = PLACES
        return embedding(ids), head(hidden)

    for embedded, logits in on_ranks(ranks, act):
        for row, place in enumerate(PLACES.tolist()):
            merged = {name: next(made.merge(place, [(f"{name}.weight", weight)]))[1] for name in ("embed", "head")} if place >= 0 else {}
            want, scored = merged.get("embed", weight)[ids[row]], F.linear(hidden[row], merged.get("head", weight))
            if place < 0:
                assert torch.equal(embedded[row], want)
            torch.testing.assert_close(embedded[row], want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(logits[row], scored, atol=1e-5, rtol=1e-5)


def make_moe(context: BuildContext, adapters: RandomAdapters | None = None, place: int = -1) -> MoE:
    """`adapters`, `place`: what is merged into the weights."""
    moe = MoE(context, "moe", ExpertSizes(EXPERTS, HIDDEN, INNER), RoutingRule(2, renormalize=True))
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    weights = [("moe.gate.weight", draw(EXPERTS, HIDDEN, seed=99))]
    for expert in range(EXPERTS):
        for number, (name, shape) in enumerate(shapes.items()):
            weights.append((f"moe.experts.{expert}.{name}.weight", draw(*shape, seed=3 * expert + number) * 0.3))
    if adapters is not None and place >= 0:
        weights = list(adapters.merge(place, weights))
    foreign = moe.experts.foreign_weights
    load_parameters(moe, iter(weights), foreign)
    for part in (moe.experts, moe.router):
        part.process_weights_after_loading()
    return moe


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_on_two_ranks(ep: int) -> None:
    """In slices, and whole ones divided among the ranks."""
    x, whole = draw(len(PLACES), HIDDEN), RandomAdapters()
    alone = make_moe(make_context(whole))
    plain, merged = alone(x), [make_moe(make_context(RandomAdapters()), whole, place)(x) for place in (0, 1)]
    whole.places = PLACES
    got = alone(x)
    want = torch.stack([merged[place][row] if place >= 0 else plain[row] for row, place in enumerate(PLACES.tolist())])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert ((want - plain).abs().amax(1) > 0.05).equal(PLACES >= 0)

    def act(group: Any) -> torch.Tensor:
        adapters = RandomAdapters()
        moe = make_moe(make_context(adapters, group, plan=ParallelPlan(tp=2, ep=ep)))
        assert len(adapters.made) == 3 * EXPERTS // ep + 1  # the router too
        adapters.places = PLACES
        return moe(x)

    for out in on_ranks(2, act):
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_rows_of_an_experts_batch_keep_their_bits() -> None:
    x, adapters = draw(len(PLACES), HIDDEN), RandomAdapters()
    moe = make_moe(make_context(adapters))
    plain, adapters.places = moe(x), PLACES
    assert torch.equal(moe(x)[PLACES < 0], plain[PLACES < 0])


@pytest.mark.parametrize("case", ["tokens move", "experts move", "float8"])
def test_experts_that_register_no_deltas(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, plan = RandomAdapters(), ParallelPlan(tp=2, ep=2, redundant_experts=2 * (case == "experts move"))
    if case == "float8":
        monkeypatch.setattr(TorchNative, "takes_fp8", ("block",))
    group = on_ranks(2, lambda group: group)[0]
    MoE(
        make_context(adapters, group, AllGatherReduceScatter if case == "tokens move" else AllReduce, plan=plan), "moe",
        ExpertSizes(EXPERTS, HIDDEN, INNER), RoutingRule(2),
    )  # fmt: skip
    assert set(adapters.made) == {"moe.gate"}


class FusedGemm:
    """A GEMM whose fused forms fail."""

    tensors = ()

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError


class FusedExperts:
    """Grouped GEMMs whose fused form fails."""

    tensors = ()

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(rows, weight) for rows, weight in zip(x.tensor_split(ends[:-1].long()), self.weights, strict=True)])

    def mix(self, *arguments: Any) -> torch.Tensor:
        raise AssertionError


class GatedDelta(RandomDelta):
    """One that also computes the activation."""

    can_gate = True

    def expand_gated(self, product: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.expand(product, shrunk, bias).chunk(2, -1)
        return F.silu(gate) * up


def test_deltas_of_a_gated_layer_join_its_activation() -> None:
    adapters, x = RandomAdapters(), draw(len(PLACES), HIDDEN)
    mlp = GatedMLP(make_context(adapters), "mlp", HIDDEN, INNER, bias=True)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    weights = [(f"mlp.{name}.weight", draw(*shape, seed=seed)) for seed, (name, shape) in enumerate(shapes.items())]
    biases = [(f"mlp.{name}.bias", draw(shape[0], seed=seed)) for seed, (name, shape) in enumerate(shapes.items())]
    load_parameters(mlp, iter(weights + biases))
    for part in (mlp.gate_up_proj, mlp.down_proj):
        part.process_weights_after_loading()
    adapters.places = PLACES
    want, plain = mlp(x), mlp.gate_up_proj.delta
    assert isinstance(plain, RandomDelta)
    assert mlp.gate_up_proj.apply_gated(x) is None
    mlp.gate_up_proj.delta = GatedDelta(adapters, plain.pages)
    assert mlp.gate_up_proj.apply_gated(x) is not None
    torch.testing.assert_close(mlp(x), want)


def test_fused_forms_step_aside() -> None:
    adapters, x = RandomAdapters(), draw(len(PLACES), HIDDEN)
    context = make_context(adapters)
    linear = ColumnLinear(context, ("gate", "up"), HIDDEN, (INNER, INNER))
    linear.gemm = FusedGemm(draw(2 * INNER, HIDDEN))
    moe = make_moe(context)
    adapters.places = PLACES
    assert linear.apply_gated(x) is None
    want = moe(x)
    moe.experts.weights.grouped = {name: FusedExperts(getattr(moe.experts, name).data) for name in ("gate_up", "down")}
    torch.testing.assert_close(moe(x), want, atol=1e-6, rtol=1e-6)
    adapters.places = None
    for fused in (linear.apply_gated, moe):
        with pytest.raises(AssertionError):
            fused(x)
