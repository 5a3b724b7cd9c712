"""Weight formats: every format with every kernel, dense and with experts, on one rank and on two;
bit equality with the libraries that wrote the weights; refusals."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from frame.checkpoint.model_config import read_model_config
from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.weight_format import CanonicalWeight, FormatContext, LayerFormat, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.parameter import Range, load_parameters
from frame.models.layers.weights.stored_weight import StoredWeight, WeightSizes
from frame.quantization import Int4Options
from frame.quantization.awq import Awq, AwqLayer
from frame.quantization.compressed_tensors import CompressedTensors, read_scheme
from frame.quantization.fp8 import Fp8
from frame.quantization.gptq import Gptq
from frame.quantization.int4 import Int4
from frame.quantization.int8 import Int8, OnlineInt8Layer
from frame.quantization.modelopt import ModelOpt
from frame.quantization.mxfp4 import Mxfp4
from frame.quantization.plain import PlainLayer
from frame.quantization.torchao import TorchAo
from frame.quantization.w4afp8 import W4AFp8
from frame.quantization.w8a8_fp8 import W8A8Fp8
from frame.quantization.w8a8_int8 import W8A8Int8
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.testing.gemm_kernels import load_own_plugins, make_gemm_kernels
from frame.testing.weights.canonical_weights import check_form
from tests.models.harness import Session, open_session, weights_of
from tests.models.ranks import on_ranks
from tests.quantization import checkpoints, write_gptq
from tests.quantization.checkpoints import DIALECTS, make_pair
from tests.quantization.write_compressed_tensors import DATA, INPUTS, OUTPUTS, SCHEMES, digest
from tests.quantization.write_torchao import TORCHAO
from tests.testing.failures import failures

TOKENS = list(range(20, 44))


def logits_of(session: Session) -> torch.Tensor:
    """Logits of a prompt and of a decode."""
    return torch.cat((session.step([(0, TOKENS[:-1])])[0], session.step([(0, TOKENS[-1:])])[0])).float()


def reference_logits(folder: Path) -> Any:
    with torch.no_grad():
        return load_reference(folder)(torch.tensor([TOKENS])).logits[0]


@pytest.mark.covering
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("ways", [((None, 1), ("torch", 1)), (("unpacked", 1), ("torch", 2))], ids=["chosen, torch", "unpacked, two ranks"])
def test_every_format_with_every_kernel_on_one_and_two_ranks(
    architecture: str, dialect: str, ways: tuple[tuple[str | None, int], ...], tmp_path: Path
) -> None:
    """ways: GEMM kernels and numbers of ranks; a checkpoint is written once for two of them."""
    stored, plain = make_pair(architecture, dialect, tmp_path)
    want, method = reference_logits(plain), DIALECTS[dialect][0]["quant_method"]

    def compute(kernel: str | None, group: Any = None) -> torch.Tensor:
        return logits_of(open_session(stored, tp=group, quantization=method, gemm_kernel=kernel))

    for kernel, ranks in ways:
        got = compute(kernel) if ranks == 1 else on_ranks(ranks, partial(compute, kernel))[0]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_random_weights_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    stored, _ = make_pair("LlamaForCausalLM", "awq", tmp_path)
    got = logits_of(open_session(stored, quantization="awq", load_format="dummy"))
    assert torch.isfinite(got).all()
    assert got.std() > 0.01


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Quantized values and scales, of plain weights the weights: nothing is counted twice or kept
    besides."""
    stored, plain = make_pair("LlamaForCausalLM", "int8", tmp_path)
    for folder, method, kernel, bound in ((plain, "none", None, 1.0), (stored, "compressed-tensors", "torch", 0.45)):
        model: Any = open_session(folder, quantization=method, gemm_kernel=kernel).model
        layers = [module for module in model.modules() if getattr(module, "weights", None) is not None and hasattr(module, "apply_gated")]
        held = sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
        whole = sum(sum(stored.outputs) * stored.inputs * 4 for layer in layers for _, stored in layer.weights.stored)
        assert held <= whole * bound


def test_a_checkpoint_with_scales_of_the_cache_alone(tmp_path: Path) -> None:
    """llmcompressor writes it for a `kv_cache_scheme` without a scheme of weights."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": cache}
    want = reference_logits(folder)
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(open_session(folder, quantization="compressed-tensors")), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dialect", ["awq", "gptq 4"])
def test_a_model_in_bfloat16(dialect: str, tmp_path: Path) -> None:
    stored, plain = make_pair("LlamaForCausalLM", dialect, tmp_path)
    want = reference_logits(plain)
    got = logits_of(open_session(stored, quantization=DIALECTS[dialect][0]["quant_method"], dtype=torch.bfloat16))
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.05


def decode(layout: LayerFormat, tensors: dict[str, torch.Tensor], outputs: int = OUTPUTS, inputs: int = INPUTS) -> CanonicalWeight:
    """Load one layer and decode it."""
    module = nn.Module()
    stored = StoredWeight(module, layout, WeightSizes(inputs, inputs, (outputs,)), torch.float32)
    stored.bind(0, "layer", Range.whole(outputs), Range.whole(inputs))
    done = load_parameters(module, [(f"layer.{name}", tensor) for name, tensor in tensors.items()], CompressedTensors.ignored_weights)
    if missing := dict(module.named_parameters()).keys() - done:
        raise CheckpointError(f"layer.{min(missing)} is missing")
    (weight,) = stored.to_canonical()
    check_form(weight, outputs, inputs)
    return weight


def decode_shares(layout: LayerFormat, tensors: dict[str, torch.Tensor], dtype: torch.dtype, outputs: int = OUTPUTS) -> list[torch.Tensor]:
    """The dequantized weight of a layer, and of each of two experts with its tensors, from one rank
    and from two, which share outputs or inputs."""
    found = []
    for experts, (ranks, axis) in itertools.product((0, 2), ((1, 0), (2, 0), (2, 1))):
        shares = []
        for rank in range(ranks):
            share = Range.split((outputs, INPUTS)[axis], rank, ranks)
            output, inner = (share, Range.whole(INPUTS)) if axis == 0 else (Range.whole(outputs), share)
            module = nn.Module()
            stored = StoredWeight(module, layout, WeightSizes(inner.size, INPUTS, (output.size,), experts), torch.float32)
            for expert in range(experts or 1):
                stored.bind(0, f"{expert}", output, inner, expert if experts else None)
            named = [(f"{expert}.{name}", tensor) for expert in range(experts or 1) for name, tensor in tensors.items()]
            missing = dict(module.named_parameters()).keys() - load_parameters(module, named, CompressedTensors.ignored_weights)
            assert not missing
            (weight,) = stored.to_canonical()
            check_form(weight, output.size, inner.size, (experts,) if experts else ())
            shares.append([(weight.expert(expert) if experts else weight).dequantize(dtype) for expert in range(experts or 1)])
        found += [torch.cat(parts, axis) for parts in zip(*shares, strict=True)]
    return found


@pytest.fixture(scope="module")
def written() -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """Tensors by scheme that compressed-tensors wrote, and digests of what it reads from them."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(DATA).items():
        scheme, _, key = name.partition(".")
        parts.setdefault(scheme, {})[key] = tensor
    with safe_open(DATA, "pt") as file:
        return parts, json.loads(file.metadata()["digests"])


@pytest.mark.parametrize("name", [*SCHEMES, "awq"])
def test_dequantization_equals_compressed_tensors(name: str, written: Any) -> None:
    parts, digests = written
    if name == "awq":
        layout: LayerFormat = AwqLayer(torch.float16, 32)
    else:
        values = {**SCHEMES[name], "format": None}
        group = {"weights": values, "format": SCHEMES[name]["format"]}
        layout = read_scheme("group", group, {}, torch.bfloat16)
    for dense in decode_shares(layout, parts[name], getattr(torch, digests[name].split()[0])):
        assert digest(dense) == digests[name]


def test_dequantization_equals_torchao() -> None:
    tensors = load_file(TORCHAO)
    with safe_open(TORCHAO, "pt") as file:
        digests, types = (json.loads(file.metadata()[key]) for key in ("digests", "types"))
    for name, expected in digests.items():
        layout = TorchAo(FormatContext(torch.bfloat16, {"quant_type": types[name]})).describe_layer("layer", "linear")
        own = {key.partition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        for dense in decode_shares(layout, own, torch.bfloat16):
            assert digest(dense) == expected, name


def test_dequantization_equals_auto_gptq() -> None:
    tensors = load_file(write_gptq.GPTQ)
    with safe_open(write_gptq.GPTQ, "pt") as file:
        digests = json.loads(file.metadata()["digests"])
    for name, (bits, ordered) in write_gptq.SCHEMES.items():
        config = {"bits": bits, "group_size": write_gptq.GROUP, "desc_act": ordered}
        layout = Gptq(FormatContext(torch.float16, config)).describe_layer("layer", "linear")
        own = {key.partition(".")[2]: tensor for key, tensor in tensors.items() if key.partition(".")[0] == name}
        for dense in decode_shares(layout, own, torch.float16, write_gptq.OUTPUTS):
            assert digest(dense) == digests[name], name


def test_torchao_needs_the_zero_points_of_types_that_store_them() -> None:
    """Intx types store each zero point, of symmetric weights zeros; the others are symmetric and
    may store none."""
    scale = torch.full((OUTPUTS, 4), 0.5)
    tensors = {"_weight_qdata": torch.ones(OUTPUTS, INPUTS, dtype=torch.int8), "_weight_scale": scale}
    data = {"weight_dtype": {"_data": "int4"}, "granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}}
    for name in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        config = {"quant_type": {"default": {"_type": name, "_version": 2, "_data": data}}}
        layout = TorchAo(FormatContext(torch.float32, config)).describe_layer("a", "linear")
        with pytest.raises(CheckpointError, match="layer._weight_zero_point is missing"):
            decode(layout, tensors)
        zeros = torch.full((OUTPUTS, 4), -3, dtype=torch.int8)
        assert decode(layout, tensors | {"_weight_zero_point": zeros}).dequantize(torch.float32).unique().tolist() == [2.0]
    layout = TorchAo(FormatContext(torch.float32, {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}}))
    tensors["_weight_scale"] = scale[:, :1]
    assert decode(layout.describe_layer("a", "linear"), tensors).dequantize(torch.float32).unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("algorithm", "store"), [("FP8", checkpoints.modelopt_fp8), ("MXFP8", checkpoints.mxfp8), ("NVFP4", checkpoints.modelopt)]
)
def test_modelopt_checkpoints_without_quantization_config(algorithm: str, store: Any, tmp_path: Path) -> None:
    """Only `hf_quant_config.json` describes the weights, as ModelOpt wrote them before 0.29."""
    stored, plain = make_pair("LlamaForCausalLM", "modelopt", tmp_path, store)
    config = json.loads((stored / "config.json").read_text())
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    described = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (stored / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": described}))
    assert read_model_config(stored).quantization == "modelopt"
    got = logits_of(open_session(stored, quantization="modelopt", gemm_kernel="torch"))
    torch.testing.assert_close(got, reference_logits(plain), rtol=1e-3, atol=1e-3)
    weights = (module for module in open_session(stored, quantization="modelopt", gemm_kernel="unpacked").model.modules())
    dense = load_file(plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert any(torch.equal(tensor, dense) for module in weights for tensor in getattr(getattr(module, "gemm", None), "tensors", ()))


def test_torchao_says_whether_inputs_are_quantized() -> None:
    for name, expected in (("Int8WeightOnlyConfig", False), ("Int8DynamicActivationInt8WeightConfig", True)):
        config = {"quant_type": {"default": {"_type": name, "_version": 2}}}
        layout = TorchAo(FormatContext(torch.float32, config)).describe_layer("a", "linear")
        tensors = {"_weight_qdata": torch.zeros(OUTPUTS, INPUTS, dtype=torch.int8), "_weight_scale": torch.ones(OUTPUTS, 1)}
        assert decode(layout, tensors).quantizes_inputs is expected


def test_scales_of_exponents() -> None:
    """Block scales in float8_e8m0fnu (ue8m0) are the powers of two that they stand for."""
    layout = Fp8(FormatContext(torch.bfloat16, {"quant_method": "fp8", "weight_block_size": [8, 32], "scale_fmt": "ue8m0"}))
    quantized, exponents = (torch.randn(OUTPUTS, INPUTS) * 50).to(torch.float8_e4m3fn), torch.randint(-6, 3, (2, 4))
    tensors = {"weight": quantized, "weight_scale_inv": torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)}
    got = decode(layout.describe_layer("layer", "linear"), tensors).dequantize(torch.float32)
    spread = exponents.repeat_interleave(8, 0).repeat_interleave(32, 1)
    assert torch.equal(got, quantized.float() * torch.exp2(spread.float()))


BROKEN = ("shorter", "longer", "other dtype", "missing")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_broken_tensor_is_named(dialect: str, tmp_path: Path) -> None:
    """Each tensor of a layer, of a wrong shape or dtype or absent: the error names it."""
    config, store = DIALECTS[dialect]
    torch.manual_seed(0)
    registry = load_own_plugins()
    found = registry.load(registry.get("weight_format", config["quant_method"]))(FormatContext(torch.float32, config))
    good, ignored = store(64, 128)[0], "|".join((*found.ignored_weights, "^$"))
    layout = found.describe_layer("model.layers.0.mlp.up_proj", "linear")
    decode(layout, {key: tensor for key, tensor in good.items() if not re.match(ignored, f"layer.{key}")}, 64, 128)
    for (name, tensor), how in itertools.product(good.items(), BROKEN):
        if re.match(ignored, f"layer.{name}") or (how == "missing" and layout.list_tensors(128, (64,))[name].optional):
            continue
        tensors = {key: value for key, value in good.items() if not re.match(ignored, f"layer.{key}")}
        del tensors[name]
        if how == "other dtype":
            tensors[name] = tensor.float() if not tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=torch.int32)
        elif how != "missing":
            tensors[name] = tensor[:-1] if how == "shorter" and tensor.dim() else torch.cat((tensor.reshape(-1), tensor.reshape(-1)[:1]))
        with pytest.raises(CheckpointError, match=rf"layer\.{name}\b"):
            decode(layout, tensors, 64, 128)


def test_an_order_may_repeat_inputs() -> None:
    order = torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    weight = CanonicalWeight(
        WeightScheme("int8", (1, 0), ordered=True), 3, torch.tensor([[3, 1, 2, 0]], dtype=torch.int8), torch.tensor([[2.0]]), order=order
    )
    assert weight.dequantize(torch.float32).tolist() == [[2.0, 4.0, 6.0]]


@pytest.mark.parametrize("target", [Int8, Int4])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_quantization_while_loading_stays_close(target: type, architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    want = reference_logits(folder)
    bound = 0.05 if target is Int8 else 0.4
    for dtype in (torch.float32, torch.bfloat16):
        got = logits_of(open_session(folder, dtype=dtype, quantization=target.__name__.lower()))
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < bound


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"])
def test_formats_read_each_name_of_the_list_of_unquantized_layers(name: str) -> None:
    found = Awq(FormatContext(torch.float32, {"bits": 4, name: ["down_proj"]}))
    assert isinstance(found.describe_layer("model.layers.0.mlp.down_proj", "linear"), PlainLayer)
    assert not isinstance(found.describe_layer("model.layers.0.mlp.up_proj", "linear"), PlainLayer)


def test_ignored_layers_stay_unquantized() -> None:
    context = FormatContext(torch.float32)
    found = Int4(context, Int4Options(ignore=("layers.0.", "o_proj$"), group_size=32))
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"):
        assert isinstance(found.describe_layer(name, "linear"), PlainLayer)
    assert isinstance(found.describe_layer("lm_head", "head"), PlainLayer)
    assert isinstance(Int8(context).describe_layer("model.layers.1.mlp.up_proj", "linear"), OnlineInt8Layer)
    quantized = Gptq(FormatContext(torch.float32, {"bits": 4, "dynamic": {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 8}}}))
    assert isinstance(quantized.describe_layer("model.layers.0.mlp.down_proj", "linear"), PlainLayer)
    assert getattr(quantized.describe_layer("model.layers.0.mlp.up_proj", "linear"), "bits", 0) == 8
    assert getattr(quantized.describe_layer("model.layers.0.mlp.gate_proj", "linear"), "bits", 0) == 4


@pytest.mark.parametrize("target", [Int8, Int4])
def test_a_tied_head_is_quantized_if_the_user_asks(target: type[Int8]) -> None:
    """Also after other weights are loaded, at the addresses of the product before."""
    options = target.options_class(head=True)
    plain = build_context("cpu", torch.float32, 16)
    context = replace(plain, weight_format=target(FormatContext(torch.float32), options), gemm_kernels=make_gemm_kernels(plain))
    embedding = VocabEmbedding(context, "model.embed_tokens", 70, 64)
    head, hidden = Head(context, "lm_head", 70, 64, embedding), torch.randn(3, 64)
    places = set()
    for _ in range(2):
        embedding.weight.data = torch.randn(70, 64)
        head.process_weights_after_loading()
        assert head.gemm is not None
        places.add(head.gemm.tensors[0].data_ptr())
        assert head.gemm.tensors[0].dtype == torch.int8
        want = hidden @ embedding.weight.data.t()
        assert 0 < float((head(hidden) - want).norm() / want.norm()) < 0.02
    assert len(places) == 1


def test_schemes_by_layer_within_a_merged_layer(tmp_path: Path) -> None:
    """The down, key and gate projections have another scheme than the others; a layer is left
    out."""
    stored, plain = make_pair("LlamaForCausalLM", "int8", tmp_path)
    other, _ = make_pair("LlamaForCausalLM", "packed", tmp_path / "other")
    tensors, numbers = load_file(stored / "model.safetensors"), load_file(plain / "model.safetensors")
    theirs, their_numbers = load_file(other / "model.safetensors"), load_file(tmp_path / "other/plain/model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["second"] = dict(DIALECTS["packed"][0]["config_groups"]["group_0"])
    groups["second"] |= {"targets": ["re:.*(down|gate|k)_proj$"], "format": "pack-quantized"}
    config["quantization_config"]["ignore"].append("model.layers.1.self_attn.v_proj")
    for name in list(tensors):
        if any(f"{each}_proj" in name for each in ("down", "gate", "k")) or name.startswith("model.layers.1.self_attn.v_proj."):
            del tensors[name]
    tensors |= {name: tensor for name, tensor in theirs.items() if any(f"{each}_proj" in name for each in ("down", "gate", "k"))}
    numbers |= {name: tensor for name, tensor in their_numbers.items() if any(f"{each}_proj" in name for each in ("down", "gate", "k"))}
    tensors["model.layers.1.self_attn.v_proj.weight"] = numbers["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    (stored / "config.json").write_text(json.dumps(config))
    got = logits_of(open_session(stored, quantization="compressed-tensors"))
    torch.testing.assert_close(got, reference_logits(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("target", "config", "sentence"),
    [
        (CompressedTensors, {"config_groups": [1]}, r"config_groups is \[1\]; a JSON object is expected"),
        (CompressedTensors, {"config_groups": {"a": "x"}}, "config_groups.a is 'x'; a JSON object is expected"),
        (CompressedTensors, {"config_groups": {"a": {"weights": "x"}}}, "config_groups.a.weights is 'x'; a JSON object"),
        (CompressedTensors, {"config_groups": {"a": {"input_activations": [8]}}}, r"a.input_activations is \[8\]; a JSON object"),
        (CompressedTensors, {"config_groups": {"a": {"weights": {"group_size": "x"}}}}, "a.weights.group_size is 'x'; a number"),
        (CompressedTensors, {"config_groups": {"a": {"targets": "Linear"}}}, "a.targets is 'Linear'; a list of strings is expected"),
        (CompressedTensors, {"config_groups": {"a": {"targets": ["re:*x"]}}}, r"a.targets has the wrong regular expression '\*x' \("),
        (CompressedTensors, {"config_groups": {"a": {}}, "ignore": ["re:("]}, r"ignore has the wrong regular expression '\('"),
        (CompressedTensors, {"config_groups": {"a": {}}, "ignore": "lm_head"}, "ignore is 'lm_head'; a list of strings"),
        (CompressedTensors, {"config_groups": {"a": {}}, "sparsity_config": "dense"}, "sparsity_config is 'dense'; a JSON object"),
        (Gptq, {"bits": 4, "dynamic": ["a"]}, r"dynamic is \['a'\]; a JSON object is expected"),
        (Gptq, {"bits": 4, "dynamic": {"+:(": {}}}, r"dynamic has the wrong regular expression '\('"),
        (Gptq, {"bits": 4, "dynamic": {".*": [8]}}, r"dynamic\..\* is \[8\]; a JSON object is expected"),
        (Gptq, {"bits": 4, "modules_to_not_convert": 3}, "modules_to_not_convert is 3; a list of strings"),
        (Gptq, {"bits": 4, "modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize is 3; a list of lists"),
        (Gptq, {"bits": 4, "modules_in_block_to_quantize": ["up_proj"]}, "modules_in_block_to_quantize is 'up_proj'; a list of strings"),
        (Awq, {"bits": 4, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; a list of strings"),
        (Fp8, {"quant_method": "fp8", "ignored_layers": ["re:("]}, "ignored_layers has the wrong regular expression"),
        (Fp8, {"quant_method": "fp8", "weight_block_size": 128}, "blocks of 128; two positive sizes"),
        (ModelOpt, {"quant_algo": ["FP8"]}, r"quant_algo is \['FP8'\]; of ModelOpt's formats"),
        *(
            (TorchAo, {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, **wrong}}}, sentence)
            for wrong, sentence in (
                ({"_version": "2"}, "quant_type._version is '2'; a number"),
                ({"_data": "x"}, "quant_type._data is 'x'; a JSON object"),
                ({"_data": {"granularity": "PerRow"}}, "quant_type.granularity is 'PerRow'; a JSON object"),
            )
        ),
        # schemes that are not read
        (Gptq, {"bits": 5}, r"bits is 5; of GPTQ's numbers of bits 2, 3, 4, 8 are read"),
        (Gptq, {"bits": 4, "group_size": 0}, "group_size is 0"),
        (Gptq, {"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (Awq, {"bits": 4, "version": "gemv"}, "version is 'gemv'"),
        (Awq, {"bits": 8}, "bits is 8"),
        (W4AFp8, {"group_size": 64}, "group_size is 64"),
        (TorchAo, {"quant_type": "int4_weight_only"}, "quant_type is 'int4_weight_only'; of torchao's types"),
        (TorchAo, {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2}}}, "quant_type is 'Int4WeightOnlyConfig'"),
        (TorchAo, {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "version 1 of Int8WeightOnlyConfig, which"),
        (
            TorchAo,
            {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": {"_type": "PerTensor"}}}}},
            "granularity 'PerTensor' with Int8WeightOnlyConfig",
        ),
        (ModelOpt, {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (CompressedTensors, {}, "config_groups is empty"),
        (
            CompressedTensors,
            {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 6, "type": "int", "strategy": "channel"}}}},
            r"config_groups.a stores weights as 6-bit int by channel \(pack-quantized\)",
        ),
        (CompressedTensors, {"config_groups": {"a": {}}, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_fields_of_a_wrong_type_and_unknown_schemes_are_refused(target: type, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        target(FormatContext(torch.float32, config)).describe_layer("model.layers.0.mlp.up_proj", "linear")


def test_broken_tensors_are_named(tmp_path: Path) -> None:
    stored, _ = make_pair("LlamaForCausalLM", "gptq 4", tmp_path)
    good = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"

    def refuse(sentence: str, **changes: torch.Tensor | None) -> None:
        tensors = dict(good)
        for key, value in changes.items():
            del tensors[f"{name}.{key}"]
            if value is not None:
                tensors[f"{name}.{key}"] = value
        save_file(tensors, stored / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=sentence):
            open_session(stored, quantization="gptq")

    refuse("lacks model.layers.0.mlp.down_proj.qzeros", qzeros=None)
    refuse(r"down_proj.qweight has the shape \[8, 64\], but \[16, 64\]", qweight=good[f"{name}.qweight"][:8].clone())
    refuse("down_proj.scales is stored as int32, but float32 is expected", scales=good[f"{name}.scales"].int())
    refuse("g_idx permutes the inputs, but quantization_config does not say so", g_idx=good[f"{name}.g_idx"].flip(0).contiguous())


@pytest.mark.parametrize("group", [-1, 4])
def test_groups_that_the_scales_lack_are_refused(group: int, tmp_path: Path) -> None:
    stored, _ = make_pair("LlamaForCausalLM", "gptq 4 ordered", tmp_path)
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.g_idx"][5] = group
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="g_idx names groups outside 0 to 3: download"):
        open_session(stored, quantization="gptq")


def test_a_named_kernel_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    stored, _ = make_pair("LlamaForCausalLM", "int8", tmp_path)
    with pytest.raises(ConfigurationError, match="gemm kernel 'cpu_int8' does not multiply .*it takes no zero points"):
        session_of_int8_with_zeros(stored)


def session_of_int8_with_zeros(stored: Path) -> Session:
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (stored / "config.json").write_text(json.dumps(config))
    tensors = load_file(stored / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith("weight_scale"):
            tensors[name.replace("weight_scale", "weight_zero_point")] = torch.ones_like(tensor, dtype=torch.int8)
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    return open_session(stored, quantization="compressed-tensors", gemm_kernel="cpu_int8")


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [dialect for dialect in DIALECTS if "ordered" not in dialect and "gptq 3" not in dialect])
def test_conformance_of_stored_formats(dialect: str) -> None:
    config = DIALECTS[dialect][0]
    targets = (Gptq, Awq, CompressedTensors, ModelOpt, W8A8Int8, W8A8Fp8, W4AFp8, TorchAo, Fp8)
    names = ("gptq", "awq", "compressed-tensors", "modelopt", "w8a8_int8", "w8a8_fp8", "w4afp8", "torchao", "fp8")
    base: type = dict(zip(names, targets, strict=True))[config["quant_method"]]

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if dtype == torch.float8_e4m3fn and "scale" in name:
            return torch.full(shape, 0.5).to(dtype)
        return Mxfp4.make_conformance_tensor("scales", shape, dtype) if dtype == torch.uint8 and "scale" in name else None

    stored = type("Stored", (base,), {"conformance_config": config, "make_conformance_tensor": staticmethod(make)})
    assert failures("weight_format", stored) == {}


def test_a_checkpoint_with_scalar_tensors(tmp_path: Path) -> None:
    save_file({"scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    ((name, tensor),) = weights_of(tmp_path)
    assert (name, tensor.shape, tensor[...].item()) == ("scale", (), 3.0)
