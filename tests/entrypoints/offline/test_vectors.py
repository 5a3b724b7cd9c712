"""Vectors, classes and relevance from Python, against transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from frame import Engine
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.engine import EngineError
from frame.entrypoints.relevance import conversation, filled
from frame.testing.checkpoints import load_reference, make_checkpoint

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of France is Paris.", "The quick brown fox jumps over the lazy dog.", "print(number)", "Paris"]
SMALL = {"max_total_tokens": 4096, "max_running_requests": 8, "threads": 1}


def with_pairs(folder: Path) -> Path:
    """The checkpoint with BERT's way of writing texts and pairs: [CLS] a [SEP] b [SEP], and type
    ids."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_input_names": names}))
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    first, last = (str(token) for token in ("<|bos|>", "<|eos|>"))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=[(first, 0), (last, 1)]
    )
    tokenizer.enable_padding(length=64)  # as in files of embedding models; it must not matter
    tokenizer.enable_truncation(8)
    tokenizer.save(str(file))
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    folder = with_pairs(make_checkpoint("BertForSequenceClassification", tmp_path_factory.mktemp("m"), num_labels=1))
    with Engine(str(folder), **SMALL) as engine:
        yield engine, folder


def plain(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def test_a_cross_encoder_scores_pairs(judge) -> None:
    engine, folder = judge
    got, model, tokenizer = engine.score(QUERY, DOCUMENTS), load_reference(folder), plain(folder)
    with torch.no_grad():
        for score, document in zip(got, DOCUMENTS, strict=True):
            pair = tokenizer.encode(QUERY, document)
            logits = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
            assert abs(float(torch.sigmoid(logits)) - score) < 1e-5
    several = engine.score([QUERY, "print"], DOCUMENTS[:2])
    assert several.shape == (2,)
    assert abs(several[0] - got[0]) < 1e-6


def test_long_pairs_are_cut_in_front_of_their_last_special_token(judge) -> None:
    engine, folder = judge
    long = "fox " * 2000
    with pytest.raises(InvalidRequestError, match="maximum context length is 512 tokens"):
        engine.score(QUERY, [long])
    (got,) = engine.score(QUERY, [long], truncate=True)
    pair = plain(folder).encode(QUERY, long)
    ids, types = [*pair.ids[:511], 1], pair.type_ids[:512]
    with torch.no_grad():
        logits = load_reference(folder)(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
    assert abs(float(torch.sigmoid(logits)) - got) < 1e-5


def test_pairs_lose_tokens_of_their_longer_text(judge) -> None:
    """As `longest_first` of transformers: a long query leaves its document a share."""
    from transformers import PreTrainedTokenizerFast

    engine, folder = judge
    reference = PreTrainedTokenizerFast(tokenizer_object=plain(folder))
    for first, second in (("fox " * 700, DOCUMENTS[0]), ("fox " * 700, "dog " * 900), (QUERY, "dog " * 900), ("fox " * 511, "a b")):
        want = reference(first, second, truncation="longest_first", max_length=512).input_ids
        (found,) = engine.tokenizer.encode_inputs([[first, second]], 512)
        assert found[0] == want
    scores = engine.score("fox " * 2000, DOCUMENTS, truncate=True)
    assert len({round(float(score), 5) for score in scores}) == len(DOCUMENTS)


def test_type_ids_only_where_the_tokenizer_declares_them(tmp_path: Path) -> None:
    folder = with_pairs(make_checkpoint("BertForSequenceClassification", tmp_path, num_labels=1))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["model_input_names"]
    tokenizer = plain(folder)
    pair = tokenizer.encode(QUERY, DOCUMENTS[0])
    for changes, has_types in (({}, False), ({"tokenizer_class": "BertTokenizer"}, True), ({"model_input_names": ["input_ids"]}, False)):
        file.write_text(json.dumps(settings | changes))
        types = pair.type_ids if has_types else [0] * len(pair.ids)
        with torch.no_grad():
            logits = load_reference(folder)(torch.tensor([pair.ids]), token_type_ids=torch.tensor([types])).logits
        with Engine(str(folder), **SMALL) as engine:
            assert abs(float(torch.sigmoid(logits)) - engine.score(QUERY, [DOCUMENTS[0]])[0]) < 1e-5


def test_wrong_methods_say_which_are_right(judge) -> None:
    engine, _ = judge
    with pytest.raises(InvalidRequestError, match="use classify or score"):
        engine.generate("hello")
    with pytest.raises(InvalidRequestError, match="not 'generate'"):
        asyncio.run(engine.agenerate("hello"))
    with pytest.raises(InvalidRequestError, match="not 'embed"):
        engine.embed("hello")
    with pytest.raises(InvalidRequestError, match="as many of each"):
        engine.score(["a", "b"], ["c"])
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.classify([[]])
    assert set(engine.classify("hello")) == {"LABEL_0"}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_decoder_that_attends_in_both_directions(architecture: str, tmp_path: Path) -> None:
    """`is_causal: false`, as of gte-Qwen2 and Llama-Embed-Nemotron: vectors are those of
    transformers, in batches, again, and from the last token."""
    folder = make_checkpoint(architecture, tmp_path, is_causal=False, sliding_window=None)
    reference = load_reference(folder).model
    texts = [*DOCUMENTS, "import os\nprint(1)" * 60, "a", DOCUMENTS[0]]
    for mode in ("mean", "last"):
        with Engine(str(folder), model_pooling=mode, **SMALL) as engine:
            vectors = np.concatenate((engine.embed(texts), engine.embed(texts[:1])))
            for text, vector in zip([*texts, texts[0]], vectors, strict=True):
                with torch.no_grad():
                    hidden = reference(torch.tensor([engine.tokenizer.encode(text)])).last_hidden_state[0]
                pooled = hidden.mean(0) if mode == "mean" else hidden[-1]
                np.testing.assert_allclose(vector, (pooled / pooled.norm()).numpy(), atol=1e-5)
            with pytest.raises(InvalidRequestError, match="not 'generate'"):
                engine.generate("a")
    causal = json.loads((folder / "config.json").read_text()) | {"is_causal": True}
    (folder / "config.json").write_text(json.dumps(causal))
    with Engine(str(folder), model_task="embed", **SMALL) as engine:
        assert np.abs(engine.embed(texts[0]) - vectors[0]).max() > 1e-2


def test_a_language_model_embeds(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    with Engine(str(folder), model_task="embed", **SMALL) as engine:
        vectors = engine.embed(DOCUMENTS)
        one, short = engine.embed(DOCUMENTS[0]), engine.embed(DOCUMENTS, dimensions=16)
        cosines = engine.score(DOCUMENTS[0], DOCUMENTS)
        same = engine.embed(engine.tokenizer.encode(DOCUMENTS[0]))
    assert vectors.shape == (4, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(one, vectors[0], atol=1e-5)
    np.testing.assert_allclose(same, one, atol=1e-6)
    np.testing.assert_allclose(short, vectors[:, :16] / np.linalg.norm(vectors[:, :16], axis=1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(cosines, vectors @ vectors[0], atol=1e-5)
    with pytest.raises(ValueError, match="dimensions is 65"), Engine(str(folder), model_task="embed", **SMALL) as engine:
        engine.embed("a", dimensions=65)


def test_without_a_tokenizer_token_ids_are_embedded() -> None:
    """The embedded model too: any decoder's last token."""
    with Engine("frame-tiny", model_task="embed", skip_tokenizer_init=True, **SMALL) as engine:
        vectors = engine.embed([[5, 6, 7], [8] * 300])
        with pytest.raises(EngineError, match="skip_tokenizer_init"):
            engine.embed("text")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("has_file", [False, True])
def test_a_language_model_judges(tmp_path: Path, has_file: bool) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path / "model", max_position_embeddings=4096)
    prompt = "Q: {query}\nD: {document}\nI: {instruction} {query}"
    keys = {"label_tokens": ["n", "y"], **SMALL}
    if has_file:
        (tmp_path / "prompt.txt").write_text(prompt)
        keys["score_prompt"] = str(tmp_path / "prompt.txt")
    with Engine(str(folder), **keys) as engine:
        got = engine.score(QUERY, [*DOCUMENTS, "{query}"], instruction="judge")
        no, yes = (engine.tokenizer.encode(text, False)[0] for text in "ny")
        ids = [
            engine.tokenizer.encode(filled(prompt, QUERY, document, "judge"))
            if has_file
            else engine.tokenizer.encode_chat(conversation(QUERY, document, "judge"))
            for document in [*DOCUMENTS, "{query}"]
        ]
    assert filled(prompt, QUERY, "{query}", "judge").count(QUERY) == 2  # a text is not looked at for places
    model = load_reference(folder)
    with torch.no_grad():
        for score, prompt_ids in zip(got, ids, strict=True):
            logits = model(torch.tensor([prompt_ids])).logits[0, -1, [no, yes]]
            assert abs(float(torch.softmax(logits, -1)[1]) - score) < 1e-5


def test_files_of_prompts_are_checked(tmp_path: Path) -> None:
    from frame.core.errors import ConfigurationError
    from frame.entrypoints.relevance import read_score_prompt

    (tmp_path / "prompt.txt").write_text("{query}")
    with pytest.raises(ConfigurationError, match="has no {document}"):
        read_score_prompt(str(tmp_path / "prompt.txt"))
    with pytest.raises(ConfigurationError, match="name a text file"):
        read_score_prompt(str(tmp_path / "nothing.txt"))


def test_classes_with_labels_of_one_name(tmp_path: Path) -> None:
    folder = make_checkpoint("BertForSequenceClassification", tmp_path, num_labels=3)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "id2label": {"0": "neutral", "1": "neutral", "2": "toxic"}}))
    with Engine(str(folder), **SMALL) as engine:
        (found,) = engine.classify([[9, 10, 11]])
    with torch.no_grad():
        expected = load_reference(folder)(torch.tensor([[9, 10, 11]])).logits.softmax(-1)[0]
    assert list(found) == ["neutral (0)", "neutral (1)", "toxic"]
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-5)
