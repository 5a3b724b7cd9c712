"""EAGLE-3 and Medusa heads draft what a plain PyTorch loop over whole sequences drafts, and change
no output. Target and heads are random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from frame.config.schema import FrameConfig
from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.core.test_speculative_equality import make_loop, make_requests
from tests.quantization.fp8_checkpoints import make_pair
from tests.speculation.test_draft_graphs import run
from tests.speculation.test_draft_runner import record_drafts

STEPS, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS = 3, 384, 96, 4, 2
HIDDEN_OUTPUTS = (1, 2, 3)  # the config names the layers before
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A folder, and the model of transformers."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return str(folder), load_reference(folder)


def save_head(folder: Path, tensors: Tensors, config: dict[str, Any]) -> str:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_eagle(hidden: int, folder: Path) -> tuple[str, Tensors]:
    """hidden: size of the target's states."""
    inner, dim = 96, 16
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (DRAFT_VOCAB, hidden), "midlayer.self_attn.q_proj": (HEADS * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (KV_HEADS * dim, 2 * hidden), "midlayer.self_attn.v_proj": (KV_HEADS * dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, HEADS * dim), "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
        **dict.fromkeys(norms, (hidden,)),
    }  # fmt: skip
    numbers = torch.Generator().manual_seed(5)
    tensors = {f"{name}.weight": torch.randn(shape, generator=numbers) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    ids = torch.tensor(sorted(random.Random(3).sample(range(VOCAB), DRAFT_VOCAB)))
    tensors |= {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": hidden, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": dim, "intermediate_size": inner, "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0, "max_position_embeddings": 2048, "vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in HIDDEN_OUTPUTS]},
    }  # fmt: skip
    return save_head(folder, tensors, config), tensors


def make_medusa(hidden: int, folder: Path) -> tuple[str, Tensors]:
    numbers = torch.Generator().manual_seed(6)
    tensors: Tensors = {}
    for head in range(STEPS + 1):
        for block in range(2):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden, generator=numbers) * hidden**-0.5
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(hidden, generator=numbers)
        tensors[f"{head}.2.weight"] = torch.randn(VOCAB, hidden, generator=numbers)
    return save_head(folder, tensors, {"medusa_num_heads": STEPS + 1, "medusa_num_layers": 2}), tensors


@pytest.fixture(scope="module")
def eagle(target: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensors]:
    return make_eagle(target[1].config.hidden_size, tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def medusa(target: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensors]:
    return make_medusa(target[1].config.hidden_size, tmp_path_factory.mktemp("medusa"))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x: [heads, tokens, dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 5000.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


def eagle_layer(tensors: Tensors, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    x = torch.cat((norm(embedded, w["input_layernorm"]), norm(states, w["hidden_norm"])), -1)
    q, k, v = ((x @ w[f"self_attn.{name}_proj"].T).unflatten(-1, (-1, 16)).transpose(0, 1) for name in "qkv")
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (rotate(k), v))
    attended = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
    states = states + attended @ w["self_attn.o_proj"].T
    x = norm(states, w["post_attention_layernorm"])
    return states + (F.silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def draft_with_eagle(model: Any, tensors: Tensors, tokens: list[int], steps: int) -> list[int]:
    found = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([found[layer][0] for layer in HIDDEN_OUTPUTS], -1) @ tensors["fc.weight"].T
    ids, draft = tokens[1:], []
    for _ in range(steps):
        after = eagle_layer(tensors, model.model.embed_tokens(torch.tensor(ids)), states)
        place = int((norm(after[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T).argmax())
        draft.append(place + int(tensors["d2t"][place]))
        ids, states = [*ids, draft[-1]], torch.cat((states, after[-1:]))
    return draft


def draft_with_medusa(model: Any, tensors: Tensors, tokens: list[int], steps: int) -> list[int]:
    hidden, draft = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1], []
    for head in range(steps):
        x = hidden
        for block in range(2):
            x = x + F.silu(F.linear(x, tensors[f"{head}.{block}.linear.weight"], tensors[f"{head}.{block}.linear.bias"]))
        draft.append(int((x @ tensors[f"{head}.2.weight"].T).argmax()))
    return draft


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reference"), [("eagle", draft_with_eagle), ("medusa", draft_with_medusa)])
def test_drafts_and_outputs(
    name: str, reference: Callable[..., list[int]], target: tuple[str, Any], request: pytest.FixtureRequest
) -> None:
    head, tensors = request.getfixturevalue(name)
    prompts, params = make_requests(8, seed=4)
    prompts = [[token % VOCAB for token in prompt] for prompt in prompts]
    outputs = make_loop(path=target[0]).generate(prompts, params)
    loop = make_loop(path=target[0], algorithm="eagle3" if name == "eagle" else name, draft=head, chunk=16, overlap=True)
    assert loop.generate(prompts, params) == outputs
    assert loop.scheduler.get_load()["drafted_tokens"] > 50
    found = record_drafts(loop)
    loop.scheduler.flush_cache()
    loop.generate(prompts[1:3], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(found) >= 14
    with torch.no_grad():
        for tokens, draft in found:
            left = 8 + next(len(prompt) for prompt in prompts[1:3] if tokens[: len(prompt)] == prompt) - len(tokens)
            assert draft[:left] == reference(target[1], tensors, tokens, min(STEPS, left))  # no pages for what cannot be output


def test_trees_of_a_part_of_the_vocabulary(target: tuple[str, Any], eagle: tuple[str, Tensors]) -> None:
    prompts, params = [[token % VOCAB for token in prompt] for prompt in make_requests(5)[0]], make_requests(5)[1]
    loop = make_loop(path=target[0], algorithm="eagle3", draft=eagle[0], topk=2, overlap=True)
    assert loop.generate(prompts, params) == make_loop(path=target[0]).generate(prompts, params)
    assert loop.scheduler.get_load()["drafted_tokens"] > 50


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_heads_of_a_quantized_target(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The heads keep their plain weights."""
    path, head = str(make_pair("LlamaForCausalLM", "tensor", tmp_path, num_hidden_layers=4)[0]), request.getfixturevalue(name)
    prompts, params = [[5, 6, 7, 8], list(range(20, 50))], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    loop = make_loop(path=path, algorithm="eagle3" if name == "eagle" else name, draft=head[0])
    assert loop.generate(prompts, params) == make_loop(path=path).generate(prompts, params)
    assert loop.scheduler.get_load()["drafted_tokens"] > 10
    weights = dict(loop.runner.drafts.model.named_parameters())  # type: ignore[attr-defined]
    assert {weight.dtype for weight in weights.values()} <= {torch.float32, torch.int64}


def test_synthetic_acceptance(target: tuple[str, Any], medusa: tuple[str, Tensors]) -> None:
    loop = make_loop(path=target[0], algorithm="medusa", draft=medusa[0], synthetic=2.5)
    prompts = [[number + 5, 6, 7] for number in range(12)]
    outputs = loop.generate(prompts, SamplingParams(temperature=0.0, max_tokens=61, ignore_eos=True))
    assert {len(output) for output in outputs} == {61}
    load = loop.scheduler.get_load()
    assert 1 + load["accepted_tokens"] / load["num_drafts"] == pytest.approx(2.5, abs=0.2)


def test_heads_of_another_model_are_refused(target: tuple[str, Any], eagle: tuple[str, Tensors], tmp_path: Path) -> None:
    config = json.loads((Path(eagle[0]) / "config.json").read_text())
    for change, words in (({"hidden_size": 32}, "hidden_size"), ({"eagle_config": {}}, r"reads the layers \(2, 2, 1\)")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigurationError, match=words):
            make_loop(path=target[0], algorithm="eagle3", draft=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigurationError, match="has a quantization_config; use an unquantized head for medusa"):
        make_loop(path=target[0], algorithm="medusa", draft=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    with pytest.raises(ConfigurationError, match="speculative.num_steps is 3, and the checkpoint has medusa_num_heads 2"):
        make_loop(path=target[0], algorithm="medusa", draft=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
        make_loop(path=target[0], algorithm="medusa", draft=str(tmp_path / "nothing"))


@pytest.mark.parametrize(("algorithm", "field"), [("eagle3", "draft_vocab_size"), ("medusa", "medusa_num_heads")])
def test_folders_of_no_head_are_refused_without_building(algorithm: str, field: str, tmp_path: Path) -> None:
    config = {"model": {"path": "frame-tiny"}, "speculative": {"algorithm": algorithm, "draft_model_path": str(tmp_path)}}
    with pytest.raises(CheckpointError, match=r"config\.json is missing; name the folder of a head"):
        prepare(FrameConfig.model_validate(config))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(CheckpointError, match=f"has no {field}; name the folder of a head"):
        prepare(FrameConfig.model_validate(config))
    (tmp_path / "config.json").write_text(json.dumps({field: 8}))
    assert prepare(FrameConfig.model_validate(config)).resolved.choice("drafter").name == algorithm


@pytest.mark.parametrize("algorithm", ["eagle3", "medusa"])
def test_captured_passes_draft_the_same(algorithm: str, target: tuple[str, Any], request: pytest.FixtureRequest) -> None:
    draft = request.getfixturevalue("eagle" if algorithm == "eagle3" else algorithm)[0]
    assert run(20, algorithm, target[0], draft) == run(0, algorithm, target[0], draft)
