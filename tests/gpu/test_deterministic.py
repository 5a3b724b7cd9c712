"""The batch-invariant mode on a GPU: bitwise equal log-probabilities of engines with and without
graphs, for heads, latents and experts, and the proof of the products' shapes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.kernels.linear.invariant import InvariantMatmul, limit_workspaces
from frame.models.layers.weights.plain_gemm import InvariantGemm
from frame.testing.checkpoints import make_checkpoint
from tests.models.deterministic_engine import DRAWN, check_engine, make_engine, score_one, write_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

limit_workspaces()
WIDE = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_size": 256}
HEADS = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
MODELS = {
    "embedded": None,
    "heads": ("LlamaForCausalLM", HEADS),
    "experts": ("Qwen3MoeForCausalLM", {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}),
    "wide-latents": ("DeepseekV3ForCausalLM", WIDE),
}
WINDOWED = ("GptOssForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM", "Cohere2ForCausalLM")
OTHERS = (
    "Qwen3NextForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM", "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "Qwen2MoeForCausalLM", "CohereForCausalLM", *WINDOWED,
)  # fmt: skip
GRAPHS = {"cuda_graph_max_bs": 256, "prompt_graph_max_tokens": 512}
PLAIN = {"cuda_graph_max_bs": 0, "prompt_graph_max_tokens": 0}
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (64, 4096))  # outputs, inputs; the last: a router


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            model = MODELS[name]
            made[name] = find_model(EMBEDDED) if model is None else make_checkpoint(model[0], tmp_path_factory.mktemp(name), **model[1])
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("embedded", "bfloat16"), ("heads", "bfloat16"), ("heads", "float32"), ("experts", "bfloat16"), ("wide-latents", "bfloat16")],
)
def test_bits_do_not_depend_on_the_batch(path_of, name, dtype):
    captured = check_engine(path_of(name), "cuda", dtype, plain={"execution": PLAIN}, execution=GRAPHS)
    again = make_engine(path_of(name), "cuda", dtype, execution=GRAPHS)  # a fresh start
    assert score_one(again, DRAWN, 17) == captured


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_models(tmp_path, architecture):
    """Recurrent layers, biased experts, windows, caps of scores, chunks and selected keys."""
    graphs = GRAPHS | ({"prompt_graph_max_tokens": 0} if architecture in (*WINDOWED, "DeepseekV32ForCausalLM") else {})
    folder = make_checkpoint(architecture, tmp_path)
    check_engine(folder, "cuda", "bfloat16", 60, {"execution": PLAIN}, drafters={}, chunks=(33, 64), execution=graphs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters(path_of, tmp_path, dtype):
    """A row with an adapter, and one without among rows that have some."""
    path = path_of("heads")
    plain = score_one(make_engine(path, "cuda", dtype, execution=GRAPHS), DRAWN)
    adapters = {f"rank{rank}": write_adapter(path, tmp_path / f"rank{rank}", rank) for rank in (20, 5)}
    found = check_engine(path, "cuda", dtype, 60, {"execution": PLAIN}, adapters, chunks=(16, 64), execution=GRAPHS)
    assert found.logprobs != plain.logprobs
    assert score_one(make_engine(path, "cuda", dtype, {"": Path(), **adapters}, execution=GRAPHS), DRAWN, 18) == plain


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_weights(path_of, quantization):
    model = {"quantization": quantization}
    check_engine(path_of("heads"), "cuda", "bfloat16", others=60, drafters={}, plain={"execution": PLAIN}, execution=GRAPHS, model=model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_proven_in_less_than_a_second(dtype):
    weights = [torch.randn(shape, dtype=dtype, device="cuda") * 0.02 for shape in LLAMA_8B]
    weights[0][:16] @ weights[0][:1].t()  # loads the library
    torch.cuda.synchronize()
    began = time.perf_counter()
    products = [InvariantMatmul(weight) for weight in weights]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    print(f"{dtype}, {seconds:.2f} s:", {shape: product._rows.max_rows for shape, product in zip(LLAMA_8B, products, strict=True)})
    assert seconds < 2 if dtype is torch.float32 else seconds < 1
    for weight, product in zip(weights, products, strict=True):
        x = torch.randn(3000, weight.shape[1], dtype=dtype, device="cuda")
        whole = product(x)
        for first, rows in ((0, 1), (5, 1), (7, 3), (100, 256), (31, 700), (2999, 1), (0, 2049)):
            assert torch.equal(product(x[first : first + rows]), whole[first : first + rows]), (tuple(weight.shape), first, rows)
        torch.testing.assert_close(whole[:8].float(), x[:8].float() @ weight.float().t(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_for_few_rows_and_for_gates_have_the_bits_of_the_library(dtype):
    """The speed of the mode depends on them; a library that adds in another order costs it."""
    from frame.kernels.elementwise.activation import silu_mul

    for outputs, inputs in LLAMA_8B[:4]:
        gemm = InvariantGemm(torch.randn(outputs, inputs, dtype=dtype, device="cuda") * 0.02)
        x = torch.randn(1100, inputs, dtype=dtype, device="cuda")
        gated = silu_mul(gemm._product(x))
        for first, rows in ((0, 1), (5, 1), (7, 3), (9, 16), (30, 64), (3, 65), (31, 1069)):
            some = x[first : first + rows]
            assert torch.equal(gemm(some), gemm._product(some)), (outputs, inputs, rows)
            fused = gemm.multiply_gated(some)
            assert fused is None or torch.equal(fused, gated[first : first + rows]), (outputs, inputs, rows)
        kept = [rows for rows, plan in enumerate(gemm._fast._plans) if plan is not None]
        print(f"{dtype}, {outputs} x {inputs}: rows {kept}, gated {sum(map(bool, gemm._gated._gated_plans))}, many {gemm._gated._programs}")
        assert set(range(1, 17)) <= set(kept)
