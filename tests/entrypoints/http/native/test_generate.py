"""The native API of a running server: `/generate`, tokenizing, control, health, metrics, HTTP
errors.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frame.text.tokenizer import Tokenizer
from tests.entrypoints.serving import RunningServer

GREEDY = {"max_new_tokens": 8, "temperature": 0}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_events_hold_the_cumulative_text(server: RunningServer, checkpoint: Path) -> None:
    whole = server.post("/generate", {"text": "The quick", "sampling_params": GREEDY}).json()
    streamed = events(server.post("/generate", {"text": "The quick", "sampling_params": GREEDY, "stream": True}))
    assert streamed[-1]["text"] == whole["text"]
    assert streamed[-1]["output_ids"] == whole["output_ids"]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in pairwise(streamed))
    assert [event["meta_info"]["completion_tokens"] for event in streamed][-1] == 8
    meta = whole["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["prompt_tokens"] == len(Tokenizer.load(checkpoint).encode("The quick"))
    assert {"id", "cached_tokens", "e2e_latency"} <= set(meta)


def test_generate_prompt_logprobs_only(server: RunningServer) -> None:
    body = {"text": ["The quick", "The"], "return_logprob": True, "logprob_start_len": 0}
    none, one = server.post("/generate", {**body, "sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 1}]}).json()
    assert (none["text"], none["output_ids"], none["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert (none["meta_info"]["finish_reason"], none["meta_info"]["output_token_logprobs"]) == ({"type": "length", "length": 0}, [])
    assert len(none["meta_info"]["input_token_logprobs"]) == none["meta_info"]["prompt_tokens"]
    assert one["meta_info"]["completion_tokens"] == 1


def test_generate_token_ids_and_batches(server: RunningServer, checkpoint: Path) -> None:
    ids = Tokenizer.load(checkpoint).encode("The quick")
    one = server.post("/generate", {"input_ids": ids, "sampling_params": GREEDY}).json()
    two = server.post("/generate", {"input_ids": [ids, ids], "sampling_params": [GREEDY, {**GREEDY, "max_new_tokens": 3}]}).json()
    assert [result["output_ids"] for result in two] == [one["output_ids"], one["output_ids"][:3]]
    assert server.post("/generate", {"text": ["The quick"], "sampling_params": GREEDY}).json()[0]["text"] == one["text"]
    pair = server.post("/generate", {"text": "The", "sampling_params": {**GREEDY, "n": 2, "temperature": 1, "sampling_seed": 3}}).json()
    assert pair[0]["text"] != pair[1]["text"]


def test_generate_logprobs(server: RunningServer) -> None:
    body = {"text": "The quick", "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    whole = server.post("/generate", {**body, "return_text_in_logprobs": True}).json()
    meta = whole["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == whole["output_ids"]
    assert all(isinstance(entry[2], str) for entry in meta["output_token_logprobs"])
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    later = server.post("/generate", {**body, "logprob_start_len": 2}).json()["meta_info"]
    assert [entry[1] for entry in later["input_token_logprobs"]] == [entry[1] for entry in meta["input_token_logprobs"]][2:]
    last = events(server.post("/generate", {**body, "stream": True}))[-1]["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in last] == whole["output_ids"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": "a", "sampling_params": {"nonsense": 1}}, "nonsense"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "2 prompts but 1"),
        ({"input_ids": [1, [2]]}, "mixes"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"text": ""}, "empty"),
        ({"text": []}, "empty"),
        ({"text": "a", "sampling_params": {"bad_words_ids": [[2**40]]}}, "bad_words_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": False}}, "max_new_tokens is false; send a whole number"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -5}, "logprob_start_len is -5; it must be at least -1"),
    ],
)
def test_generate_errors(server: RunningServer, body: dict[str, Any], part: str) -> None:
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert part in response.json()["error"]["message"]


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    found = server.post("/tokenize", {"text": "größe", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["text"] == "größe"
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    parts = [{"type": "text", "text": "x"}]
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json() == chat
    assert chat["count"] > 1
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_health_info_and_control(server: RunningServer) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health_generate"):
        assert httpx.get(server.url + path, timeout=30).status_code == 200
    info = server.get("/server_info")
    assert info["config"]["served_name"] == "tiny-llama"
    assert info["max_total_tokens"] == 4096
    assert "api_key" not in json.dumps(info)
    assert server.post("/flush_cache", {}).json()["success"]
    assert server.get("/server_info")["evictable_pages"] == 0
    assert server.post("/check_integrity", {}).json()["success"]


def test_abort_request(fake_server: RunningServer) -> None:
    import threading

    results: list[httpx.Response] = []
    body = {"input_ids": [5, 6], "rid": "to-be-aborted", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: results.append(fake_server.post("/generate", body)))
    thread.start()
    while not fake_server.get("/server_info")["running"]:
        pass
    assert fake_server.post("/generate", body).json()["error"]["param"] == "rid"
    for other in ("unknown", "to-be"):  # unknown names and prefixes of names abort nothing
        assert fake_server.post("/abort_request", {"rid": other}).status_code == 404
    assert fake_server.get("/server_info")["outstanding"] == 1
    assert fake_server.post("/abort_request", {"rid": "to-be-aborted"}).status_code == 200
    thread.join(10)
    assert results[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert fake_server.post("/abort_request", {}).status_code == 400


def test_pause_and_continue(fake_server: RunningServer) -> None:
    assert fake_server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(fake_server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=0.3)
    assert fake_server.post("/continue_generation", {}).status_code == 200
    assert fake_server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_metrics(fake_server: RunningServer) -> None:
    def read() -> dict[str, float]:
        text = httpx.get(fake_server.url + "/metrics").text
        families = text_string_to_metric_families(text)
        return {s.name + (s.labels.get("le") or s.labels.get("reason") or ""): s.value for family in families for s in family.samples}

    before = read()
    fake_server.post("/v1/completions", {"prompt": "The quick", "max_tokens": 9, "ignore_eos": True})
    after = read()
    assert after["frame_generation_tokens_total"] - before.get("frame_generation_tokens_total", 0) == 9
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert after[f"frame_{name}_count"] - before[f"frame_{name}_count"] == 1
    assert after["frame_inter_token_latency_seconds_count"] - before["frame_inter_token_latency_seconds_count"] == 8
    assert after["frame_time_to_first_token_seconds_bucket+Inf"] == after["frame_time_to_first_token_seconds_count"]
    assert after["frame_requests_finished_totallength"] > before["frame_requests_finished_totallength"]
    assert after["frame_requests_outstanding"] == 0
    assert after["frame_kv_pages"] > 0
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "request_generation_tokens"):
        assert after[f"frame_{name}_count"] - before[f"frame_{name}_count"] == 1
    assert after["frame_request_generation_tokens_sum"] - before["frame_request_generation_tokens_sum"] == 9
    for name in ("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"):
        assert after[name] == after["frame_time_to_first_token_seconds_count"]


# the HTTP layer -----------------------------------------------------------------------------------


def test_api_key_body_limit_queue_limit_and_token_ids_only(checkpoint: Path) -> None:
    flags = ("--api-key", "secret", "--max-body-bytes", "2048", "--max-running-requests", "1", "--max-queued-requests", "1")
    with RunningServer(checkpoint, *flags, "--skip-tokenizer-init", "--max-model-len", "512", env={"FRAME_FAKE_STEP": "0.01"}) as server:
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}}
        for path in ("/generate", "/v1/models", "/metrics", "/nowhere", "//generate", "/health/../generate"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                reply = httpx.post(server.url + path, json=body, headers=headers)
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
        assert httpx.get(server.url + "/v1/models", headers={"authorization": "bearer secret"}).status_code == 200
        assert httpx.get(server.url + "/health").status_code == 200
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"}, timeout=30) as client:
            found = client.post("/generate", json=body).json()
            assert (found["text"], len(found["output_ids"])) == ("", 1)
            for change in ({"prompt": "text"}, {"echo": True}, {"logprobs": 1, "stream": True}, {"stop": "x"}, {"bad_words": ["x"]}):
                refused = client.post("/v1/completions", json={"prompt": [3, 4], **change})
                assert (refused.status_code, "token ids only" in refused.text) == (400, True)
            assert client.post("/v1/completions", json={"prompt": [3, 4], "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2
            assert client.post("/generate", json={**body, "rid": "x" * 4000}).status_code == 413
            chunked = client.post("/generate", content=(b"x" * 1000 for _ in range(5)))
            # The rest of the body must not be read as a request
            assert chunked.headers["connection"] == "close"
            assert chunked.status_code == 413
            assert "secret" not in client.get("/server_info").text
            long = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
            with client.stream("POST", "/generate", json=long) as first:
                assert first.status_code == 200
                lines = first.iter_lines()
                assert "error" not in next(lines)
                # One may wait, not two
                two = {"input_ids": [[3], [4]], "sampling_params": {"max_new_tokens": 1}}
                full = client.post("/generate", json=two)
                assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
                assert full.headers["retry-after"] == "1"
