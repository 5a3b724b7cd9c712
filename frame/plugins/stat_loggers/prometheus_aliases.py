"""The names that dashboards made for vLLM and SGLang look for (`server.metrics_aliases`), by the
metric of this server. Used by `prometheus`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from prometheus_client.core import Metric

# ours -> theirs, without suffixes of samples (`_total`, `_bucket`)
VLLM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "requests_running": ("num_requests_running",),
        "requests_waiting": ("num_requests_waiting",),
        "kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
        "cached_tokens": ("prefix_cache_hits", "prompt_tokens_cached"),
        "kv_cache_info": ("cache_config_info",),
        "lora_requests_info": ("lora_requests_info",),
        "generation_tokens": ("generation_tokens",),
        "requests_finished": ("request_success",),
        "preemptions": ("num_preemptions",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "request_queue_time_seconds": ("request_queue_time_seconds",),
        "request_prefill_time_seconds": ("request_prefill_time_seconds",),
        "request_decode_time_seconds": ("request_decode_time_seconds",),
        "request_inference_time_seconds": ("request_inference_time_seconds",),
        "request_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
        "request_max_tokens": ("request_params_max_tokens",),
        "request_n": ("request_params_n",),
        "request_computed_prompt_tokens": ("request_prefill_kv_computed_tokens",),
        "step_tokens": ("iteration_tokens_total",),
        **{
            name: (name,)
            for name in (
                "spec_decode_num_drafts",
                "spec_decode_num_draft_tokens",
                "spec_decode_num_accepted_tokens",
                "spec_decode_num_accepted_tokens_per_pos",
            )
        },
    }
)
SGLANG: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "requests_running": ("num_running_reqs",),
        "requests_waiting": ("num_queue_reqs",),
        "requests_finished": ("num_requests",),
        "kv_tokens_used": ("num_used_tokens",),
        "kv_tokens": ("max_total_num_tokens",),
        "kv_usage_ratio": ("token_usage",),
        "prefix_cache_hit_ratio": ("cache_hit_rate",),
        "generation_tokens_per_second": ("gen_throughput",),
        "prompt_tokens": ("prompt_tokens",),
        "generation_tokens": ("generation_tokens",),
        "cached_tokens": ("cached_tokens",),
        "preemptions": ("num_retracted_requests",),
        "requests_aborted": ("num_aborted_requests",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "request_queue_time_seconds": ("queue_time_seconds",),
    }
)
FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({"vllm": VLLM, "sglang": SGLANG})
LABELS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"vllm": {"reason": "finished_reason", "page_size": "block_size", "pages": "num_gpu_blocks"}, "sglang": {}}
)
EXTRA: Mapping[str, Mapping[str, str]] = MappingProxyType({"vllm": {"engine": "0"}, "sglang": {}})


def aliases_of(metric: Metric, families: Sequence[str]) -> Iterator[Metric]:
    """The same samples under the names of each of `families` ("vllm", "sglang")."""
    for family in families:
        for name in FAMILIES[family].get(metric.name.removeprefix("frame_"), ()):
            yield _renamed(metric, f"{family}:{name}", LABELS[family], EXTRA[family])


def _renamed(metric: Metric, name: str, labels: Mapping[str, str], extra: Mapping[str, str]) -> Metric:
    alias = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        named = {labels.get(label, label): value for label, value in sample.labels.items()}
        alias.samples.append(sample._replace(name=name + sample.name.removeprefix(metric.name), labels={**named, **extra}))
    return alias
