"""The stat logger `prometheus`: all that the Grafana dashboard draws is exported; other servers'
names hold the same numbers; /metrics is 404 without it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import promql_parser
import pytest
from click.testing import CliRunner
from httpx import AsyncClient
from prometheus_client.parser import text_string_to_metric_families

from frame.config.schema import FrameConfig
from frame.core.messages import Heartbeat
from frame.entrypoints.engine_client.stats import ClientStats
from frame.entrypoints.http.operations.metrics import ServerMetrics
from frame.entrypoints.processes.resource_monitor import ResourceMonitor, Usage, UsageLimits
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.replicas import Backends
from frame.entrypoints.router.scaling import DesiredReplicas, ScalingTargets
from frame.interfaces.stats import RequestRecord, StatLoggerContext, StepRecord
from frame.plugins.loader import load_registry
from frame.plugins.stat_loggers.prometheus import MAX_KEPT, Histogram, Prometheus
from frame.plugins.stat_loggers.prometheus_aliases import FAMILIES, aliases_of
from frame.testing.conformance import Setting, Subject
from frame.testing.serving.stat_logger import suite
from tests.entrypoints.inprocess import serving

FIRST = StepRecord(2, 40, 2, first_token_latencies=[0.02, 0.3], queue_times=[0.25], prefill_times=[0.05])
ENDED = RequestRecord("r", "m", "", "stop", 20, 0, 5, 4.0, 0.5, 2.0, 0.1, inference_time=3.0, max_tokens=7)


def services() -> Any:
    stats = ClientStats(finished={"stop": 3, "abort": 1}, prompt_tokens=40, generated_tokens=12, cached_tokens=10)
    load = Heartbeat(process="engine", step=7, running=2, waiting=1, used_pages=5, total_pages=10, cached_tokens=10, prompt_tokens=40)
    groups = [{"group": "window_128", "used_pages": 3, "total_pages": 8, "evictable_pages": 2}]
    load = msgspec.structs.replace(load, groups=groups)
    resolved = SimpleNamespace(model=SimpleNamespace(architecture="A"), device="cpu", dtype="float32", page_size=16)
    client = SimpleNamespace(stats=stats, load=load, num_outstanding=3, commands=SimpleNamespace(weight_version="default"))
    watch = ResourceMonitor(UsageLimits(), lambda sentence: None, lambda pid: Usage(memory=5 * 10**8, threads=9, files=20))
    watch.check_process("engine", 1, device_memory=10**9)
    watch.check_process("main", 2)
    info = {"phases": {"weights": 0.5}, "kernels": {"compiled": 2, "loaded": 30}}
    return SimpleNamespace(resolved=resolved, adapters=None, media=None, client=client, info=info, watch=watch)


def test_what_processes_hold() -> None:
    found = scraped()
    assert found["frame_process_memory_bytes{process=main}"] == 5e8
    assert found["frame_process_threads{process=engine}"] == 9
    assert found["frame_process_open_files{process=engine}"] == 20
    assert {name for name in found if "device" in name} >= {"frame_process_device_memory_bytes{process=engine}"}
    assert "frame_process_device_memory_bytes{process=main}" not in found


def test_pages_of_cache_groups() -> None:
    found = scraped()
    pages = [found[f"frame_kv_group_{name}_pages{{group=window_128}}"] for name in ("used", "evictable", "total")]
    assert pages == [3, 2, 8]


def make_logger(aliases: tuple[str, ...] = ()) -> Prometheus:
    metrics = ServerMetrics(services())
    metrics.count_response("/generate", 200)
    logger = Prometheus(StatLoggerContext("m", metrics.read, aliases))
    logger.record_step(FIRST)
    return logger


def scraped(aliases: tuple[str, ...] = (), logger: Prometheus | None = None) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families((logger or make_logger(aliases)).render_metrics().body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_names_of_other_servers_hold_the_same_numbers() -> None:
    plain, both = scraped(), scraped(("vllm", "sglang"))
    assert not any(name.startswith(("vllm:", "sglang:")) for name in plain)
    assert both["vllm:num_requests_running{engine=0}"] == both["sglang:num_running_reqs{}"] == both["frame_requests_running{}"] == 2
    assert both["vllm:request_success_total{engine=0,finished_reason=stop}"] == 3
    assert both["vllm:time_to_first_token_seconds_bucket{engine=0,le=0.02}"] == 1
    assert both["vllm:time_to_first_token_seconds_count{engine=0}"] == both["sglang:time_to_first_token_seconds_count{}"] == 2
    assert both["vllm:prefix_cache_hits_total{engine=0}"] / both["vllm:prefix_cache_queries_total{engine=0}"] == 0.25
    assert both["sglang:token_usage{}"] == both["vllm:kv_cache_usage_perc{engine=0}"] == 0.5
    assert both["vllm:cache_config_info{block_size=16,engine=0,num_gpu_blocks=10}"] == 1
    size = FIRST.prompt_tokens + FIRST.generated_tokens
    assert both["vllm:iteration_tokens_total_sum{engine=0}"] == both["frame_step_tokens_sum{}"] == size > 0
    assert (both["sglang:num_used_tokens{}"], both["sglang:max_total_num_tokens{}"]) == (80, 160)
    assert both["sglang:num_requests_total{reason=stop}"] == 3
    assert both["frame_http_responses_total{route=/generate,status=200}"] == 1


def test_a_start_is_counted_by_phase_and_kernel_source() -> None:
    found = scraped()
    assert found["frame_start_seconds{phase=weights}"] == 0.5
    assert (found["frame_start_kernels{source=compiled}"], found["frame_start_kernels{source=cache}"]) == (2, 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_alias_is_of_a_metric_that_exists(family: str) -> None:
    collected = list(make_logger().collect())
    served = {alias.name for metric in collected for alias in aliases_of(metric, (family,))}
    with_adapters = {f"{family}:lora_requests_info"}  # of servers with adapters, see tests/entrypoints/http/test_adapters.py
    assert served == {f"{family}:{name}" for names in FAMILIES[family].values() for name in names} - with_adapters


def queries(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [value for key, value in node.items() if key == "expr"]
        return own + [query for value in node.values() for query in queries(value)]
    return [query for value in node for query in queries(value)] if isinstance(node, list) else []


def test_dashboard_shows_metrics_that_exist() -> None:
    from frame.entrypoints.tools.dashboard import command

    shown = CliRunner().invoke(command)
    assert shown.exit_code == 0
    dashboard = json.loads(shown.output)
    found = queries(dashboard)
    assert len(found) > 15
    backends = Backends([], AsyncClient(), 1.0)
    backends.desired = DesiredReplicas(ScalingTargets(1.0, None))
    routed = set(re.findall(r"^frame_\w+", RouterMetrics(backends).render().decode(), re.MULTILINE))
    served = {name.partition("{")[0] for name in scraped()} | routed
    for query in found:
        query = query.replace("$__rate_interval", "1m").replace("$model", "m")
        promql_parser.parse(query)  # raises for what Prometheus would refuse
        named = re.findall(r"\b(?:frame|process)_\w+", query)
        assert named, query
        assert set(named) <= served, query
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    drawn = {name for query in found for name in re.findall(r"\bframe_\w+", query)}
    assert {"frame_requests_running", "frame_kv_usage_ratio", "frame_time_to_first_token_seconds_bucket"} <= drawn
    assert {"frame_queued_work_seconds", "frame_token_rate_ratio", "frame_kv_pressure_ratio", "frame_desired_replicas"} <= drawn


# What the dashboards and autoscalers of vLLM (examples/observability, KEDA, llm-d) and SGLang
# (examples/monitoring) ask for.
ASKED = (
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running"),
    *("vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket", "vllm:num_requests_waiting"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:request_success_total"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_queue_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum", "vllm:request_inference_time_seconds_sum"),
    *("vllm:request_max_num_generation_tokens_sum", "vllm:request_params_max_tokens_sum", "vllm:cache_config_info"),
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total"),
    *("vllm:iteration_tokens_total_bucket", "vllm:request_params_n_bucket", "vllm:request_prefill_kv_computed_tokens_sum"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:token_usage", "sglang:gen_throughput"),
    *("sglang:cache_hit_rate", "sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_requests_total"),
    *("sglang:time_to_first_token_seconds_bucket", "sglang:e2e_request_latency_seconds_bucket", "sglang:max_total_num_tokens"),
    *("sglang:inter_token_latency_seconds_bucket", "sglang:time_per_output_token_seconds_bucket"),
)


def test_the_names_that_others_ask_for_are_there_by_default() -> None:
    names = {name.partition("{")[0] for name in scraped(FrameConfig.model_validate({"model": {"path": "x"}}).server.metrics_aliases)}
    assert [name for name in ASKED if name not in names] == []


def test_times_of_a_request_that_ended() -> None:
    logger = make_logger()
    logger.record_request(ENDED)
    logger.record_request(replace(ENDED, finish_reason="abort", is_abandoned=True, end_to_end=900.0))  # in no histogram
    found = scraped(logger=logger)
    sums = {name: found[f"frame_{name}_sum{{}}"] for name in ("request_inference_time_seconds", "request_decode_time_seconds")}
    assert sums == {"request_inference_time_seconds": 3.0, "request_decode_time_seconds": 2.0}
    assert found["frame_request_time_per_output_token_seconds_sum{}"] == 0.5
    assert (found["frame_request_max_tokens_sum{}"], found["frame_request_prompt_tokens_sum{}"]) == (7, 20)
    assert (found["frame_e2e_request_latency_seconds_count{}"], found["frame_e2e_request_latency_seconds_sum{}"]) == (1, 4.0)
    assert found["frame_request_queue_time_seconds_sum{}"] == 0.25
    assert found["frame_request_prefill_time_seconds_sum{}"] == 0.05


def test_histogram_counts_and_empties() -> None:
    histogram = Histogram("x", "text", (0.1, 1.0))
    values = [0.05, 0.1, 0.5, 7.0]
    histogram.take(values)
    histogram.take([])
    assert values == []
    samples = {s.labels.get("le", s.name): s.value for s in histogram.metric(["m"]).samples}
    assert samples == {"0.1": 2, "1.0": 3, "+Inf": 4, "x_count": 4, "x_sum": pytest.approx(7.65)}


def test_values_are_counted_once_and_before_a_list_grows_long() -> None:
    logger, step = make_logger(), StepRecord(3, 0, 3, inter_token_latencies=[0.01, 0.02, 3.0])
    for _ in range(MAX_KEPT):
        logger.record_step(step)
        logger.record_request(ENDED)
        assert all(len(values) < MAX_KEPT for values in logger._values.values())
    for _ in range(2):  # reading changes nothing
        found = scraped(logger=logger)
        assert found["frame_inter_token_latency_seconds_bucket{le=0.01}"] == MAX_KEPT
        assert found["frame_inter_token_latency_seconds_bucket{le=2.5}"] == 2 * MAX_KEPT
        assert found["frame_inter_token_latency_seconds_count{}"] == 3 * MAX_KEPT
        assert found["frame_e2e_request_latency_seconds_count{}"] == MAX_KEPT


def test_it_passes_its_suite() -> None:
    registry = load_registry(installed=False)
    record = registry.get("stat_logger", "prometheus")
    for check in suite(Subject(record, registry.load(record), None, Setting())):
        check.run()  # one that is skipped skips this test


async def test_metrics_are_served_unless_no_logger_has_any() -> None:
    async with serving() as server:
        assert (await server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})).status == 200
        reply = await server.request("GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=")
        assert b'frame_generation_tokens_total{model_name="frame-tiny"} 3.0' in reply.body
        assert b'frame_time_to_first_token_seconds_count{model_name="frame-tiny"} 1.0' in reply.body
        assert b'frame_inter_token_latency_seconds_count{model_name="frame-tiny"} 2.0' in reply.body
    for sections in ({"log": {"stat_loggers": ["log"]}}, {"plugins": {"deny": ["stat_logger/prometheus"]}}):
        async with serving(sections) as server:
            reply = await server.request("GET", "/metrics")
            assert reply.status == 404
            assert reply.json()["error"]["message"] == (
                "no stat logger of this server has metrics; start it with prometheus in log.stat_loggers"
            )
