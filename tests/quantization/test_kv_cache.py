"""Quantized KV caches of whole models: int8 with a scale for each token and head, and fp8 with the
checkpoint's scales of heads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.errors import CheckpointError
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import Session, open_session
from tests.models.ranks import on_ranks

TOKENS = list(range(20, 60))


def with_cache(session: Session, dtype: str, ranks: int = 1) -> Session:
    """The session with a real pool of `dtype`."""
    geometry = kv_geometry(session.model_config, ranks, session.page_size, dtype)
    session.pool = KVPool(geometry, session.slots * 64 + 1, torch.device("cpu"))  # type: ignore[assignment]
    return session


def logits_of(session: Session) -> torch.Tensor:
    """Logits of a prompt in two chunks and of decodes."""
    chunks = [TOKENS[:20], TOKENS[20:36], *([token] for token in TOKENS[36:])]
    return torch.cat([session.step([(0, chunk)])[0] for chunk in chunks]).float()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_an_int8_cache_stays_close_on_one_and_two_ranks(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    with torch.no_grad():
        want = load_reference(folder)(torch.tensor([TOKENS])).logits[0]
    got = logits_of(with_cache(open_session(folder, attention="torch_native"), "int8"))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert 0 < errors.median() < 0.01
    both = on_ranks(2, lambda group: logits_of(with_cache(open_session(folder, tp=group, attention="torch_native"), "int8", 2)))
    torch.testing.assert_close(both[0], got, rtol=1e-3, atol=1e-3)


def with_scales(folder: Path, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Path:
    """Add scales of the KV cache to both layers of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = k_scale.clone()
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = v_scale.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_an_fp8_cache_uses_the_scales_of_heads(tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    with torch.no_grad():
        want = load_reference(folder)(torch.tensor([TOKENS])).logits[0]
    with_scales(folder, torch.tensor([0.02, 0.5]).view(2, 1, 1), torch.tensor([0.01, 0.25]).view(2, 1, 1))
    names = {"attention": "torch_native", "kv_dtype": torch.float8_e4m3fn}
    session = with_cache(open_session(folder, **names), "fp8_e4m3")
    got = logits_of(session)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.05
    keys, values = (part.float().abs().amax((0, 1, 3)) for part in session.pool.layer(0))
    assert keys[0] > 5 * keys[1], "the keys of both heads are divided by one scale"
    assert values[0] > 5 * values[1]
    both = on_ranks(2, lambda group: logits_of(with_cache(open_session(folder, tp=group, **names), "fp8_e4m3", 2)))
    torch.testing.assert_close(both[0], got, rtol=1e-2, atol=5e-2)
    plain = logits_of(open_session(folder, attention="torch_native"))
    torch.testing.assert_close(plain, want, rtol=1e-3, atol=1e-3)


def test_scales_under_the_names_of_other_tools(tmp_path: Path) -> None:
    """Quark's and those of older versions of compressed-tensors; scales of queries are left out."""
    folder, values = make_checkpoint("LlamaForCausalLM", tmp_path), (0.02, 0.5)
    plain = with_scales(Path(shutil.copytree(folder, tmp_path / "plain")), *map(torch.tensor, values))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        for name, value in zip(("k_proj.output_scale", "v_proj.output_scale"), values, strict=True):
            tensors[f"{prefix}.{name}"] = torch.tensor(value)
        tensors |= {f"{prefix}.{name}": torch.zeros(1) for name in ("k_zero_point", "v_zero_point")}
        tensors |= {f"{prefix}.{name}": torch.ones(1) for name in ("q_scale", "prob_output_scale")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    names = {"attention": "torch_native", "kv_dtype": torch.float8_e4m3fn}
    both = [logits_of(with_cache(open_session(path, **names), "fp8_e4m3")) for path in (plain, folder)]
    assert torch.equal(both[0], both[1])
    tensors["model.layers.1.self_attn.k_zero_point"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="k_zero_point is not 0"):
        open_session(folder)


def test_scales_of_other_heads_are_refused(tmp_path: Path) -> None:
    folder = with_scales(make_checkpoint("LlamaForCausalLM", tmp_path), torch.ones(3), torch.ones(1))
    with pytest.raises(CheckpointError, match=r"self_attn.k_scale has the shape \[3\], but one number, or one for each of 2 KV heads"):
        open_session(folder)
