"""fp8: checkpoint dialects, merged and split layers, unquantized checkpoints quantized while
loading, KV-cache scales."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from frame import Engine, SamplingParams
from frame.core.errors import CheckpointError
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.weight_format import CanonicalWeight, FormatContext, LayerFormat
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.models.layers.parameter import Range, ShardedParameter, load_parameters
from frame.models.layers.weights.stored_weight import StoredWeight, WeightSizes
from frame.quantization import IgnoreOptions
from frame.quantization.compressed_tensors import CompressedTensors, read_scheme
from frame.quantization.fp8 import Fp8, Fp8Layer, OnlineFp8Layer
from frame.quantization.fp8_format import Fp8Format, read_format
from frame.quantization.fp8_weights import coarsen, quantize_blocks, quantize_outputs
from frame.quantization.plain import PlainLayer
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import Session, open_session
from tests.models.ranks import on_ranks
from tests.quantization.fp8_checkpoints import CONFIGS, make_pair
from tests.testing.failures import failures

TOKENS = list(range(20, 60))


FORMATS = {"channel": "compressed-tensors", "modelopt": "modelopt"}
BLOCKS = Fp8Layer(Fp8Format("block", "weight_scale_inv"))


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """By the definition, with scales by output or by blocks of 128 x 128."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    spread = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return weight.float() * spread


def layouts_of(session: Session) -> set[type[LayerFormat]]:
    """The layer formats of the model's linear layers and experts."""
    weights = [getattr(module, "weights", None) for module in session.model.modules()]  # type: ignore[attr-defined]
    stored = [dict(each.stored).values() for each in weights if each is not None]
    return {type(each.layout) for found in stored for each in found}


def logits_of(session: Session) -> torch.Tensor:
    """Logits of a prompt in two chunks and of decodes."""
    parts = [
        session.step([(0, TOKENS[:20])])[0],
        session.step([(0, TOKENS[20:38])])[0],
        *(session.step([(0, [t])])[0] for t in TOKENS[38:]),
    ]
    return torch.cat(parts).float()


def reference_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load_reference(folder)(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("architecture", "dialect"),
    [
        ("LlamaForCausalLM", "block"),
        ("LlamaForCausalLM", "tensor"),
        ("Qwen3ForCausalLM", "small block"),
        ("Qwen3ForCausalLM", "no block"),
        ("Qwen3ForCausalLM", "channel"),
        ("DeepseekV3ForCausalLM", "block"),
        ("DeepseekV3ForCausalLM", "small block"),
        ("DeepseekV3ForCausalLM", "modelopt"),
        ("Qwen2ForCausalLM", "channel"),
    ],
)
def test_a_checkpoint_equals_its_dequantized_twin(architecture: str, dialect: str, tmp_path: Path) -> None:
    stored, plain = make_pair(architecture, dialect, tmp_path)
    session = open_session(stored, quantization=FORMATS.get(dialect, "fp8"))
    assert Fp8Layer in layouts_of(session)
    torch.testing.assert_close(logits_of(session), reference_logits(plain), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("architecture", "bound"), [("LlamaForCausalLM", 0.09), ("Qwen3ForCausalLM", 0.09), ("DeepseekV3ForCausalLM", 0.12)]
)
def test_block_scales_stay_close_to_the_unquantized_model(architecture: str, bound: float, tmp_path: Path) -> None:
    stored, _ = make_pair(architecture, "block", tmp_path)
    want = reference_logits(make_checkpoint(architecture, tmp_path / "before"))
    got = logits_of(open_session(stored, quantization="fp8", dtype=torch.bfloat16))
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < bound


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_quantization_while_loading_stays_close(architecture: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 128, "hidden_size": 128} if "Moe" in architecture else {}
    folder = make_checkpoint(architecture, tmp_path, **sizes)
    want = reference_logits(folder)
    session = open_session(folder, quantization="fp8", dtype=torch.float32)
    got = logits_of(session)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1
    assert OnlineFp8Layer in layouts_of(session)


@pytest.mark.parametrize(
    ("architecture", "dialect"), [("Qwen3ForCausalLM", "tensor"), ("LlamaForCausalLM", "small block"), ("DeepseekV3ForCausalLM", "channel")]
)
def test_two_ranks_load_their_parts_of_the_scales(architecture: str, dialect: str, tmp_path: Path) -> None:
    stored, plain = make_pair(architecture, dialect, tmp_path)
    both = on_ranks(2, lambda group: logits_of(open_session(stored, tp=group, quantization=FORMATS.get(dialect, "fp8"))))
    torch.testing.assert_close(both[0], reference_logits(plain), rtol=2e-4, atol=2e-4)


class Layer(nn.Module):
    """A merged layer as `Linear` makes it: `parts` outputs each, from the checkpoint layers "0",
    "1", …"""

    def __init__(self, layout: LayerFormat, inputs: int, parts: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inputs = inputs
        self.stored = StoredWeight(self, layout, WeightSizes(inputs, inputs, tuple(parts)), dtype)
        local = 0
        for index, part in enumerate(parts):
            self.stored.bind(index, str(index), Range.whole(part, local), Range.whole(inputs))
            local += part

    def decode(self) -> CanonicalWeight:
        (weight,) = self.stored.to_canonical()
        return weight


@pytest.mark.parametrize("stored", [True, False])
def test_static_scales_of_inputs_are_kept_by_part(stored: bool) -> None:
    layer = Layer(Fp8Layer(Fp8Format("tensor", input_scale="input_scale")), 64, [32, 16])
    for index, rows in enumerate((32, 16)):
        tensors = {"weight": torch.zeros(rows, 64, dtype=torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
        static = {"input_scale": torch.tensor(0.5 / (index + 1))} if stored else {}
        load_parameters(layer, [(f"{index}.{name}", tensor) for name, tensor in (tensors | static).items()])
    found = layer.decode().input_scale
    assert found is None if not stored else found is not None and found.tolist() == [0.5] * 32 + [0.25] * 16


@pytest.mark.parametrize(("dynamic", "listed"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", ["float", "int"])
def test_compressed_tensors_says_which_scales_are_static(kind: str, dynamic: bool, listed: bool) -> None:
    weights = {"num_bits": 8, "type": kind, "strategy": "tensor"}
    group = {"weights": weights, "input_activations": weights | {"dynamic": dynamic}, "format": "int-quantized"}
    layout = read_scheme("here", group, {}, torch.float32)
    assert ("input_scale" in layout.list_tensors(64, [32])) is listed
    zeros = torch.zeros(32, 64, dtype=torch.int8 if kind == "int" else torch.float8_e4m3fn)
    tensors = {"weight": zeros, "weight_scale": torch.ones(32)} | ({"input_scale": torch.full((32,), 0.5)} if listed else {})
    assert (layout.to_canonical(tensors, 64).input_scale is not None) is listed


@pytest.mark.parametrize("parts", [[256, 128], [192, 64], [1536, 576], [24, 96], [1, 130]])
@pytest.mark.parametrize("inputs", [128, 192, 300])
def test_parts_that_end_inside_a_block_are_concatenated(parts: list[int], inputs: int) -> None:
    torch.manual_seed(0)
    layer, wanted, tensors = Layer(BLOCKS, inputs, parts), [], []
    for index, part in enumerate(parts):
        weight, scale = quantize_blocks(torch.randn(part, inputs) * 2.0**index)
        assert scale.shape == (-(-part // 128), -(-inputs // 128))
        tensors += [(f"{index}.weight", weight), (f"{index}.weight_scale_inv", scale)]
        wanted.append(dequantize(weight, scale))
    load_parameters(layer, tensors)
    assert torch.equal(layer.decode().dequantize(torch.float32), torch.cat(wanted))
    layer.stored.release()
    assert layer.weight.numel() == 0  # type: ignore[operator]
    load_parameters(layer, [(name, -tensor.float() if "scale" in name else tensor) for name, tensor in tensors])
    assert torch.equal(layer.decode().dequantize(torch.float32), -torch.cat(wanted))


def test_scales_are_as_coarse_as_their_parts_allow() -> None:
    """Blocks of 128 x 128 are restored where parts are whole blocks, or the last one is shorter:
    the kernels require them."""
    layer = Layer(BLOCKS, 256, [256, 192])
    stored: ShardedParameter = layer.weight_scale_inv  # type: ignore[assignment]
    assert tuple(stored.shape) == (7, 2)
    stored.load("0.weight_scale_inv", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    stored.load("1.weight_scale_inv", torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    coarse, block = coarsen(stored.data, (64, 128), (128, 128))
    assert block == (128, 128)
    assert coarse.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    crooked = torch.tensor([[1.0], [2.0], [2.0]])
    assert coarsen(crooked, (64, 128), (128, 128)) == (crooked, (64, 128))


def test_a_rank_whose_part_starts_inside_a_block_is_refused() -> None:
    layer = Layer(BLOCKS, 128, [128])
    with pytest.raises(Exception, match="set parallel.tp to a smaller number"):
        layer.weight_scale_inv.bind("0.weight_scale_inv", Range(384, 64, 128), Range.whole(128))  # type: ignore[union-attr, operator]


def test_rounding_is_at_most_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.cat((torch.randn(200, 300), torch.zeros(1, 300)))
    for numbers, scales in ((quantize_outputs(weight)), quantize_blocks(weight)):
        error = (dequantize(numbers, scales) - weight).abs()
        assert (error <= weight.abs() / 16 + 1e-3 * weight.abs().max()).all()
        assert numbers.float().abs().max() == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_quantized_while_loading(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(OnlineFp8Layer(experts=False), 64, [96, 32], dtype)
    parts = [torch.randn(96, 64, dtype=dtype) / 8, torch.randn(32, 64, dtype=dtype) * 8]
    for sign in (1, -1):
        load_parameters(layer, [(f"{index}.weight", sign * part) for index, part in enumerate(parts)])
        want = sign * torch.cat(parts).float()
        assert (layer.decode().dequantize(torch.float32) - want).norm() / want.norm() < 0.035
    assert layer.weight.numel() == 0, "the plain numbers are kept"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIGS["block"], Fp8Format("block", "weight_scale_inv", None, (128, 128), ("lm_head",))),
        (CONFIGS["tensor"], Fp8Format("tensor", "weight_scale", "input_scale", plain=("lm_head",))),
        (CONFIGS["no block"], Fp8Format("tensor", "weight_scale_inv", "activation_scale")),
        ({"quant_method": "fp8", "fmt": "float8_e4m3fn"}, Fp8Format("tensor")),  # MiniMax-M2
    ],
)
def test_dialects(config: dict[str, object], expected: Fp8Format) -> None:
    assert read_format(config) == expected


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'; fp8 supports fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive sizes"),
    ],
)
def test_other_weights_are_refused(config: dict[str, object], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        read_format(config)


@pytest.mark.parametrize(
    ("pattern", "plain", "stored"),
    [
        ("lm_head", "lm_head", "model.layers.0.mlp.up_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("mlp.gate", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"),
        ("*visual*", "model.visual.blocks.0.qkv", "model.layers.0.mlp.up_proj"),
    ],
)
def test_patterns_of_unquantized_layers(pattern: str, plain: str, stored: str) -> None:
    found = Fp8Format("tensor", plain=(pattern,))
    assert not found.stores_layer(plain)
    assert found.stores_layer(stored)
    assert Fp8Format("tensor", targets=(pattern,)).stores_layer(plain)


def test_unquantized_layers() -> None:
    found = Fp8(FormatContext(torch.float32), IgnoreOptions(ignore=("layers.0.",)))
    assert isinstance(found.describe_layer("model.layers.0.mlp.up_proj", "linear"), PlainLayer)
    assert isinstance(found.describe_layer("model.layers.0.mlp.experts.0.up_proj", "experts"), PlainLayer)
    assert isinstance(found.describe_layer("lm_head", "head"), PlainLayer)
    assert found.describe_layer("model.layers.1.mlp.up_proj", "linear") == OnlineFp8Layer(experts=False)
    static = Fp8(FormatContext(torch.float32, CONFIGS["tensor"]))
    assert "input_scale" in static.describe_layer("model.layers.0.mlp.up_proj", "linear").list_tensors(64, [32])
    assert "input_scale" not in static.describe_layer("model.layers.0.mlp.experts.0.up_proj", "experts").list_tensors(64, [32])
    assert static.ignored_weights == (r".*\.input_scale$",)


def test_fp8_values_are_not_loaded_as_unquantized() -> None:
    layer = Layer(PlainLayer(torch.float32), 64, [32])
    with pytest.raises(CheckpointError, match="is stored as float8_e4m3fn, but float32 is expected: choose the weight format"):
        load_parameters(layer, [("0.weight", torch.zeros(32, 64, dtype=torch.float8_e4m3fn))])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("place", ["", "k_proj."])
def test_the_kv_cache_uses_the_checkpoints_scales(architecture: str, place: str, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.{place}k_scale"] = torch.tensor(0.02)
        tensors[f"model.layers.{layer}.self_attn.{place.replace('k', 'v')}v_scale"] = torch.tensor([0.01])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    session = open_session(folder, attention="torch_native", page_size=4)
    session.pool = KVPool(kv_geometry(session.model_config, 1, 4, "fp8_e4m3"), session.slots * 64 + 1, torch.device("cpu"))  # type: ignore[assignment]
    got, want = logits_of(session), reference_logits_of_plain(architecture, tmp_path / "plain")
    specs = [module.spec for module in session.model.modules() if isinstance(getattr(module, "spec", None), AttentionSpec)]  # type: ignore[attr-defined]
    assert all((spec.k_scale, spec.v_scale) == pytest.approx((0.02, 0.01)) for spec in specs)
    assert len(specs) == 2
    assert session.pool.layer(0)[0].dtype == torch.float8_e4m3fn
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.05


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(value: float, tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor(value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.v_proj.v_scale is .*must be a positive number"):
        open_session(folder)


def reference_logits_of_plain(architecture: str, folder: Path) -> torch.Tensor:
    return reference_logits(make_checkpoint(architecture, folder))


def test_dummy_weights_for_an_fp8_checkpoint(tmp_path: Path) -> None:
    stored, _ = make_pair("DeepseekV3ForCausalLM", "block", tmp_path)
    got = logits_of(open_session(stored, quantization="fp8", load_format="dummy"))
    assert torch.isfinite(got).all()
    assert got.std() > 0.01


def test_a_checkpoint_made_by_transformers(tmp_path: Path) -> None:
    """transformers' fine-grained fp8 as far as it runs without a GPU: its layers, with our
    values."""
    fine_grained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path / "plain", hidden_size=128, intermediate_size=256)
    model = load_reference(folder)
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    weights = {name: model.get_submodule(name).weight.data.clone() for name in layers}
    with torch.device("meta"):
        converted = fine_grained.replace_with_fp8_linear(
            type(model)(model.config), modules_to_not_convert=["lm_head"], quantization_config=config
        )
    expected = {name: tuple(tensor.shape) for name, tensor in converted.state_dict().items()}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name.removesuffix(".weight") not in layers}
    for name, weight in weights.items():
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantize_blocks(weight)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    stored = tmp_path / "stored"
    shutil.copytree(folder, stored)
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    raw = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**raw, "quantization_config": config.to_dict()}, default=str))
    want = reference_logits(folder)
    got = logits_of(open_session(stored, quantization="fp8"))
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.09


def test_a_latent_layer_stores_its_expansion_once(tmp_path: Path) -> None:
    stored, _ = make_pair("DeepseekV3ForCausalLM", "block", tmp_path)
    for method, folder in (("fp8", stored), ("fp8", make_checkpoint("DeepseekV3ForCausalLM", tmp_path / "plain"))):
        expansion = open_session(folder, quantization=method).model.layers[0].attention.kv_b_proj  # type: ignore[attr-defined]
        assert expansion.stored.gemm is None
        assert sum(tensor.numel() for tensor in (*expansion.stored.parameters(), *expansion.stored.buffers())) == 0


@pytest.mark.parametrize("dialect", ["block", "small block", "tensor", "channel"])
def test_conformance_of_stored_weights(dialect: str) -> None:
    base: type = CompressedTensors if dialect == "channel" else Fp8
    stored = type("Stored", (base,), {"conformance_config": CONFIGS[dialect]})
    assert failures("weight_format", stored) == {}


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_an_engine_with_fp8_weights_and_a_quantized_cache(kv_dtype: str) -> None:
    prompts = ["copy: alpha beta gamma ->", "The quick brown fox " * 8]
    # float32, since near ties of bfloat16 fall differently on some processors when the prefix is
    # read from the cache
    sizes = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 2048, "max_model_len": 512}
    keys = {**sizes, "quantization": "fp8", "kv_cache_dtype": kv_dtype}
    with Engine(**keys) as engine:
        first, again = (engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0)) for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in again]
    assert again[1].cached_tokens > 0
