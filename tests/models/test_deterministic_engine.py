"""Engines of the batch-invariant mode on a CPU: bitwise equal log-probabilities in company, in
chunks, after cache hits and preemption, with drafts, and as a prompt; and what the mode refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.entrypoints.configuration.prepare import prepare
from tests.models.deterministic_engine import DRAWN, LIKELY, REPEATED, check_engine, make_engine, score_one, write_adapter


@pytest.mark.slow  # in float32, the logits of its architecture are compared in test_deterministic.py
@pytest.mark.parametrize("others", [24, pytest.param(255, marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"])
def test_embedded_model(dtype: str, others: int) -> None:
    """Latents, experts and drafts of both kinds."""
    expected = check_engine(find_model(EMBEDDED), "cpu", dtype, others, drafters={"ngram": REPEATED, "mtp": LIKELY})
    assert score_one(make_engine(find_model(EMBEDDED), "cpu", dtype), DRAWN, 3) == expected  # a fresh start


FEWER = (33, 64)  # chunks, off and on the bounds of pages; an engine for each is a quarter of a test's time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "sections"),
    [
        ("Qwen3NextForCausalLM", {}),
        ("GptOssForCausalLM", {}),
        ("DeepseekV32ForCausalLM", {}),
        ("LlamaForCausalLM", {"model": {"quantization": "fp8"}}),
        ("LlamaForCausalLM", {"cache": {"kv_dtype": "int8"}}),
        # the logits of each are compared in test_deterministic.py, those of the packed kernel below
        pytest.param("LlamaForCausalLM", {}, marks=pytest.mark.exhaustive),
        pytest.param("Qwen3MoeForCausalLM", {}, marks=pytest.mark.exhaustive),
        pytest.param("NemotronHForCausalLM", {}, marks=pytest.mark.exhaustive),
        pytest.param("Gemma3ForCausalLM", {}, marks=pytest.mark.exhaustive),
        pytest.param("LlamaForCausalLM", {"model": {"quantization": "int8", "gemm_kernel": "torch"}}, marks=pytest.mark.exhaustive),
    ],
)
def test_other_models(checkpoint: Callable[..., Path], architecture: str, sections: dict[str, Any]) -> None:
    check_engine(checkpoint(architecture), "cpu", "bfloat16", 24, chunks=FEWER, **sections)


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [EMBEDDED, "LlamaForCausalLM"])
def test_adapters(checkpoint: Callable[..., Path], tmp_path: Path, architecture: str, dtype: str) -> None:
    """A request with an adapter, among others with the same, with another or with none, and one
    without an adapter among all of these."""
    path = find_model(EMBEDDED) if architecture == EMBEDDED else checkpoint(architecture)
    adapters = {f"rank{rank}": write_adapter(path, tmp_path / f"rank{rank}", rank) for rank in (20, 5)}
    plain = score_one(make_engine(path, "cpu", dtype), DRAWN)
    assert check_engine(path, "cpu", dtype, 18, adapters=adapters, chunks=FEWER).logprobs != plain.logprobs
    assert score_one(make_engine(path, "cpu", dtype, {"": Path(), **adapters}), DRAWN, 18) == plain


def explain(path: Path | str, **sections: dict[str, Any]) -> str:
    """The sentence with which the mode is refused."""
    config = {"model": {"path": str(path), "skip_tokenizer_init": True}, **sections}
    config["execution"] = {"device": "cpu", "deterministic": True} | sections.get("execution", {})
    with pytest.raises(ConfigurationError) as error:
        prepare(FrameConfig.model_validate(config))
    return str(error.value)


def test_every_part_without_the_capability_is_named() -> None:
    text = explain(
        find_model(EMBEDDED),
        attention={"backend": "flex_attention"},
        parallel={"tp": 2, "ep": 2},
        moe={"dispatcher": "all_to_all"},
        execution={"torch_compile": True},
    )
    reason = r"its results depend on the other rows of a batch \(try execution.deterministic: false\)"
    for name in ("flex_attention", "all_to_all"):
        assert re.search(rf"rejected {name}\b.*{reason}", text)
    assert "execution.torch_compile is true" in text


def test_models_without_the_capability_are_refused(checkpoint: Callable[..., Path]) -> None:
    text = explain(checkpoint("LlamaForCausalLM"), model={"path": str(checkpoint("LlamaForCausalLM")), "implementation": "transformers"})
    assert "transformers" in text
    assert "its results depend on the other rows of a batch" in text


def test_quantized_weights_stay_packed_by_name(checkpoint: Callable[..., Path]) -> None:
    """The named kernel has the log-probabilities of dequantized weights, in less memory; experts
    are refused."""
    model = {"quantization": "int8"}
    dense = make_engine(checkpoint("LlamaForCausalLM"), "cpu", "bfloat16", model=model)
    packed = make_engine(checkpoint("LlamaForCausalLM"), "cpu", "bfloat16", model=model | {"gemm_kernel": "torch"})
    assert score_one(packed, DRAWN) == score_one(dense, DRAWN)
    kept = [{tensor.dtype for tensor in loop.runner.model.layers[0].mlp.gate_up_proj.gemm.tensors} for loop in (dense, packed)]
    assert torch.int8 not in kept[0] and torch.int8 in kept[1]
    with pytest.raises(ConfigurationError, match="multiplies no experts"):
        make_engine(checkpoint("Qwen3MoeForCausalLM"), "cpu", "bfloat16", model=model | {"gemm_kernel": "torch"})


def test_parts_with_the_capability_are_chosen() -> None:
    config = {"model": {"path": str(find_model(EMBEDDED))}, "execution": {"device": "cpu", "deterministic": True}}
    resolved = prepare(FrameConfig.model_validate(config)).resolved
    names = {kind: [choice.name for choice in choices] for kind, choices in resolved.plugins.items()}
    assert names["attention_backend"] == ["torch_native"]
    assert names["gemm_kernel"] == ["plain", "unpacked", "torch"]
    assert names["moe_runner"] == ["torch_native"]
