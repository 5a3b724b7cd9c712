"""Fields of embeddings and ranking that clients of vLLM, Voyage and Cohere send."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.http.openai.test_embeddings import TEXTS, folder_of_minilm, posted, refused
from tests.entrypoints.serving import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model with a chat template that joins the messages."""
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    with RunningServer(folder_of_minilm(), "--served-model-name", "minilm", "--chat-template", str(template), fake=False) as running:
        yield running


def vectors_of(reply: Any) -> np.ndarray:
    return np.array([each["embedding"] for each in reply["data"]], np.float32)


def test_messages(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "A man is"}, {"role": "assistant", "content": "eating food."}]
    found = vectors_of(posted(server, "/v1/embeddings", {"messages": messages}))
    ids = posted(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
    np.testing.assert_allclose(found, vectors_of(posted(server, "/v1/embeddings", {"input": ids})), atol=1e-5)
    for body, says in (
        ({"messages": messages, "input": "x"}, "send either input or messages"),
        ({}, "send either input or messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": messages, "prompt_name": "query"}, "prompt_name is for texts in input"),
    ):
        assert refused(server, "/v1/embeddings", body)["error"]["message"].startswith(says)


def test_normalize_and_truncation(server: RunningServer) -> None:
    plain = vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS}))
    np.testing.assert_allclose(vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS, "normalize": True})), plain, atol=1e-6)
    for field in ("normalize", "use_activation"):
        raw = vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS, field: False}))
        lengths = np.linalg.norm(raw, axis=1, keepdims=True)
        assert abs(lengths - 1).min() > 0.1
        np.testing.assert_allclose(raw / lengths, plain, atol=1e-6)
    both = {"input": "x", "normalize": False, "use_activation": True}
    assert "contradict each other" in refused(server, "/v1/embeddings", both)["error"]["message"]
    long = "x " * 2000
    assert len(posted(server, "/v1/embeddings", {"input": long, "truncation": True})["data"]) == 1
    assert "2002 tokens" in refused(server, "/v1/embeddings", {"input": long, "truncation": False})["error"]["message"]
    both = {"input": long, "truncation": True, "truncate_prompt_tokens": 5}
    assert "exclude each other" in refused(server, "/v1/embeddings", both)["error"]["message"]


def test_special_tokens(server: RunningServer) -> None:
    counts = [
        posted(server, "/v1/embeddings", {"input": "x", "add_special_tokens": each})["usage"]["prompt_tokens"] for each in (True, False)
    ]
    assert counts[0] == counts[1] + 2


@pytest.mark.parametrize(("dtype", "stored", "shift"), [("float32", "<f4", 0), ("float16", "<f2", 0), ("bfloat16", "<u2", 16)])
def test_types_of_numbers_and_bytes(server: RunningServer, dtype: str, stored: str, shift: int) -> None:
    """As vLLM has them: base64 or bytes of a type, with a header that says where each vector is."""
    plain = vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS}))

    def decoded(data: bytes) -> np.ndarray:
        numbers = np.frombuffer(data, stored)
        return (numbers.astype(np.uint32) << shift).view(np.float32) if shift else numbers.astype(np.float32)

    body = {"input": TEXTS, "embed_dtype": dtype}
    data = posted(server, "/v1/embeddings", {**body, "encoding_format": "base64"})["data"]
    found = np.array([decoded(base64.b64decode(each["embedding"])) for each in data])
    np.testing.assert_allclose(found, plain, atol=1e-2 if shift else 1e-3)
    for path in ("/v1/embeddings", "/pooling"):
        for form in ("bytes", "bytes_only"):
            reply = server.post(path, {**body, "encoding_format": form})
            assert (reply.status_code, reply.headers["content-type"]) == (200, "application/octet-stream")
            np.testing.assert_allclose(decoded(reply.content).reshape(found.shape), found, atol=1e-2 if shift else 1e-5)
        head = json.loads(server.post(path, {**body, "encoding_format": "bytes"}).headers["metadata"])
        place = head["data"][1]
        second = decoded(server.post(path, {**body, "encoding_format": "bytes"}).content[place["start"] : place["end"]])
        np.testing.assert_allclose(second, found[1], atol=1e-2 if shift else 1e-5)
        assert (place["embed_dtype"], place["shape"], head["usage"]["prompt_tokens"] > 10) == (dtype, [plain.shape[1]], True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"embed_dtype": "float16"}, "embed_dtype float16 needs encoding_format base64 or bytes"),
        ({"embed_dtype": "fp8_e4m3", "encoding_format": "base64"}, "embed_dtype"),
        ({"encoding_format": "bytes", "input": ["x"] * 65}, "encoding_format bytes takes 64 inputs"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"softmax": False}, "softmax is not supported; use use_activation"),
    ],
)
def test_fields_that_are_wrong(server: RunningServer, fields: dict[str, Any], says: str) -> None:
    assert refused(server, "/v1/embeddings", {"input": "x", **fields})["error"]["message"].startswith(says)


def test_routes_of_text_embeddings_inference(server: RunningServer) -> None:
    plain = vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS}))
    np.testing.assert_allclose(posted(server, "/", {"inputs": TEXTS}), plain, atol=1e-5)
    found = posted(server, "/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}})
    np.testing.assert_allclose(found, plain[1:] @ plain[0], atol=1e-5)
    info = server.get("/info")
    assert (info["model_type"], info["max_client_batch_size"]) == ({"embedding": {"pooling": "mean"}}, 2048)
    cards = posted(server, "/tokenize", {"inputs": ["eating food", "x"]})
    assert [(each["text"], each["special"], each["start"], each["stop"]) for each in cards[0]][1:3] == [
        ("eating", False, 0, 6),
        ("food", False, 7, 11),
    ]
    assert [each["special"] for each in cards[1]] == [True, False, True]
    assert len(posted(server, "/tokenize", {"inputs": "x", "add_special_tokens": False})[0]) == 1
    for path, body, says in (
        ("/", {"query": "x", "texts": ["y"]}, "query is not a field for a model of this task"),
        ("/", {}, "inputs is missing"),
        ("/predict", {"inputs": "x"}, "not to classify"),
        ("/similarity", {"inputs": {"source_sentence": "x", "sentences": []}}, "inputs.sentences is empty"),
        ("/similarity", {"inputs": {"source_sentence": "x", "sentences": ["y " * 2000]}}, "a sentence of inputs"),
    ):
        error = refused(server, path, body)
        assert (says in error["error"], error["error_type"]) == (True, "Validation"), error


def test_huggingfaces_client(server: RunningServer) -> None:
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(base_url=server.url)
    plain = vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS}))
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0], normalize=True)[0], plain[0], atol=1e-5)
    np.testing.assert_allclose(client.sentence_similarity(TEXTS[0], TEXTS[1:]), plain[1:] @ plain[0], atol=1e-5)


def test_older_routes_of_ollama_and_cohere(server: RunningServer) -> None:
    plain = vectors_of(posted(server, "/v1/embeddings", {"input": TEXTS}))
    np.testing.assert_allclose(posted(server, "/api/embeddings", {"model": "minilm", "prompt": TEXTS[0]})["embedding"], plain[0], atol=1e-5)
    assert "error" in refused(server, "/api/embeddings", {"model": "other", "prompt": "x"}, status=404)
    fixed = {"num_ctx": 512, "num_gpu": 1, "use_mmap": True, "mirostat": 0, "temperature": None}
    wrong = {
        "options.temperature is not an option of this route": {"temperature": 0.5},
        "options.num_ctxt is unknown; did you mean 'num_ctx'?": {"num_ctxt": 512},
        "options.num_ctx is a string": {"num_ctx": "512"},
    }
    for path, text in (("/api/embed", {"input": TEXTS[0]}), ("/api/embeddings", {"prompt": TEXTS[0]})):
        assert posted(server, path, {"model": "minilm", **text, "options": fixed})
        for says, options in wrong.items():
            assert says in refused(server, path, {"model": "minilm", **text, "options": options})["error"]
    body = {"model": "minilm", "texts": TEXTS, "input_type": "search_query"}
    floats = posted(server, "/v1/embed", body)
    assert (floats["response_type"], floats["meta"]["api_version"]["version"]) == ("embeddings_floats", "1")
    np.testing.assert_allclose(floats["embeddings"], plain, atol=1e-5)
    assert list(posted(server, "/v1/embed", body | {"embedding_types": ["int8"]})["embeddings"]) == ["int8"]


def test_documents_that_are_cut(server: RunningServer) -> None:
    body = {"query": TEXTS[0], "documents": [f"{TEXTS[1]} and then some more"]}
    count = len(posted(server, "/tokenize", {"prompt": TEXTS[1], "add_special_tokens": False})["tokens"])
    (cut,) = posted(server, "/v2/rerank", {**body, "max_tokens_per_doc": count})["results"]
    (whole,) = posted(server, "/v2/rerank", {**body, "documents": [TEXTS[1]]})["results"]
    assert cut["relevance_score"] == pytest.approx(whole["relevance_score"], abs=1e-6)
    assert "max_tokens_per_doc is 0" in refused(server, "/v2/rerank", {**body, "max_tokens_per_doc": 0})["message"]


def test_top_k_of_voyage(server: RunningServer) -> None:
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    assert [each["index"] for each in posted(server, "/v1/rerank", {**body, "top_k": 1})["results"]] == [0]
    assert "top_k is 0" in refused(server, "/v1/rerank", {**body, "top_k": 0})["error"]["message"]
    assert "top_n and top_k are the same" in refused(server, "/v1/rerank", {**body, "top_k": 1, "top_n": 1})["error"]["message"]


def test_quantized_types_of_cohere(server: RunningServer) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary"]
    body = {"model": "minilm", "texts": TEXTS, "embedding_types": types}
    found = {name: np.array(rows) for name, rows in posted(server, "/v2/embed", body)["embeddings"].items()}
    assert list(found) == types
    plain, whole = found["float"], found["int8"]
    assert np.abs(whole).max(axis=1).tolist() == [127] * len(TEXTS)
    cosines = (plain * whole).sum(axis=1) / np.linalg.norm(plain, axis=1) / np.linalg.norm(whole, axis=1)
    assert cosines.min() > 0.999
    assert (found["uint8"] - whole == 128).all()
    assert found["ubinary"].shape == (len(TEXTS), plain.shape[1] // 8)
    assert (np.unpackbits(found["ubinary"].astype(np.uint8), axis=1) == (plain > 0)).all()
    assert (found["ubinary"] - found["binary"] == 128).all()
