"""A vector for each token, as text-embeddings-inference and vLLM return them, and inputs that are
cut, in whatever field a client asks for that."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from frame import Client, Engine
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.grpc.test_service import Client as GrpcClient
from tests.entrypoints.http.openai.test_embeddings import TEXTS, folder_of_minilm, posted, refused
from tests.entrypoints.serving import RunningServer

LONG = "x " * 2000  # tokens; MiniLM takes 256
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--served-model-name", "minilm", "--chat-template", str(template), "--grpc-port", "0")
    with RunningServer(folder_of_minilm(), *flags, fake=False) as running:
        yield running


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A language model that is asked for yes or no."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("judge"))
    template = folder / "template.jinja"
    template.write_text(TEMPLATE + "assistant: ")
    flags = ("--model-task", "classify", "--label-tokens", '["a", "b"]', "--chat-template", str(template), "--max-model-len", "512")
    with RunningServer(folder, *flags, "--max-total-tokens", "4096", fake=False) as running:
        yield running


@torch.no_grad()
def wanted(texts: list[str]) -> list[np.ndarray]:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder_of_minilm()).eval(), AutoTokenizer.from_pretrained(folder_of_minilm())
    return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in texts]


@pytest.mark.slow
def test_embed_all(server: RunningServer) -> None:
    """Neither pooled nor normalized; special tokens have vectors too."""
    expected = wanted(TEXTS)
    found = posted(server, "/embed_all", {"inputs": TEXTS})
    assert [len(each) for each in found] == [len(each) for each in expected]
    for each, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, want, atol=1e-5)
    (alone,) = posted(server, "/embed_all", {"inputs": TEXTS[0]})
    np.testing.assert_allclose(alone, expected[0], atol=1e-5)
    assert [len(each) for each in posted(server, "/embed_all", {"inputs": [LONG], "truncate": True})] == [256]
    assert "truncate: true" in refused(server, "/embed_all", {"inputs": LONG})["error"]
    assert "exceed the bound of a response, 4194304 numbers" in refused(server, "/embed_all", {"inputs": ["x " * 250] * 50})["error"]


@pytest.mark.slow
def test_grpc_and_python(server: RunningServer) -> None:
    """The same vectors by the other front ends, and the same refusals."""
    expected, long = wanted(TEXTS), "x " * 250
    with grpc.insecure_channel(server.grpc_address) as channel:
        rpc = GrpcClient(channel)
        reply = rpc.call("Embed", {"texts": TEXTS, "per_token": True})
        with pytest.raises(grpc.RpcError, match="exceed the bound of a response, 4194304 numbers"):
            rpc.call("Embed", {"texts": [long] * 50, "per_token": True})
    assert (reply.prompt_tokens, list(reply.vectors)) == (sum(map(len, expected)), [])
    by_grpc = [np.array([vector.values for vector in each.vectors]) for each in reply.token_vectors]
    with Engine(str(folder_of_minilm()), max_total_tokens=4096, threads=1) as engine, Client(server.url) as client:
        by_engine, by_client = (front.embed(TEXTS, per_token=True) for front in (engine, client))
        assert engine.embed(TEXTS[0], per_token=True, dimensions=8).shape == (len(expected[0]), 8)
        assert len(engine.embed([LONG], per_token=True, truncate=True)[0]) == 256
        np.testing.assert_allclose(engine.embed(TEXTS[:2]), client.embed(TEXTS[:2]), atol=1e-5)
        with pytest.raises(InvalidRequestError, match="maximum context length is 256"):
            client.embed([LONG], per_token=True)
    for found in (by_grpc, by_engine, by_client):
        assert [len(each) for each in found] == [len(each) for each in expected]
        for each, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["token_embed", "encode"])
def test_pooling(server: RunningServer, task: str) -> None:
    """Of length 1, unless the request says otherwise."""
    expected = wanted(TEXTS)
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in expected]
    reply = posted(server, "/pooling", {"model": "minilm", "input": TEXTS, "task": task})
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))
    for data, want in zip(reply["data"], unit, strict=True):
        np.testing.assert_allclose(data["data"], want, atol=1e-5)
    for field in ("normalize", "use_activation"):
        raw = posted(server, "/pooling", {"input": TEXTS[:1], "task": task, field: False})["data"][0]["data"]
        np.testing.assert_allclose(raw, expected[0], atol=1e-5)
    short = posted(server, "/pooling", {"input": TEXTS[:1], "task": task, "dimensions": 8})["data"][0]["data"]
    cut = expected[0][:, :8]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5)
    coded = posted(server, "/pooling", {"input": TEXTS[:1], "task": task, "encoding_format": "base64"})["data"][0]["data"]
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(each), "<f4") for each in coded], unit[0], atol=1e-5)
    error = refused(server, "/pooling", {"input": ["x " * 250] * 50, "task": task})["error"]
    assert (error["param"], error["message"].rpartition("; ")[2]) == ("input", "send fewer or shorter inputs")
    assert "use base64" in refused(server, "/pooling", {"input": "x", "task": task, "encoding_format": "bytes"})["error"]["message"]


def test_tasks_that_the_model_does_not_have(server: RunningServer, judge: RunningServer) -> None:
    assert "this server's task is embed" in refused(server, "/pooling", {"input": "x", "task": "token_classify"})["error"]["message"]
    assert "this server's task is classify" in refused(judge, "/pooling", {"input": "x", "task": "token_embed"})["error"]["message"]
    assert "not to embed" in refused(judge, "/embed_all", {"inputs": "x"})["error"]


IDS = [7] * 600
MESSAGES = [{"role": "user", "content": LONG}]


@pytest.mark.pairwise
@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 20}, {"truncate_prompt_tokens": -1}, {"truncation": True}])
@pytest.mark.parametrize("inputs", [{"input": LONG}, {"input": [IDS, [5]]}, {"messages": MESSAGES}], ids=["text", "ids", "messages"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_inputs_that_are_cut(server: RunningServer, path: str, inputs: dict[str, Any], fields: dict[str, Any]) -> None:
    length = fields.get("truncate_prompt_tokens", -1)
    count = posted(server, path, {**inputs, **fields})["usage"]["prompt_tokens"]
    assert count == (256 if length == -1 else length) + (1 if "input" in inputs and inputs["input"] != LONG else 0)
    assert "maximum context length is 256" in refused(server, path, inputs)["error"]["message"]


def test_cut_ids_and_chats_keep_their_beginning(server: RunningServer) -> None:
    ids = list(range(1000, 1040))
    cut = posted(server, "/v1/embeddings", {"input": [ids], "truncate_prompt_tokens": 30})["data"][0]["embedding"]
    np.testing.assert_allclose(cut, posted(server, "/v1/embeddings", {"input": [ids[:30]]})["data"][0]["embedding"], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/classify", {"input": [LONG, "x"]}),
        ("/classify", {"input": LONG}),
        ("/pooling", {"input": [IDS]}),
        ("/pooling", {"messages": MESSAGES}),
        ("/v1/score", {"text_1": "x", "text_2": [LONG, "y"]}),
        ("/score", {"queries": "x", "items": LONG}),
        ("/v1/rerank", {"query": "x", "documents": [LONG, "y"]}),
        ("/v2/rerank", {"query": "x", "documents": [LONG]}),
        ("/rerank", {"query": "x", "documents": [LONG]}),
        ("/rerank", {"query": "x", "texts": [LONG]}),
    ],
)
def test_a_language_model_reads_what_is_left(judge: RunningServer, path: str, body: dict[str, Any]) -> None:
    """Of a comparison the document is cut, for the model answers at the end of the prompt."""
    refusal = judge.post(path, body)
    assert (refusal.status_code, "maximum context length" in refusal.text) == (400, True)
    for fields in ({"truncate_prompt_tokens": 450}, {"truncation": True}, *([{"truncate": True}] if path == "/rerank" else [])):
        reply = posted(judge, path, {**body, **fields})
        if "usage" in reply and "classify" not in path:
            assert 430 <= reply["usage"]["prompt_tokens"] < 1024
    if "rank" in path or "score" in path:
        short = {**body, "truncate_prompt_tokens": 20}
        assert "the query and the prompt around it leave no room" in judge.post(path, short).text


def test_a_cut_document_scores_as_its_beginning(judge: RunningServer) -> None:
    def score(**fields: Any) -> float:
        return float(posted(judge, "/v1/score", {"text_1": "fox", **fields})["data"][0]["score"])

    whole = posted(judge, "/v1/score", {"text_1": "fox", "text_2": LONG, "truncate_prompt_tokens": 450})["usage"]["prompt_tokens"]
    assert whole <= 450
    room = whole - posted(judge, "/v1/score", {"text_1": "fox", "text_2": ""})["usage"]["prompt_tokens"]
    ids = judge.post("/tokenize", {"prompt": LONG, "add_special_tokens": False}).json()["tokens"][:room]
    begin = judge.post("/detokenize", {"tokens": ids}).json()["text"]
    assert score(text_2=LONG, truncate_prompt_tokens=450) == pytest.approx(score(text_2=begin), abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank", "/pooling", "/v1/moderations"])
@pytest.mark.parametrize("field", ["truncate", "truncation_side", "truncation_direction"])
def test_fields_of_other_routes_are_refused(server: RunningServer, path: str, field: str) -> None:
    body = {"input": "x"} if path not in ("/v1/score", "/v1/rerank") else {"query": "x", "documents": ["y"], "text_1": "x", "text_2": "y"}
    if path == "/v1/score":
        del body["query"], body["documents"]
    elif path == "/v1/rerank":
        del body["text_1"], body["text_2"]
    message = refused(server, path, {**body, field: "left"})["error"]
    assert field in (message["message"] if isinstance(message, dict) else message)
