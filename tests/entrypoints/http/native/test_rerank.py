"""`/v1/rerank`, `/v1/score`, `/v1/classify` and `/v1/moderations` with a cross-encoder and a
classifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.text.tokenizer import Tokenizer
from tests.entrypoints.grpc.test_service import Client
from tests.entrypoints.inprocess import serving
from tests.entrypoints.offline.test_vectors import DOCUMENTS, QUERY, plain, with_pairs
from tests.entrypoints.published import check_response
from tests.entrypoints.serving import RunningServer

FLAGS = ("--served-model-name", "judge", "--grpc-port", "0")
LABELS = {0: "safe", 1: "hate", 2: "self-harm"}


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    folder = with_pairs(make_checkpoint("BertForSequenceClassification", tmp_path_factory.mktemp("judge"), num_labels=1))
    with RunningServer(folder, *FLAGS, "--tokenizer-workers", "1", fake=False) as running:
        yield running, folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    folder = make_checkpoint("LlamaForSequenceClassification", tmp_path_factory.mktemp("classes"), id2label=LABELS)
    with RunningServer(folder, "--max-total-tokens", "4096", "--grpc-port", "0", fake=False) as running:
        yield running, folder


def expected_scores(folder: Path) -> list[float]:
    model, tokenizer = load_reference(folder), plain(folder)
    pairs = [tokenizer.encode(QUERY, document) for document in DOCUMENTS]
    with torch.no_grad():
        logits = [model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits for pair in pairs]
    return [float(torch.sigmoid(value)) for value in logits]


def ask(server: RunningServer, path: str, **body: Any) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    check_response("POST", path, 200, reply.headers["content-type"], reply.content)
    return reply.json()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank(cross_encoder, path: str) -> None:
    server, folder = cross_encoder
    want = expected_scores(folder)
    body = ask(server, path, model="judge", query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]])
    assert [each["index"] for each in body["results"]] == np.argsort(want)[::-1].tolist()
    for each in body["results"]:
        assert abs(each["relevance_score"] - want[each["index"]]) < 1e-5
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert body["usage"]["total_tokens"] > 50
    best = ask(server, path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)["results"]
    assert [(each["index"], set(each)) for each in best] == [(body["results"][0]["index"], {"index", "relevance_score"})]


@pytest.mark.slow
def test_rerank_as_text_embeddings_inference(cross_encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    server, folder = cross_encoder
    want = expected_scores(folder)
    found = ask(server, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=False, return_text=True, truncate=False)
    assert [each["index"] for each in found] == np.argsort(want)[::-1].tolist()
    assert [each["text"] for each in found] == [DOCUMENTS[each["index"]] for each in found]
    np.testing.assert_allclose([each["score"] for each in found], sorted(want, reverse=True), atol=1e-5)
    reply = litellm.rerank(model="huggingface/judge", api_base=server.url, api_key="none", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [each["index"] for each in reply.results] == [each["index"] for each in found[:2]]
    ranked = ask(server, "/invocations", query=QUERY, documents=DOCUMENTS)
    assert ranked["results"][0]["index"] == found[0]["index"]
    for body, says in (
        ({"texts": []}, "texts is empty"),
        ({}, "documents is empty"),
        ({"texts": ["x"], "raw_scores": "yes"}, "raw_scores"),
    ):
        reply = server.post("/rerank", {"query": "x"} | body)
        assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True)


def test_raw_scores(cross_encoder) -> None:
    """The logits, by the names of text-embeddings-inference and vLLM."""
    server, folder = cross_encoder
    probabilities = np.array(expected_scores(folder))
    logits = np.log(probabilities / (1 - probabilities))
    found = ask(server, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    np.testing.assert_allclose([each["score"] for each in sorted(found, key=lambda each: each["index"])], logits, atol=1e-4)
    scored = ask(server, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)["data"]
    np.testing.assert_allclose([each["score"] for each in scored], logits, atol=1e-4)
    pairs = [[QUERY, document] for document in DOCUMENTS]
    predicted = ask(server, "/predict", inputs=pairs, raw_scores=True)
    np.testing.assert_allclose([each[0]["score"] for each in predicted], logits, atol=1e-4)
    root, ranked = (ask(server, path, query=QUERY, texts=DOCUMENTS) for path in ("/", "/rerank"))
    assert [each["index"] for each in root] == [each["index"] for each in ranked]
    # how the texts of a request fall into batches is not fixed, and with it the last bits
    np.testing.assert_allclose([each["score"] for each in root], [each["score"] for each in ranked], atol=1e-6)
    assert list(server.get("/info")["model_type"]) == ["reranker"]


def test_score(cross_encoder) -> None:
    server, folder = cross_encoder
    want = expected_scores(folder)
    for body in (
        {"text_1": QUERY, "text_2": DOCUMENTS},
        {"queries": [QUERY], "items": DOCUMENTS},
        {"queries": [QUERY] * 4, "documents": DOCUMENTS},
    ):
        data = ask(server, "/v1/score", **body)["data"]
        np.testing.assert_allclose([each["score"] for each in data], want, atol=1e-5)


def test_grpc_ranking_and_scores_equal_those_of_http(cross_encoder) -> None:
    server, _ = cross_encoder
    want = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    with grpc.insecure_channel(server.grpc_address) as channel:
        client = Client(channel)
        ranking = client.call("Rerank", {"query": QUERY, "documents": DOCUMENTS, "options": {"id": "mine"}})
        best = client.call("Rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 1})
        scores = client.call("Score", {"queries": [QUERY], "items": DOCUMENTS})
        for name, request, part in (
            ("Rerank", {"query": "a"}, "documents is empty"),
            ("Score", {"queries": ["a", "b"], "items": ["a", "b", "c"]}, "as many of each"),
            ("Embed", {"texts": ["a"]}, "not to embed"),
            ("Score", {"queries": ["a"], "items": ["b"], "options": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens is 0"),
        ):
            with pytest.raises(grpc.RpcError, match=part) as caught:
                client.call(name, request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [each.index for each in ranking.results] == [each["index"] for each in want["results"]]
    assert ranking.results[0].relevance_score == pytest.approx(want["results"][0]["relevance_score"])
    assert [each.index for each in best.results] == [want["results"][0]["index"]]
    assert ranking.prompt_tokens == want["usage"]["prompt_tokens"]
    found = {each["index"]: each["relevance_score"] for each in want["results"]}
    assert list(scores.scores) == pytest.approx([found[index] for index in range(len(DOCUMENTS))])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 5000]}, "documents"),
        ("/v1/score", {"text_1": "a", "items": ["b " * 5000]}, "items"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 3000}, "documents"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "model"),
        ("/v1/moderations", {"input": []}, "input"),
        ("/v1/moderations", {"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, "input"),
        ("/v1/moderations", {"input": ["a", {"type": "text", "text": "b"}]}, "input"),
    ],
)
def test_bad_requests(cross_encoder, path: str, body: dict[str, Any], param: str) -> None:
    reply = cross_encoder[0].post(path, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("more", [{}, {"max_tokens_per_doc": 4}])
async def test_an_unknown_model_is_refused_before_anything_is_tokenized(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    async with serving({"model": {"task": "embed"}}) as server:
        for name in ("cut_texts", "encode", "encode_inputs"):
            monkeypatch.setattr(Tokenizer, name, lambda *_, **__: pytest.fail("the text was tokenized"))
        for path, body in (("/v1/rerank", {"query": "a", "documents": ["b"], **more}), ("/v1/score", {"text_1": "a", "text_2": "b"})):
            reply = await server.post(path, {"model": "another", **body})
            assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.slow
def test_classify_equals_transformers(classifier) -> None:
    server, folder = classifier
    body = ask(server, "/v1/classify", input=DOCUMENTS)
    model, tokenizer = load_reference(folder), plain(folder)
    with torch.no_grad():
        for each, text in zip(body["data"], DOCUMENTS, strict=True):
            want = torch.softmax(model(torch.tensor([tokenizer.encode(text).ids])).logits[0], -1)
            np.testing.assert_allclose(each["probs"], want.numpy(), atol=1e-5)
            assert each["label"] == LABELS[int(want.argmax())]
    assert body["labels"] == list(LABELS.values())


def test_predict(classifier) -> None:
    server, _ = classifier
    classes = ask(server, "/v1/classify", input=DOCUMENTS)["data"]
    found = ask(server, "/predict", inputs=[[document] for document in DOCUMENTS])
    for each, entries in zip(classes, found, strict=True):
        np.testing.assert_allclose([entry["score"] for entry in entries], sorted(each["probs"], reverse=True), atol=1e-5)
        assert entries[0]["label"] == each["label"]
    for path, inputs in (("/predict", DOCUMENTS[0]), ("/", [DOCUMENTS[0]])):
        assert [each["label"] for each in ask(server, path, inputs=inputs)] == [each["label"] for each in found[0]]
    raw = ask(server, "/v1/classify", input=DOCUMENTS, use_activation=False)["data"]
    powers = np.exp([each["probs"] for each in raw])
    np.testing.assert_allclose(powers / powers.sum(axis=1, keepdims=True), [each["probs"] for each in classes], atol=1e-5)
    for body, says in (({"inputs": []}, "inputs is empty"), ({"inputs": [["a", "b", "c"]]}, "inputs[0]: expected a list of one text")):
        reply = server.post("/predict", body)
        assert (reply.status_code, says in reply.json()["error"]) == (400, True), reply.text


def test_grpc_classes_and_moderation_equal_those_of_http(classifier) -> None:
    server, _ = classifier
    want = ask(server, "/v1/classify", input=DOCUMENTS)
    with grpc.insecure_channel(server.grpc_address) as channel:
        found = Client(channel).call("Classify", {"texts": DOCUMENTS})
        verdicts = Client(channel).call("Moderate", {"texts": DOCUMENTS})
    assert list(found.labels) == want["labels"]
    for each, verdict, wanted in zip(found.classes, verdicts.results, want["data"], strict=True):
        assert each.label == wanted["label"]
        assert list(each.probabilities) == pytest.approx(wanted["probs"])
        assert dict(verdict.category_scores) == pytest.approx(dict(zip(want["labels"][1:], wanted["probs"][1:], strict=True)))
        assert verdict.flagged == (max(wanted["probs"][1:]) >= 0.5)


def test_pooling_route_returns_the_probabilities(classifier) -> None:
    server, _ = classifier
    (want,) = ask(server, "/v1/classify", input="x")["data"]
    (found,) = ask(server, "/pooling", input="x", task="classify")["data"]
    np.testing.assert_allclose(found["data"], want["probs"], atol=1e-6)
    assert ask(server, "/invocations", input="x")["data"][0]["label"] == want["label"]


def test_rerank_refuses_a_classifier_of_several_classes(classifier) -> None:
    reply = classifier[0].post("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert reply.status_code == 400
    assert "has 3 classes" in reply.json()["error"]["message"]


def test_moderations_with_openais_client(classifier) -> None:
    openai = pytest.importorskip("openai")
    server, _ = classifier
    classes = ask(server, "/v1/classify", input=DOCUMENTS)["data"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.moderations.create(input=DOCUMENTS)
        parts = client.moderations.create(input=[{"type": "text", "text": DOCUMENTS[0]}])
    for result, each in zip(reply.results, classes, strict=True):
        scores = result.category_scores.model_dump(by_alias=True)
        assert abs(scores["hate"] - each["probs"][1]) < 1e-6
        assert abs(scores["self-harm"] - each["probs"][2]) < 1e-6
        assert scores["violence"] == 0.0
        assert "safe" not in scores
        assert result.flagged == (max(each["probs"][1:]) >= 0.5)
        assert result.categories.hate == (each["probs"][1] >= 0.5)
    assert abs(parts.results[0].category_scores.hate - classes[0]["probs"][1]) < 1e-6
