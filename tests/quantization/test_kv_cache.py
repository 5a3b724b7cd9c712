"""Quantized KV caches of whole models: int8 with a scale for each token and head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
