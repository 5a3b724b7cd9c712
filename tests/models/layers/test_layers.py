"""Single layers: rotary schemes against transformers, routing against its definition, parameters
and their parts."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from frame import kernels
from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.model import ModelConfig
from frame.models.layers.attention import get_layer_window
from frame.models.layers.linear import HeadLayout
from frame.models.layers.mla import multiply_heads
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule, TensorShard, load_parameters
from frame.models.layers.rotary import Rotary, compute_yarn_scale, read_rope_parameters
from frame.models.layers.router import Router, RoutingRule

CONTEXT = BuildContext(device=torch.device("cpu"), dtype=torch.float32, tp=LocalGroup(), limits=Limits(8, 512, 256, 4))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def model_config(**config: Any) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 2, 64, 384, 4, 2, 16, 16, "mha", None, 256, "float32", config={"max_position_embeddings": 128, **config}
    )


def rotary(config: dict[str, Any], dim: int = 16, interleaved: bool = False) -> Rotary:
    made = Rotary(CONTEXT, dim, read_rope_parameters(model_config(**config)), interleaved)
    made.process_weights_after_loading()
    return made


@pytest.mark.parametrize(
    "scheme",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda scheme: str(scheme["rope_type"]),
)
@pytest.mark.parametrize("spelling", [4, 5])
def test_rotation_equals_that_of_transformers(scheme: dict[str, Any], spelling: int) -> None:
    positions = torch.tensor([0, 1, 17, 63, 127])
    theta = 50000.0
    parameters = {**scheme, "rope_theta": theta}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters=parameters)
    x = torch.randn(5, 3, 16)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    want = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)[0][0].transpose(0, 1)
    if spelling == 5:
        made = rotary({"rope_parameters": {**scheme, "rope_theta": theta}})
    else:
        old = {("type" if key == "rope_type" else key): value for key, value in scheme.items()}
        made = rotary({"rope_theta": theta, "rope_scaling": None if scheme["rope_type"] == "default" else old})
    torch.testing.assert_close(made.rotate(x, made.gather_rows(positions)), want, atol=2e-6, rtol=1e-5)


def test_yarn_without_a_factor_scales_by_the_lengths() -> None:
    lengths = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
    parameters = {"rope_type": "yarn", "mscale_all_dim": 0.5, **lengths}
    assert compute_yarn_scale(parameters) == compute_yarn_scale({**parameters, "factor": 4.0}) > 1.0


def test_dynamic_positions_beyond_the_trained_length_rotate_as_in_decoding() -> None:
    """transformers recomputes the frequencies for every longer sequence; a token decoded at
    position p uses those of length p + 1."""
    scheme = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters=scheme)
    made = rotary({"rope_parameters": scheme})
    x = torch.randn(1, 1, 16)
    for position in (130, 200, 255):
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.tensor([[position]]))
        want = apply_rotary_pos_emb(x[None], x[None], cos, sin)[0][0]
        torch.testing.assert_close(made.rotate(x, made.gather_rows(torch.tensor([position]))), want, atol=1e-4, rtol=1e-4)


def test_interleaved_rotation_is_that_of_complex_numbers() -> None:
    made, positions = rotary({}, interleaved=True), torch.tensor([0, 5, 100])
    x = torch.randn(3, 2, 16)
    angles = positions[:, None].float() * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    want = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None])
    torch.testing.assert_close(made.rotate(x, made.gather_rows(positions)), want.flatten(-2), atol=1e-5, rtol=1e-5)


def test_partial_rotation_keeps_the_rest() -> None:
    made, positions = rotary({}, dim=8), torch.tensor([3, 9])
    x = torch.randn(2, 4, 16)
    out = made.rotate(x, made.gather_rows(positions))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[..., :8], made.rotate(x[..., :8].contiguous(), made.gather_rows(positions)))


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rope_type 'spiral' is not implemented here"):
        rotary({"rope_scaling": {"type": "spiral", "factor": 2.0}})


def test_a_request_may_run_a_step_past_the_limit() -> None:
    made = rotary({})
    assert made.gather_rows(torch.tensor([256])).isfinite().all()


def route(rule: RoutingRule, scores: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by given logits: the router's weight is an identity."""
    router = Router(CONTEXT, "gate", scores.shape[1], scores.shape[1], rule)
    router.weight.data = torch.eye(scores.shape[1])
    if correction is not None:
        router.correction.data = correction
    return router(scores)


def test_a_router_loaded_again_keeps_the_address_of_its_copy() -> None:
    """Captured graphs read the copy in the model's dtype."""
    router = Router(CONTEXT, "gate", 4, 8, RoutingRule(2, precise=True))
    router._narrow = copy = torch.zeros(4, 8)
    router.weight.data = torch.randn(4, 8)
    router.process_weights_after_loading()
    assert router.weight.data_ptr() == copy.data_ptr()
    router.weight.bind("gate.weight")
    router.weight.load("gate.weight", loaded := torch.randn(4, 8))
    router.process_weights_after_loading()
    assert router.weight.data_ptr() == copy.data_ptr() and torch.equal(copy, loaded)


def test_softmax_routing() -> None:
    logits = torch.randn(50, 8)
    probabilities = logits.softmax(-1)
    want, ids = probabilities.topk(3)
    got_ids, got = route(RoutingRule(3), logits)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got, want)
    got_ids, got = route(RoutingRule(3, renormalize=True, scale=2.5), logits)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got, 2.5 * want / want.sum(-1, keepdim=True))


@pytest.mark.parametrize("group_score", ["max", "top2"])
def test_groups_limit_the_selection(group_score: Any) -> None:
    logits, correction = torch.randn(200, 16), torch.randn(16) * 0.1
    rule = RoutingRule(4, "sigmoid", True, 1.5, groups=4, top_groups=2, group_score=group_score, correction=True)
    ids, weights = route(rule, logits, correction)
    for row in range(200):
        scores = logits[row].sigmoid()
        choice = (scores + correction).view(4, 4)
        ranked = choice.amax(-1) if group_score == "max" else choice.topk(2).values.sum(-1)
        open_groups = ranked.topk(2).indices.tolist()
        allowed = [expert for expert in range(16) if expert // 4 in open_groups]
        best = sorted(allowed, key=lambda expert: -float(choice.flatten()[expert]))[:4]
        assert sorted(ids[row].tolist()) == sorted(best)
        torch.testing.assert_close(weights[row], 1.5 * scores[ids[row]] / scores[ids[row]].sum())


def test_norm_adds_the_residual() -> None:
    norm = RMSNorm(CONTEXT, "norm", 8, 1e-5)
    norm.weight.data = torch.randn(8)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    out, stream = norm.add_residual(x, residual)
    assert torch.equal(stream, x + residual)
    want = stream / (stream.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(norm(stream), want)
    assert norm.add_residual(x, None)[1] is x


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_are_selected_when_a_layer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/core/interpreted_greedy.py runs whole models with them."""
    plain = RMSNorm(CONTEXT, "norm", 8, 1e-5)
    monkeypatch.setattr(kernels, "can_use_triton", lambda device: True)
    fused = RMSNorm(CONTEXT, "norm", 8, 1e-5)
    fused.process_weights_after_loading()
    assert (plain.kernel is not None) == kernels.INTERPRETED
    assert fused.kernel is not None
    assert fused.scale is not None
    assert rotary({}).fused


def test_block_scales_are_split_with_their_weight() -> None:
    """128 outputs share a scale: rank 1 of 2, of a layer with 512 outputs, reads scales 2 and 3."""
    scale = ShardedParameter(torch.zeros(2, 3), ShardRule(output=0, input=1, output_block=128, input_block=128))
    scale.bind("scale", Range.split(512, 1, 2), Range.whole(384))
    assert scale.sources["scale"] == TensorShard((4, 3), (slice(2, 4), slice(0, 3)), (slice(0, 2), slice(0, 3)))
    whole = torch.arange(12.0).view(4, 3)
    scale.load("scale", whole)
    assert torch.equal(scale, whole[2:])


def test_head_layout_of_ranks() -> None:
    class Rank(LocalGroup):
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    def layout(rank: int, size: int, heads: int, kv: int) -> HeadLayout:
        return HeadLayout(replace(CONTEXT, tp=Rank(rank, size)), heads, kv, 16)

    assert [layout(rank, 4, 8, 2).keys.start for rank in range(4)] == [0, 0, 1, 1]
    assert layout(1, 2, 8, 4).get_ranges()[1] == Range(64, 32, 32)
    with pytest.raises(ConfigurationError, match="9 attention heads cannot be split into 2"):
        layout(0, 2, 9, 3)
    with pytest.raises(ConfigurationError, match="6 key-value heads cannot be split into 4"):
        layout(0, 4, 12, 6)
    with pytest.raises(ConfigurationError, match="3 key-value heads cannot be replicated over 4"):
        layout(0, 4, 12, 3)


def test_plain_modules_load_by_their_names() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})
    weight, bias = torch.randn(3, 2), torch.randn(3)
    done = load_parameters(module, [("a.weight", weight), ("a.bias", bias), ("skip.this", bias)], (r"skip\.",))
    assert done == {"a.weight", "a.bias"}
    assert torch.equal(module["a"].weight, weight)
    with pytest.raises(CheckpointError, match=r"holds b\.weight"):
        load_parameters(module, [("b.weight", weight)])
    with pytest.raises(CheckpointError, match=r"a\.bias has the shape"):
        load_parameters(module, [("a.bias", weight)])


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [None, 8]),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [8, None]),
    ],
)
def test_sliding_windows_of_layers(config: dict[str, Any], windows: list[int | None]) -> None:
    assert [get_layer_window(config, layer) for layer in range(2)] == windows


def test_absorbed_queries_have_strides_without_tokens() -> None:
    """Attention kernels are compiled for the strides of their queries."""
    weights = torch.randn(3, 4, 5)
    strides = set()
    for tokens in (1, 2, 7):
        x = torch.randn(tokens, 3, 4)
        found = multiply_heads(x, weights)
        torch.testing.assert_close(found, torch.einsum("thi,hio->tho", x, weights))
        strides.add(found.stride())
    assert len(strides) == 1
