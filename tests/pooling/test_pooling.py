"""Vectors equal those of transformers in float32, however the batches came about; what does not fit
is refused with a sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model, read_model_config
from frame.config.resolve import pinned
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.core.errors import CheckpointError, ConfigurationError, PluginError
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.model import Pooling
from frame.core.interfaces.platform import HOST
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.processes.launch import load_tokenizer
from frame.entrypoints.relevance import finished, log_odds
from frame.interfaces.pooling import Pooler
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.testing.local_loop import LocalLoop

LENGTHS = (1, 2, 40, 41, 17, 100, 3, 64, 9, 33)
MODULES = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}


def prompts(lengths=LENGTHS) -> list[list[int]]:
    numbers = random.Random(3)
    return [[numbers.randrange(6, 384) for _ in range(length)] for length in lengths]


def prepared(folder: Path, classes: Sequence[type] = (), **sections: dict[str, Any]) -> Prepared:
    config: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "float32"},
        "cache": {"max_total_tokens": 4096},
        "scheduler": {"max_running_requests": 4},
        "execution": {"device": "cpu", "threads": 1},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return prepare(FrameConfig.model_validate(config), classes=classes)


def make_loop(folder: Path, classes: Sequence[type] = (), **sections: dict[str, Any]) -> LocalLoop:
    ready = prepared(folder, classes, **sections)
    runner = build_rank(ready.resolved, ready.registry)
    return LocalLoop(build_scheduler(ready.resolved, ready.registry, runner.capacity.pools), runner)


def as_sentence_folder(folder: Path, mode: str, *more: dict[str, Any], max_length: int = 128) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{name}": key == mode for key, name in MODES.items()}))
    (folder / "modules.json").write_text(json.dumps([*MODULES, POOLING, *more]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    return folder


def write_fields(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@torch.no_grad()
def wanted(model: Any, prompt: list[int], mode: str, types: list[int] | None = None) -> np.ndarray:
    arguments = {} if types is None else {"token_type_ids": torch.tensor([types])}
    hidden = model(torch.tensor([prompt]), **arguments).last_hidden_state[0]
    pooled = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0), "max": hidden.max(0).values}[mode]
    return pooled.numpy()


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [("BertModel", "mean"), ("BertModel", "cls"), ("RobertaModel", "max"), ("Qwen3Model", "mean"), ("LlamaModel", "last")],
)
def test_vectors_of_a_sentence_folder(architecture: str, mode: str, tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint(architecture, tmp_path), mode)
    loop, model = make_loop(folder), load_reference(folder)
    each = prompts()
    got = loop.pool(each)
    loop.scheduler.check_integrity()
    for vector, prompt in zip(got, each, strict=True):
        np.testing.assert_allclose(vector, wanted(model, prompt, mode), atol=1e-5)
    assert loop.stats["decode"] == loop.stats["mixed"] == 0


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_a_language_model_embeds_by_its_last_token(name: str, tmp_path: Path) -> None:
    """Chunks, a prefix cache, and no head."""
    folder = make_checkpoint(name, tmp_path)
    loop = make_loop(folder, model={"task": "embed"}, scheduler={"chunked_prefill_size": 32})
    model, each = load_reference(folder).model, prompts()
    for _ in range(2):
        for vector, prompt in zip(loop.pool(each), each, strict=True):
            truth = wanted(model, prompt, "last")
            np.testing.assert_allclose(vector, truth, atol=2e-5)
    loop.scheduler.check_integrity()
    assert loop.stats["cached"] > 0


def test_an_embedding_model_saved_as_a_body_under_its_language_models_name(tmp_path: Path) -> None:
    """As Qwen3-Embedding is; with steps in flight, chunks, and a pool that is too small for all."""
    folder = as_sentence_folder(make_checkpoint("Qwen3Model", tmp_path), "last", NORMALIZE, max_length=256)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    loop = make_loop(folder, cache={"max_total_tokens": 256}, scheduler={"overlap": True, "chunked_prefill_size": 32})
    each, model = prompts(), load_reference(make_checkpoint("Qwen3Model", tmp_path / "same"))
    for vector, prompt in zip(loop.pool(each), each, strict=True):
        truth = wanted(model, prompt, "last")
        np.testing.assert_allclose(vector, truth, atol=2e-5)
    loop.scheduler.check_integrity()


def test_padding_ids_within_a_text_of_roberta(tmp_path: Path) -> None:
    """They have the padding position and are not counted."""
    folder = as_sentence_folder(make_checkpoint("RobertaModel", tmp_path), "mean")
    model, each = load_reference(folder), prompts()
    padding = model.config.pad_token_id
    for prompt in each[2:]:
        prompt[len(prompt) // 2] = prompt[-1] = padding
    each[3][0] = padding
    for vector, prompt in zip(make_loop(folder).pool(each), each, strict=True):
        np.testing.assert_allclose(vector, wanted(model, prompt, "mean"), atol=1e-5)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "RobertaForSequenceClassification", "Qwen3ForSequenceClassification"])
@pytest.mark.parametrize("labels", [1, 3])
def test_classes(name: str, labels: int, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, num_labels=labels)
    loop, model, each = make_loop(folder), load_reference(folder), prompts()
    got = loop.pool(each)
    assert got.shape == (len(each), labels)
    with torch.no_grad():
        for scores, prompt in zip(got, each, strict=True):
            logits = model(torch.tensor([prompt])).logits[0]
            np.testing.assert_allclose(scores, logits.numpy(), atol=1e-5)


def test_activations_follow_on_the_host() -> None:
    """Those of torch, also of logits whose exponential overflows."""
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)) * 40
    logits[0, 0] = -200.0
    for pooling, truth in (
        (Pooling("cls", activation="sigmoid"), torch.sigmoid(logits)),
        (Pooling("cls", activation="softmax"), torch.softmax(logits, -1)),
        (Pooling("cls", normalize=True), torch.nn.functional.normalize(logits, dim=-1)),
        (Pooling("cls"), logits),
        (None, logits),
    ):
        found = finished(logits.numpy(), pooling)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, truth.numpy(), atol=1e-6)
    probabilities = torch.softmax(logits.double(), -1)[:, -1]
    np.testing.assert_allclose(log_odds(logits.numpy()), torch.logit(probabilities).numpy(), rtol=1e-3)
    np.testing.assert_array_equal(log_odds(logits[:, :1].numpy()), logits[:, 0].numpy())


def test_pairs_have_token_types(tmp_path: Path) -> None:
    folder = make_checkpoint("BertForSequenceClassification", tmp_path, num_labels=1)
    loop, model, each = make_loop(folder), load_reference(folder), prompts()
    second_text_starts = [length // 2 for length in LENGTHS]
    got = loop.pool(each, second_text_starts)
    assert np.abs(got - loop.pool(each)).max() > 1e-4
    with torch.no_grad():
        for score, prompt, second_text_start in zip(got[:, 0], each, second_text_starts, strict=True):
            types = [int(second_text_start and i >= second_text_start) for i in range(len(prompt))]
            logits = model(torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits
            assert abs(float(logits) - score) < 1e-5


def test_label_tokens_of_a_language_model(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    loop = make_loop(folder, model={"label_tokens": ["n", "y"]})
    model, each = load_reference(folder), prompts()
    no, yes = (prepared_id(folder, text) for text in "ny")
    with torch.no_grad():
        for scores, prompt in zip(loop.pool(each), each, strict=True):
            logits = model(torch.tensor([prompt])).logits[0, -1, [no, yes]]
            np.testing.assert_allclose(scores, logits.numpy(), atol=1e-5)
    with pytest.raises(ConfigurationError, match="each must be one"):
        make_loop(folder, model={"label_tokens": ["no way", "y"]})


def prepared_id(folder: Path, text: str) -> int:
    from frame.text.tokenizer import Tokenizer

    (token,) = Tokenizer.load(folder).encode(text, False)
    return token


def test_many_prompts_share_steps_and_long_ones_wait_for_a_whole_step(tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path), "mean", NORMALIZE)
    loop = make_loop(folder, scheduler={"chunked_prefill_size": 128, "max_running_requests": 16, "overlap": True})
    each = prompts([128, 1, 127, 100, 30, 128, 8, 8, 8, 128])
    alone = [make_loop(folder).pool([prompt])[0] for prompt in each[:2]]
    got = loop.pool(each)
    np.testing.assert_allclose(got[:2], alone, atol=1e-5)
    assert loop.stats["steps"] < len(each)
    with pytest.raises(RuntimeError, match="the input has 129 tokens, and the model takes 128"):
        loop.pool(prompts([129]))


def test_two_ranks_give_the_vectors_of_one(tmp_path: Path) -> None:
    from frame.entrypoints.processes.build_engine import load_parts
    from frame.entrypoints.processes.components import RunnerPlan, build_runner
    from frame.entrypoints.processes.join_groups import Groups
    from tests.models.ranks import on_ranks

    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path), "mean")
    ready = prepared(folder, parallel={"tp": 2})
    each = prompts()
    want = make_loop(folder).pool(each)

    def act(group):
        runner = build_runner(RunnerPlan(ready.resolved, load_parts(ready.resolved, ready.registry), HOST, Groups(group)))
        return LocalLoop(build_scheduler(ready.resolved, ready.registry, runner.capacity.pools), runner).pool(each)

    for got in on_ranks(2, act):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_broken_numbers_end_their_own_request_only(tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path), "mean")
    loop = make_loop(folder)
    loop.runner.model.words.weight.data[7] = torch.nan
    assert np.isfinite(loop.pool([[8, 9], [10]])).all()
    with pytest.raises(RuntimeError, match="not finite"):
        loop.pool([[8, 9], [7]])
    assert np.isfinite(loop.pool([[8, 9]])).all()


# what is chosen, and what is refused --------------------------------------------------------------


def test_what_resolve_chooses(tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path), "mean", NORMALIZE)
    resolved = prepared(folder).resolved
    assert (resolved.task, resolved.pooling, resolved.max_context) == ("embed", Pooling("mean", normalize=True), 128)
    assert resolved.reasons["model.task"] == "the folder is one of sentence-transformers"
    assert not resolved.plugins.get("eviction_policy")
    assert "pooled from whole prompts" in resolved.rejected["cache.prefix"]["radix"][0]
    assert prepared(folder, model={"pooling": "cls", "max_context": 200}).resolved.pooling == Pooling("cls", normalize=True)
    again = prepare(pinned(resolved)).resolved
    assert (again.task, again.pooling, again.max_context) == (resolved.task, resolved.pooling, resolved.max_context)


@pytest.mark.parametrize(
    ("name", "sections", "sentence"),
    [
        ("BertModel", {"model": {"task": "generate"}}, "can only embed"),
        ("LlamaForCausalLM", {"model": {"task": "classify"}}, "model.label_tokens"),
        (
            "LlamaForCausalLM",
            {"model": {"pooling": "cls"}},
            "model.pooling is cls, which LlamaForCausalLM does not use for the task generate",
        ),
        (
            "BertModel",
            {"model": {"label_tokens": ["no", "yes"]}},
            "model.label_tokens is no,yes, which BertModel does not use for the task embed",
        ),
        ("BertModel", {"scheduler": {"chunked_prefill_size": 64}}, "in one step"),
        ("BertModel", {"attention": {"backend": "triton"}}, "computes causal attention only, and the model is an encoder"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, sections: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path)
    with pytest.raises(ResolveError, match=sentence):
        prepared(folder, **sections)


class TwoLast(Pooler):
    """The mean of the first and the last token."""

    name = "two_last"

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        first = hidden.index_select(0, batch.query_starts[:-1].long())
        return (first + hidden.index_select(0, batch.logits_indices)) / 2


def test_a_pooler_of_ones_own(tmp_path: Path) -> None:
    """Its capabilities decide whether prompts are computed whole. It serves embeddings, and the
    head of a classifier reads its vectors."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path / "body")
    model, each = load_reference(folder).model, prompts()
    ready = prepared(folder, [TwoLast], model={"task": "embed", "pooling": "two_last"})
    assert "pooled from whole prompts" in ready.resolved.rejected["cache.prefix"]["radix"][0]
    for vector, prompt in zip(make_loop(folder, [TwoLast], model={"task": "embed", "pooling": "two_last"}).pool(each), each, strict=True):
        truth = (wanted(model, prompt, "cls") + wanted(model, prompt, "last")) / 2
        np.testing.assert_allclose(vector, truth, atol=2e-5)
    folder = make_checkpoint("Qwen3ForSequenceClassification", tmp_path / "classes", num_labels=3)
    classifier = load_reference(folder)
    got = make_loop(folder, [TwoLast], model={"pooling": "two_last"}).pool(each)
    with torch.no_grad():
        for scores, prompt in zip(got, each, strict=True):
            hidden = classifier.model(torch.tensor([prompt])).last_hidden_state[0]
            np.testing.assert_allclose(scores, classifier.score((hidden[0] + hidden[-1]) / 2).numpy(), atol=2e-5)


def test_modules_that_are_not_known(tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path), "mean", {"idx": 2, "path": "2_Dense", "type": "x.Dense"})
    with pytest.raises(CheckpointError, match="has a module 'Dense'"):
        read_model_config(folder)
    (folder / "modules.json").write_text(json.dumps([*MODULES, POOLING]))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_weightedmean_tokens": true, "pooling_mode_mean_tokens": true}')
    with pytest.raises(CheckpointError, match="pooling_mode_weightedmean_tokens and pooling_mode_mean_tokens"):
        read_model_config(folder)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_weightedmean_tokens": true}')
    with pytest.raises(PluginError, match=r"model.pooling: Unknown pooler 'weightedmean'.*Installed: cls"):
        prepared(folder)
    assert prepared(folder, model={"pooling": "mean"}).resolved.choice("pooler").name == "mean"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    model_config = read_model_config(folder)
    assert model_config.sentence is not None
    assert model_config.sentence.mode == "last"


@pytest.mark.parametrize(
    ("labels", "fields", "activation"),
    [
        (1, {}, "sigmoid"),
        (3, {}, "softmax"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (1, {"problem_type": "regression"}, "none"),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        (3, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_activations_of_a_classifier(labels: int, fields: dict[str, Any], activation: str, tmp_path: Path) -> None:
    folder = make_checkpoint("BertForSequenceClassification", tmp_path, num_labels=labels)
    write_fields(folder / "config.json", **fields)
    pooling = prepared(folder).resolved.pooling
    assert pooling is not None and pooling.activation == activation


def test_an_activation_that_is_not_known(tmp_path: Path) -> None:
    folder = make_checkpoint("BertForSequenceClassification", tmp_path, num_labels=1)
    write_fields(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(ResolveError, match=r"activation_fn torch.nn.modules.activation.Tanh, .*set one of Identity"):
        prepared(folder)


def test_texts_are_lower_cased_where_the_folder_asks(tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path, vocab_size=2048), "mean")
    for lowers in (False, True):
        write_fields(folder / "sentence_bert_config.json", do_lower_case=lowers)
        tokenizer = load_tokenizer(prepared(folder, model={"tokenizer": str(find_model(EMBEDDED))}).resolved)
        assert tokenizer is not None
        assert (tokenizer.encode("One TEXT") == tokenizer.encode("one text")) == lowers
    tokenizer.backend = object()  # of the checkpoint's own code
    with pytest.raises(CheckpointError, match="do_lower_case in sentence_bert_config.json needs a tokenizer.json"):
        tokenizer.lower_case()


def test_prompts_that_are_not_pooled_are_refused(tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint("BertModel", tmp_path), "mean")
    write_fields(folder / "1_Pooling" / "config.json", include_prompt=False)
    prompts_file = folder / "config_sentence_transformers.json"
    prompts_file.write_text(json.dumps({"prompts": {"query": "query: "}, "default_prompt_name": None}))
    sentence = read_model_config(folder).sentence
    assert sentence is not None and sentence.lead() == ""
    with pytest.raises(ValueError, match="pools no token of a prompt"):
        sentence.lead("query")
    write_fields(prompts_file, default_prompt_name="query")
    with pytest.raises(CheckpointError, match="take default_prompt_name out of config_sentence_transformers.json"):
        read_model_config(folder)
