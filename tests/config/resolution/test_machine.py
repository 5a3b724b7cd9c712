"""Sizes that follow from machine and model: running requests, and steps captured as CUDA graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from frame.checkpoint.model_config import EMBEDDED
from frame.config.hardware import Accelerator, Hardware
from frame.config.resolution.drafter import resolve_draft_model
from frame.config.resolution.machine import MAX_PROMPT_TOKENS, MAX_RUNNING, MIN_RUNNING, count_weights, launch_bound_tokens
from frame.config.resolution.parallel import find_conflicts
from frame.config.resolve import ResolveError, resolve
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.interfaces.model import ModelConfig
from frame.core.interfaces.parallel import ParallelPlan
from frame.plugins.loader import load_registry
from tests.model_configs import LLAMA

LLAMA_8B = dataclasses.replace(
    LLAMA, num_layers=32, hidden_size=4096, vocab_size=128256, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128,
    max_context=8192, config={"intermediate_size": 14336},
)  # fmt: skip
H200 = Hardware(cpu_cores=8, memory_bytes=64 << 30, accelerators=(Accelerator("cuda", "H200", (9, 0), 140 << 30),) * 2)

LINKED = dataclasses.replace(H200, accelerators=tuple(dataclasses.replace(each, is_linked=True) for each in H200.accelerators))

EIGHT = dataclasses.replace(LINKED, accelerators=LINKED.accelerators * 4)


def resolved(model_config: ModelConfig = LLAMA_8B, tp: int = 1, **execution: Any) -> Any:
    records = load_registry(installed=False).all_records()
    config = FrameConfig.model_validate({"model": {"path": EMBEDDED}, "parallel": {"tp": tp}, "execution": execution})
    return resolve(config, H200, model_config, records)


def test_stages_capture_micro_batches_of_decodes() -> None:
    sections: dict[str, Any] = {"model": {"path": EMBEDDED}, "parallel": {"pp": 2}, "execution": {"device": "cuda"}}
    config = FrameConfig.model_validate(sections | {"scheduler": {"max_running_requests": 33}})
    result = resolve(config, H200, LLAMA_8B, load_registry(installed=False).all_records())
    assert (result.cuda_graph_max_bs, result.prompt_graph_max_tokens) == (17, 0)
    assert "stages exchange tensors" in result.reasons["execution.prompt_graph_max_tokens"]


def test_graphs_cover_fewer_tokens_for_large_layers() -> None:
    small = dataclasses.replace(LLAMA_8B, hidden_size=1024, num_heads=16, config={"intermediate_size": 3072})
    sparse = {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    experts = dataclasses.replace(LLAMA_8B, hidden_size=2048, num_kv_heads=4, num_experts=128, config=sparse)
    latent = dataclasses.replace(
        LLAMA_8B, hidden_size=7168, num_heads=128, kind="mla", latent=(512, 64), head_dim=192,
        config={"intermediate_size": 18432, "q_lora_rank": 1536},
    )  # fmt: skip
    tokens = [launch_bound_tokens(model_config) for model_config in (LLAMA_8B, small, experts, latent)]
    assert tokens == [512, MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS, 192]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("machine", "parallel", "expected"),
    [
        (LINKED, {"tp": 2}, "p2p"),
        (LINKED, {"tp": 2, "collective": "nccl"}, "nccl"),
        (LINKED, {"tp": 4, "nnodes": 2, "dist_init_addr": "10.0.0.1:29500"}, "nccl"),
        (LINKED, {}, "single"),
        (LINKED, {"pp": 2}, "nccl"),
        (EIGHT, {"tp": 2}, "p2p"),
        (EIGHT, {"tp": 8}, "nccl"),  # p2p was measured on two cards
        (EIGHT, {"tp": 8, "collective": "p2p"}, "p2p"),
        (H200, {"tp": 2}, "nccl"),
        (H200, {"tp": 2, "collective": "p2p"}, "p2p"),
    ],
)
def test_linked_devices_sum_over_their_links(machine: Hardware, parallel: dict[str, Any], expected: str, deterministic: bool) -> None:
    sections = {"model": {"path": EMBEDDED}, "parallel": parallel, "execution": {"device": "cuda", "deterministic": deterministic}}
    result = resolve(FrameConfig.model_validate(sections), machine, LLAMA_8B, load_registry(installed=False).all_records())
    assert result.choice("collective").name == expected
    assert ("over links" in result.reasons.get("parallel.collective", "")) == (expected == "p2p" and "collective" not in parallel)


def test_graph_sizes_default_from_model_and_machine() -> None:
    result = resolved(device="cuda")
    assert (result.cuda_graph_max_bs, result.prompt_graph_max_tokens) == (result.max_running_requests, 512)
    assert "launch" in result.reasons["execution.prompt_graph_max_tokens"]
    assert resolved(device="cuda", prompt_graph_max_tokens=0).prompt_graph_max_tokens == 0
    assert resolved(device="cuda", prompt_graph_max_tokens=777).prompt_graph_max_tokens == 777


def test_steps_of_several_ranks_are_captured_too() -> None:
    result = resolved(device="cuda", tp=2)
    assert (result.cuda_graph_max_bs, result.prompt_graph_max_tokens) == (result.max_running_requests, 512)


@pytest.mark.parametrize(
    ("execution", "why"),
    [({"device": "cpu"}, "platform cpu captures no graphs"), ({"device": "cuda", "torch_compile": True}, "captures its own graphs")],
)
def test_steps_that_cannot_be_captured_have_no_graphs_and_an_explicit_size_is_refused(execution: dict[str, Any], why: str) -> None:
    result = resolved(**execution)
    assert result.prompt_graph_max_tokens == 0
    assert why in result.reasons["execution.prompt_graph_max_tokens"]
    with pytest.raises(ResolveError, match=why):
        resolved(**execution, prompt_graph_max_tokens=64)


@pytest.mark.parametrize(
    ("architecture", "kind", "why"),
    [("DeepseekV32ForCausalLM", "mla", "selects keys"), ("WhisperForConditionalGeneration", "mha", "encoder runs")],
)
def test_some_models_have_graphs_of_decodes_alone(architecture: str, kind: Any, why: str) -> None:
    latent = (512, 64) if kind == "mla" else None
    model_config = dataclasses.replace(LLAMA_8B, architecture=architecture, kind=kind, latent=latent)
    records = load_registry(installed=False).all_records()
    result = resolve(FrameConfig.model_validate({"model": {"path": EMBEDDED}}), H200, model_config, records)
    assert result.cuda_graph_max_bs == result.max_running_requests
    assert result.prompt_graph_max_tokens == 0
    assert why in result.reasons["execution.prompt_graph_max_tokens"]


@pytest.mark.parametrize(
    ("gib", "tp", "cache", "running"),
    [
        (140, 1, {}, MAX_RUNNING),
        (80, 1, {}, 448),  # 72 GiB without 16 GiB of weights, 128 KiB for each token
        (80, 2, {}, MAX_RUNNING),
        (24, 1, {}, MIN_RUNNING),
        (140, 1, {"mem_fraction": 0.4}, 320),
        (140, 1, {"kv_dtype": "fp8_e4m3", "mem_fraction": 0.4}, MAX_RUNNING),
        (140, 1, {"max_total_tokens": 8192}, MIN_RUNNING),
    ],
)
def test_max_running_requests_follows_from_the_memory(gib: int, tp: int, cache: dict[str, Any], running: int) -> None:
    machine = dataclasses.replace(H200, accelerators=(Accelerator("cuda", "card", (9, 0), gib << 30),) * 2)
    config = FrameConfig.model_validate({"model": {"path": EMBEDDED}, "parallel": {"tp": tp}, "cache": cache})
    result = resolve(config, machine, LLAMA_8B, load_registry(installed=False).all_records())
    assert result.max_running_requests == running
    assert "KV cache holds about" in result.reasons["scheduler.max_running_requests"]
    assert result.cuda_graph_max_bs == running  # every decode batch has a graph


@pytest.mark.parametrize("running", [100, 777, 1024])
def test_decode_graphs_cover_all_running_requests(running: int) -> None:
    records = load_registry(installed=False).all_records()
    config = FrameConfig.model_validate({"model": {"path": EMBEDDED}, "scheduler": {"max_running_requests": running}})
    result = resolve(config, H200, LLAMA_8B, records)
    assert result.max_running_requests == running
    assert result.cuda_graph_max_bs == running
    drafts = {"speculative": {"algorithm": "ngram", "num_steps": 3}}
    result = resolve(FrameConfig.model_validate({**config.model_dump(), **drafts}), H200, LLAMA_8B, records)
    assert result.cuda_graph_max_bs == min(4 * running, 1024)  # each token of a draft is a row


@pytest.mark.parametrize(("setting", "value"), [("num_steps", 5), ("draft_model_path", "drafts"), ("synthetic_acceptance_length", 2)])
def test_settings_of_drafts_ask_for_a_drafter(setting: str, value: Any) -> None:
    config = FrameConfig.model_validate({"model": {"path": EMBEDDED}, "speculative": {setting: value}})
    with pytest.raises(ResolveError, match=rf"speculative\.{setting} is .*; name a drafter"):
        resolve(config, H200, LLAMA_8B, load_registry(installed=False).all_records())


def resolve_tree(speculative: dict[str, Any], options: dict[str, Any], model: dict[str, Any], attention: str | None = None) -> Any:
    name = speculative.get("algorithm", "mtp")
    sections = {
        "model": {"path": EMBEDDED},
        "speculative": {"algorithm": name, "adaptive": False, **speculative},
        "plugins": {"options": {f"drafter/{name}": options}},
        "parallel": {"pp": model.pop("pp", 1)},
        "attention": {"backend": attention},
    }
    config = {**LLAMA_8B.config, "num_nextn_predict_layers": 1}
    records = load_registry(installed=False).all_records()
    return resolve(FrameConfig.model_validate(sections), H200, dataclasses.replace(LLAMA_8B, config=config, **model), records)


@pytest.mark.parametrize(
    ("speculative", "options", "model", "sentence"),
    [
        ({"algorithm": "ngram"}, {}, {}, r"plugins.options.drafter/ngram.eagle_topk is unknown"),
        ({"num_steps": 5}, {"eagle_topk": 8}, {}, r"\(num_steps - 1\) \* eagle_topk must be at most 31"),
        ({"num_steps": 2}, {"num_draft_tokens": 17}, {}, "num_draft_tokens may be 3 to 7, not 17"),
        ({}, {"num_draft_tokens": 3}, {}, "num_draft_tokens may be 4 to 11, not 3"),
        ({}, {"eagle_topk": 1, "num_draft_tokens": 6}, {}, "num_draft_tokens may be 4 to 4, not 6"),
        ({"synthetic_acceptance_length": 2}, {}, {}, "trees, which do not work with drafts that are accepted at random .*; remove"),
        ({}, {}, {"sliding_window": 128}, "trees, which do not work with layers with a window; remove"),
        ({}, {}, {"pp": 2}, r"trees, which do not work with stages \(parallel.pp\); remove"),
    ],
)
def test_trees_that_do_not_fit_are_refused(
    speculative: dict[str, Any], options: dict[str, Any], model: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        resolve_tree(speculative, {"eagle_topk": 2, **options}, model, "torch_native")


def test_trees_ask_the_attention_backend_for_a_mask() -> None:
    assert resolve_tree({}, {"eagle_topk": 2}, {}, "torch_native").max_drafted == 6
    with pytest.raises(ConfigurationError, match="has no mask for trees of drafted tokens"):
        resolve_tree({}, {"eagle_topk": 2}, {}, "flex_attention")
    assert resolve_tree({}, {}, {}, "flex_attention").max_drafted == 3


def test_the_draft_model_of_trees_gets_the_attention_backend_of_the_target() -> None:
    target = resolve_tree({"algorithm": "draft_model", "draft_model_path": EMBEDDED}, {"eagle_topk": 2}, {})
    asked: list[FrameConfig] = []

    def note(config: FrameConfig) -> Any:
        asked.append(config)
        return target

    resolve_draft_model(target, target.model, note)
    assert asked[0].attention.backend == target.choice("attention_backend").name == "triton"


@pytest.mark.parametrize(("chosen_format", "gib"), [(None, 131), ("none", 131), ("fp8", None), ("int4", None)])
def test_weights_that_cannot_fit_are_refused_with_the_arithmetic(chosen_format: str | None, gib: int | None) -> None:
    """A format that quantizes while loading makes them fit."""
    large = dataclasses.replace(LLAMA_8B, num_layers=80, hidden_size=8192, num_heads=64, config={"intermediate_size": 28672})
    small = dataclasses.replace(H200, accelerators=(Accelerator("cuda", "H100", (9, 0), 80 << 30),))
    conflicts = list(find_conflicts(ParallelPlan(), large, load_registry(installed=False).get("platform", "cuda"), small, chosen_format))
    sentences = [str(each) for each in conflicts]
    assert sentences == [] if gib is None else f"at least {gib} GiB / 1 rank(s) = {gib} GiB a rank" in sentences[0]


@pytest.mark.parametrize(("devices", "gib", "change"), [(8, 80, 2), (8, 40, 4), (8, 24, 8), (4, 24, None), (6, 40, 4)])
def test_the_change_for_weights_that_do_not_fit_is_one_that_fits(devices: int, gib: int, change: int | None) -> None:
    """131 GiB of weights, whose 8 KV heads 3, 5, 6 or 7 ranks cannot share."""
    large = dataclasses.replace(LLAMA_8B, num_layers=80, hidden_size=8192, num_heads=64, config={"intermediate_size": 28672})
    machine = dataclasses.replace(H200, accelerators=(Accelerator("cuda", "card", (9, 0), gib << 30),) * devices)
    (conflict,) = find_conflicts(ParallelPlan(), large, load_registry(installed=False).get("platform", "cuda"), machine, None)
    assert conflict.change == (None if change is None else f"parallel.tp: {change}")


@pytest.mark.parametrize(
    ("layers", "hidden", "config", "parameters"),
    [
        # Llama 4 Maverick: experts in every second layer
        (48, 5120, {"intermediate_size": 8192, "interleave_moe_layer_step": 2}, 401e9),
        # Qwen3-30B-A3B
        (48, 2048, {"intermediate_size": 6144, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []}, 30.5e9),
        # Nemotron 3 Nano: a layer is attention, a recurrence or experts
        (52, 2688, {"intermediate_size": 1856, "moe_intermediate_size": 1856, "hybrid_override_pattern": "MEM*E"}, 31.6e9),
    ],
)
def test_the_count_of_weights_is_never_above_the_published_one(layers: int, hidden: int, config: dict[str, Any], parameters: float) -> None:
    large = dataclasses.replace(LLAMA_8B, num_layers=layers, hidden_size=hidden, num_heads=hidden // 128, num_experts=128, config=config)
    assert count_weights(large, None) <= 2 * parameters
    if "hybrid_override_pattern" not in config:
        assert count_weights(large, None) > 1.8 * parameters


def test_the_cache_of_grammars_follows_the_memory_of_the_host() -> None:
    config, records = FrameConfig.model_validate({"model": {"path": EMBEDDED}}), load_registry(installed=False).all_records()
    for memory, cache in ((8, 256), (64, 512), (1024, 2048)):
        assert resolve(config, dataclasses.replace(H200, memory_bytes=memory << 30), LLAMA_8B, records).grammar_cache == cache << 20
    chosen = FrameConfig.model_validate({"model": {"path": EMBEDDED}, "sampling": {"grammar_cache": 0}})
    assert resolve(chosen, H200, LLAMA_8B, records).grammar_cache == 0


@pytest.mark.parametrize(
    ("cores", "sections", "count", "why"),
    [
        (32, {}, 8, "half of the cores"),
        (12, {}, 6, "half of the cores"),
        (6, {}, 0, "6 cores are few"),
        (16, {"parallel": {"dp": 2}}, 4, "half of the cores"),
        (32, {"speculative": {"algorithm": "ngram"}}, 0, "no drafts"),
        (32, {"sampling": {"grammar_workers": 0}}, 0, "grammar_workers is 0"),
        (32, {"scheduler": {"max_running_requests": 32}}, 0, "fewer than 64 requests"),
        (32, {"execution": {"device": "cpu"}}, 0, "the same cores"),
        (4, {"sampling": {"grammar_mask_processes": 3}}, 3, None),
    ],
)
def test_processes_fill_masks_where_a_gpu_has_many_cores(cores: int, sections: dict[str, Any], count: int, why: str | None) -> None:
    config = FrameConfig.model_validate({"model": {"path": EMBEDDED}, **sections})
    hardware = dataclasses.replace(H200, cpu_cores=cores)
    result = resolve(config, hardware, LLAMA_8B, load_registry(installed=False).all_records())
    assert result.grammar_mask_processes == count
    reason = result.reasons.get("sampling.grammar_mask_processes")
    assert reason is None if why is None else why in str(reason)
