"""A tied configuration whose checkpoint stores a head all the same: as in transformers, a head that
differs is used, and one that is equal shares the embedding's memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.checkpoint.model_config import read_model_config
from frame.core.interfaces.batch import StageInput
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.model import ModelContext
from frame.core.interfaces.rank_context import Pipeline
from frame.loading.loader import count_bytes, load_model
from frame.models.llama import LlamaForCausalLM
from frame.testing.checkpoints import load_reference
from tests.models.harness import Session, build_context, checkpoint_of, open_session
from tests.models.test_logits import check, prompt, wanted
from tests.models.test_tensor_parallel import PLAN, Both
from tests.tiny_whisper import load_whisper, make_whisper

TIED = [
    "LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "CohereForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM",
    "KimiLinearForCausalLM", "NemotronHForCausalLM",
]  # fmt: skip
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def store_head(folder: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor], drops: str = "", **config: Any) -> Path:
    """A copy of the checkpoint, tied, with a head of the changed embedding and without the tensor
    `drops`."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    name = EMBEDDING if EMBEDDING in tensors else "backbone.embeddings.weight"
    tensors[HEAD] = change(tensors[name]).contiguous()
    tensors.pop(drops, None)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True} | config))
    return target


def change_last_row(embedding: torch.Tensor) -> torch.Tensor:
    head = embedding.clone()
    head[-1] += 1.0
    return head


@pytest.mark.parametrize("architecture", TIED)
def test_a_head_that_differs_is_used(architecture: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = store_head(checkpoint(architecture, tie_word_embeddings=False), tmp_path, lambda embedding: embedding.flip(0))
    check(open_session(folder, attention="torch_native"), load_reference(folder))


def test_one_row_that_differs_is_enough(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Also if it is another rank's, and the ranks do not divide the vocabulary."""
    folder = store_head(checkpoint("LlamaForCausalLM", tie_word_embeddings=True, vocab_size=383), tmp_path, change_last_row)
    session, reference = open_session(folder), load_reference(folder)
    check(session, reference)
    assert session.model.head.weight is not session.model.embed_tokens.weight  # type: ignore[attr-defined]
    alone = open_session(folder)
    for mine, theirs in zip(Both(folder, 2).run(PLAN), [alone.step(rows) for rows in PLAN], strict=True):
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drops", ["", EMBEDDING])
def test_one_matrix_is_in_memory_once(drops: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Stored twice, or under the head's name alone."""
    plain = checkpoint("LlamaForCausalLM", tie_word_embeddings=True)
    folder = store_head(plain, tmp_path, torch.Tensor.clone, drops)
    session = open_session(folder)
    assert session.model.head.weight is session.model.embed_tokens.weight  # type: ignore[attr-defined]
    assert count_bytes(session.model) == count_bytes(open_session(plain).model)  # type: ignore[arg-type]
    tokens = prompt(20, 1)
    torch.testing.assert_close(session.step([(0, tokens)])[0], wanted(load_reference(folder), tokens), atol=1e-4, rtol=1e-4)


def test_the_parts_of_a_checkpoint_come_in_any_order(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = store_head(checkpoint("LlamaForCausalLM", tie_word_embeddings=True), tmp_path, lambda embedding: embedding.flip(0))
    want = wanted(load_reference(folder), prompt(20, 1))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 if name == HEAD else 2}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    torch.testing.assert_close(open_session(folder).step([(0, prompt(20, 1))])[0], want, atol=1e-4, rtol=1e-4)


def test_weights_that_are_quantized_while_loading(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The head of its own is quantized like that of an untied checkpoint."""
    folder = store_head(checkpoint("LlamaForCausalLM", tie_word_embeddings=True), tmp_path / "tied", lambda embedding: embedding.flip(0))
    other = store_head(folder, tmp_path / "untied", lambda embedding: embedding.flip(0), tie_word_embeddings=False)
    tied, untied = (open_session(each, quantization="int8", gemm_kernel="torch") for each in (folder, other))
    assert torch.equal(tied.step([(0, prompt(20, 1))])[0], untied.step([(0, prompt(20, 1))])[0])
    assert count_bytes(tied.model) == count_bytes(untied.model)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [lambda embedding: embedding.flip(0), torch.Tensor.clone], ids=["another head", "the same head"])
def test_the_last_stage_keeps_one_matrix(
    change: Callable[[torch.Tensor], torch.Tensor], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = store_head(checkpoint("LlamaForCausalLM", tie_word_embeddings=True), tmp_path, change)
    first, last = (open_stage(folder, index) for index in range(2))
    tokens = prompt(20, 1)
    with torch.inference_mode():
        hidden = first.model.forward(first.batch([(0, tokens)], 0))
        batch = last.batch([(0, tokens)], 0)
        logits = last.model.compute_logits(last.model.forward(replace(batch, extensions={StageInput: StageInput(hidden)})))
    torch.testing.assert_close(logits, wanted(load_reference(folder), tokens), atol=1e-4, rtol=1e-4)
    matrices = {id(parameter) for parameter in last.model.parameters() if 384 in parameter.shape}  # type: ignore[attr-defined]
    assert len(matrices) == 1


def open_stage(folder: Path, index: int) -> Session:
    """One of two stages, with one layer each."""
    model_config = read_model_config(folder)
    stage = Pipeline(index=index, size=2, layers=range(index, index + 1), hidden=LocalGroup(), tokens=LocalGroup())
    context = replace(build_context(model_config, folder=folder), pipeline=stage)
    model, _ = load_model(lambda: LlamaForCausalLM(ModelContext.from_build(context, model_config)), context, checkpoint_of(folder))
    return Session(model, model_config, backend=context.attention)


def test_a_body_alone_does_not_load_the_head(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = store_head(checkpoint("LlamaForCausalLM", tie_word_embeddings=True), tmp_path, lambda embedding: embedding.flip(0))
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    context = replace(build_context(read_model_config(folder), folder=folder), task="embed")
    model_config = read_model_config(folder)
    model, _ = load_model(lambda: LlamaForCausalLM(ModelContext.from_build(context, model_config)), context, checkpoint_of(folder))
    assert model.head is None


@pytest.mark.parametrize("tied", [True, False])
def test_whisper(tied: bool, tmp_path: Path) -> None:
    """Its head has another name."""
    folder = make_whisper(tmp_path, tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    want = load_whisper(folder).proj_out.weight
    head = open_session(folder, attention="torch_native").model.head  # type: ignore[attr-defined]
    assert torch.equal(head.weight, want)
