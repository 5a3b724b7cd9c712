"""Configurations that cannot run, with the whole text that each prints; and choices of `auto` that
an installed package moves."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest

from frame.config.hardware import Hardware
from frame.config.resolution.plugins import KEYS
from frame.config.resolve import ResolveError, resolve
from frame.core.interfaces.attention import AttentionCapabilities
from frame.core.interfaces.gemm_kernel import GemmCapabilities, Speed
from frame.core.interfaces.model import ModelConfig
from frame.core.interfaces.moe import MoECapabilities
from frame.core.interfaces.plugin import PluginRecord, Reason
from frame.entrypoints.configuration.find_moves import find_moves
from frame.interfaces.parsing import ParserCapabilities
from tests.config.test_resolve import DEEPSEEK, H200, LAPTOP, LLAMA, config, names, record, records

UNMET = (Reason("it needs kernels>=2, installed is 1 (pip install 'kernels>=2')"),)


def theirs(kind: str, name: str, capabilities: object = None, **more: object) -> PluginRecord:
    """The record of an installed package."""
    return record(kind, name, capabilities, distribution="theirs", version="2.1", **more)


BLOCKS = theirs("moe_dispatcher", "blocks", MoECapabilities(("cpu",), layouts=("blocks",)), rank=-1)
TAKES_BLOCKS = theirs("moe_runner", "fused", MoECapabilities(("cpu",), layouts=("blocks",)), rank=9)


class Impossible(NamedTuple):
    """A configuration, beside the records of `records()` these, and what it prints."""

    sections: dict[str, dict[str, Any]]
    text: str
    model_config: ModelConfig = LLAMA
    hardware: Hardware = LAPTOP
    more: tuple[PluginRecord, ...] = ()
    without: tuple[str, ...] = ()  # kinds without records of `records()`


CASES = {
    "model": Impossible(
        {"model": {"implementation": "llama"}},
        "model.implementation: llama cannot serve this model, machine and configuration.\n"
        "  rejected llama (frame-serve 1): implements LlamaForCausalLM, not DeepseekV3ForCausalLM\n"
        "Nearest change: model.implementation: deepseek",
        DEEPSEEK,
    ),
    "model with ranks": Impossible(
        {"model": {"implementation": "fallback"}, "parallel": {"tp": 2}},
        "model.implementation: fallback cannot serve this model, machine and configuration.\n"
        "  rejected fallback (frame-serve 1): has no tensor parallelism (try parallel.tp: 1)\n"
        "Nearest change: parallel.tp: 1 (then fallback fits)",
    ),
    "attention backend": Impossible(
        {"attention": {"backend": "fast"}, "cache": {"page_size": 16}},
        "attention.backend: fast cannot serve this model, machine and configuration.\n"
        "  rejected fast (frame-serve 1): page size 16 is not among [32, 64] (try cache.page_size: 32)\n"
        "Nearest change: cache.page_size: 32 (then fast fits)",
        hardware=H200,
    ),
    "pair of attention backends": Impossible(
        {"attention": {"backend": "prefill=fast,decode=own"}},
        "attention.backend: no pair of backends with prefill: fast and decode: own serves this model, machine and configuration.\n"
        "  rejected own (theirs 2.1): beside fast, their caches differ: paged_nhd and own\n"
        "Nearest change: attention.backend: fast",
        hardware=H200,
        more=(theirs("attention_backend", "own", AttentionCapabilities(("cuda",), layout="own")),),
    ),
    "replicas": Impossible(
        {"parallel": {"tp": 2, "dp": 3}},
        "parallel.tp 2 x parallel.pp 1 x parallel.dp 3 = 6 ranks, but this machine has 4 cuda device(s).\nNearest change: parallel.dp: 2",
        hardware=H200,
    ),
    "weight format": Impossible(
        {"model": {"quantization": "awq"}},
        "model.quantization: awq cannot serve this model, machine and configuration.\n"
        "  rejected awq (frame-serve 1): does not load fp8 weights",
        dataclasses.replace(LLAMA, quantization="fp8"),
    ),
    "GEMM kernel": Impossible(
        {"model": {"gemm_kernel": "quick"}},
        "model.gemm_kernel: quick cannot serve this model, machine and configuration.\n"
        "  rejected quick (frame-serve 1): runs on cuda, not on cpu\n"
        "Nearest change: model.gemm_kernel: plain",
    ),
    "prefix cache": Impossible(
        {"cache": {"prefix": "large", "page_size": 16}},
        "cache.prefix: large cannot serve this model, machine and configuration.\n"
        "  rejected large (frame-serve 1): stores pages of 64 or 128 tokens, not of 16 (try cache.page_size: 64)\n"
        "Nearest change: cache.page_size: 64 (then large fits)",
    ),
    "MoE runner": Impossible(
        {"moe": {"runner": "grouped"}},
        "moe.runner: grouped cannot serve this model, machine and configuration.\n"
        "  rejected grouped (frame-serve 1): runs on cuda, not on cpu\n"
        "Nearest change: moe.runner: loop",
        DEEPSEEK,
    ),
    "MoE dispatcher beside a runner": Impossible(
        {"moe": {"dispatcher": "blocks", "runner": "loop"}},
        "moe.dispatcher: blocks and moe.runner: loop do not fit: blocks produces the layout blocks, loop takes tokens.\n"
        "Nearest change: moe.dispatcher: local",
        DEEPSEEK,
        more=(BLOCKS,),
    ),
    "MoE runner beside a dispatcher": Impossible(
        {"moe": {"dispatcher": "blocks", "runner": "loop"}},
        "moe.dispatcher: blocks and moe.runner: loop do not fit: blocks produces the layout blocks, loop takes tokens.\n"
        "Nearest change: moe.runner: fused",
        DEEPSEEK,
        more=(BLOCKS, TAKES_BLOCKS),
        without=("moe_dispatcher",),
    ),
    "no MoE pair": Impossible(
        {},
        "moe.dispatcher: blocks and moe.runner: loop do not fit: blocks produces the layout blocks, loop takes tokens; install a "
        "dispatcher or a runner for the other's layout.",
        DEEPSEEK,
        more=(BLOCKS,),
        without=("moe_dispatcher",),
    ),
    "scheduling policy": Impossible(
        {"scheduler": {"policy": "fair"}},
        "scheduler.policy: fair cannot serve this model, machine and configuration.\n"
        "  rejected fair (theirs 2.1): it needs kernels>=2, installed is 1 (pip install 'kernels>=2')\n"
        "Nearest change: scheduler.policy: fcfs",
        more=(theirs("scheduling_policy", "fair", problems=UNMET),),
    ),
    "eviction policy and logits processor": Impossible(
        {"cache": {"eviction": "lfu"}, "sampling": {"processors": ["penalty"]}},
        "The configuration has 2 conflicts:\n"
        "1. sampling.processors names an unknown logits_processor 'penalty'; did you mean 'penalties'? Installed: penalties, theirs.\n"
        "2. cache.eviction names an unknown eviction_policy 'lfu'; did you mean 'lru'? Installed: lru.",
    ),
    "grammar and parsers": Impossible(
        {"sampling": {"grammar": "automata"}, "text": {"reasoning_parser": "thinking", "tool_call_parser": "hermes"}},
        "The configuration has 3 conflicts:\n"
        f"1. sampling.grammar names an unknown {next(k for k in KEYS if KEYS[k] == 'sampling.grammar')} 'automata'. No "
        f"{next(k for k in KEYS if KEYS[k] == 'sampling.grammar')} is installed.\n"
        "2. text.reasoning_parser names an unknown reasoning_parser 'thinking'; did you mean 'think-tags'? Installed: think-tags.\n"
        "3. text.tool_call_parser names an unknown tool_call_parser 'hermes'. No tool_call_parser is installed.",
        more=(record("reasoning_parser", "think-tags", ParserCapabilities()),),
    ),
    "platform": Impossible(
        {"execution": {"device": "npu"}},
        "execution.device names an unknown platform 'npu'; did you mean 'cpu'? Installed: cpu, cuda.",
    ),
    "launcher and collective": Impossible(
        {"parallel": {"tp": 2, "launcher": "slurm", "collective": "nccl"}},
        "The configuration has 2 conflicts:\n"
        "1. parallel.collective names an unknown collective 'nccl'. Installed: ranks.\n"
        "2. parallel.launcher names an unknown launcher 'slurm'. Installed: local.",
    ),
    "weight source": Impossible(
        {"model": {"load_format": "gguf"}},
        "model.load_format names an unknown weight_source 'gguf'. Installed: files, lonely, random.",
    ),
    "stat logger": Impossible(
        {"log": {"stat_loggers": ["statsd"]}},
        "log.stat_loggers names an unknown stat_logger 'statsd'. No stat_logger is installed.",
    ),
    "HTTP extension and page size": Impossible(
        {"server": {"extensions": ["builtin", "audit"]}, "cache": {"page_size": 48}, "attention": {"backend": "paged"}},
        "The configuration has 2 conflicts:\n"
        "1. attention.backend: paged cannot serve this model, machine and configuration.\n"
        "  rejected paged (theirs 2.1): page size 48 is not among [16, 64] (try cache.page_size: 64)\n"
        "Nearest change: cache.page_size: 64 (then paged fits)\n"
        "2. server.extensions names an unknown http_extension 'audit'. No http_extension is installed.",
        more=(theirs("attention_backend", "paged", AttentionCapabilities(("cpu",), page_sizes=(16, 64))),),
    ),
    "seven at once": Impossible(
        {
            "model": {"implementation": "llama", "max_context": 9000},
            "parallel": {"tp": 3},
            "attention": {"backend": "fast"},
            "moe": {"runner": "grouped"},
            "scheduler": {"policy": "fcsf"},
            "execution": {"cuda_graph_max_bs": 8},
        },
        "The configuration has 7 conflicts:\n"
        "1. model.implementation: llama cannot serve this model, machine and configuration.\n"
        "  rejected llama (frame-serve 1): implements LlamaForCausalLM, not DeepseekV3ForCausalLM\n"
        "Nearest change: model.implementation: deepseek\n"
        "2. parallel.tp is 3, which does not divide 8 attention heads, the inner size 512, the experts' inner size 64.\n"
        "Nearest change: parallel.tp: 2\n"
        "3. attention.backend: fast cannot serve this model, machine and configuration.\n"
        "  rejected fast (frame-serve 1): runs on cuda, not on cpu; computes mha attention, the model uses mla; computes in bfloat16 or "
        "float16, not in float32 (try model.dtype: bfloat16)\n"
        "Nearest change: attention.backend: plain\n"
        "4. moe.runner: grouped cannot serve this model, machine and configuration.\n"
        "  rejected grouped (frame-serve 1): runs on cuda, not on cpu\n"
        "Nearest change: moe.runner: loop\n"
        "5. scheduler.policy names an unknown scheduling_policy 'fcsf'; did you mean 'fcfs'? Installed: fcfs.\n"
        "6. model.max_context is 9000, but the model was made for 4096 tokens.\n"
        "Nearest change: model.max_context: 4096\n"
        "7. execution.cuda_graph_max_bs is 8, but the platform cpu captures no graphs.\n"
        "Nearest change: execution.cuda_graph_max_bs: 0",
        DEEPSEEK,
    ),
}


def known_to(case: Impossible) -> dict[str, list[PluginRecord]]:
    known = {kind: [] if kind in case.without else listed for kind, listed in records().items()}
    for each in case.more:
        known[each.kind].append(each)
    return known


@pytest.mark.parametrize("name", CASES)
def test_an_impossible_configuration_says_all_that_is_wrong(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ResolveError) as caught:
        resolve(config(**case.sections), case.hardware, case.model_config, known_to(case))
    assert str(caught.value) == case.text


def test_an_open_dispatcher_follows_the_runner() -> None:
    known = records(moe_dispatcher=[*records()["moe_dispatcher"], BLOCKS], moe_runner=[*records()["moe_runner"], TAKES_BLOCKS])
    resolved = resolve(config(), LAPTOP, DEEPSEEK, known)
    assert (names(resolved)["moe_runner"], names(resolved)["moe_dispatcher"]) == (["fused"], ["blocks"])
    assert resolved.reasons["moe.dispatcher"] == "blocks is the best-ranked that fits moe.runner fused"
    resolved = resolve(config(moe={"dispatcher": "local"}), LAPTOP, DEEPSEEK, known)
    assert (names(resolved)["moe_runner"], names(resolved)["moe_dispatcher"]) == (["loop"], ["local"])


def test_a_choice_that_a_package_moves_is_named_with_the_setting_that_keeps_it() -> None:
    better = theirs("attention_backend", "better", AttentionCapabilities(("cpu",)), rank=50)
    known = records(attention_backend=[*records()["attention_backend"], better])
    resolved = resolve(config(), LAPTOP, LLAMA, known)
    (sentence,) = find_moves(resolved, LAPTOP, LLAMA, known)
    assert sentence == (
        "attention.backend: auto chooses better because theirs 2.1 is installed; frame's own choice is plain "
        "(set attention.backend: plain to keep it)"
    )
    named = resolve(config(attention={"backend": "better"}), LAPTOP, LLAMA, known)
    assert find_moves(named, LAPTOP, LLAMA, known) == []
    assert find_moves(resolve(config(), LAPTOP, LLAMA, records()), LAPTOP, LLAMA, records()) == []


@pytest.mark.parametrize(("ratio", "now"), [(0.5, None), (0.95, "theirs (x 0.95)")])
def test_a_kernel_of_a_package_is_named_only_where_it_multiplies(ratio: float, now: str | None) -> None:
    kernel = theirs("gemm_kernel", "theirs", GemmCapabilities(("cpu",), (Speed("int4", 0, ratio),)))
    known = records(gemm_kernel=[*records()["gemm_kernel"], kernel])
    stored = dataclasses.replace(LLAMA, quantization="awq")
    sentences = find_moves(resolve(config(), LAPTOP, stored, known), LAPTOP, stored, known)
    expected = (
        f"model.gemm_kernel: auto chooses plain: plain (x 1); int4: {now} because theirs 2.1 is installed; frame's own choice is "
        "plain: plain (x 1); int4: steady (x 0.9) (set plugins.deny: [gemm_kernel/theirs] to keep it)"
    )
    assert sentences == ([expected] if now else [])
