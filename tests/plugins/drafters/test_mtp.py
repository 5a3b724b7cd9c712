"""The prediction module of each architecture against the layers of transformers: names, layers and
norms. Whole drafts are compared in tests/core for DeepSeek-V3."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.interfaces.device_drafter import DraftModelContext
from frame.core.interfaces.model import ModelContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import group_layers
from frame.forward.declared_caches import model_geometry
from frame.loading.loader import load_model
from frame.plugins.drafters.mtp import PredictionLayer
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.core.test_speculative_equality import make_loop
from tests.models.harness import NaivePool, build_context, checkpoint_of, open_session


@dataclass(frozen=True)
class Layout:
    """Where a checkpoint has its module, and from which layers of the body the test copies it."""

    copies: tuple[int, ...]
    layers: tuple[str, ...]
    norms: tuple[str, str, str]  # of the embedding, of the hidden state, the last one
    projection: str
    key: str
    offset: float = 0.0


MTP = "mtp.layers.0"
QWEN = Layout(
    (1,), (MTP,), ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), "mtp.fc", "mtp_num_hidden_layers", offset=1.0
)
GLM = Layout(
    (1,), ("model.layers.2",), tuple(f"model.layers.2.{name}" for name in ("enorm", "hnorm", "shared_head.norm")),  # type: ignore[arg-type]
    "model.layers.2.eh_proj", "num_nextn_predict_layers",
)  # fmt: skip
NEMOTRON = Layout(
    (2, 1), (MTP, "mtp.layers.1"), (f"{MTP}.enorm", f"{MTP}.hnorm", "mtp.layers.1.final_layernorm"), f"{MTP}.eh_proj",
    "num_nextn_predict_layers",
)  # fmt: skip
LAYOUTS = {"Glm4MoeForCausalLM": GLM, "Qwen3NextForCausalLM": QWEN, "Qwen3_5MoeForCausalLM": QWEN, "NemotronHForCausalLM": NEMOTRON}


def add_module(folder: Path, target: Path, layout: Layout, hidden: int) -> dict[str, torch.Tensor]:
    """A copy of the checkpoint with a prediction module; returns what the module has besides
    layers."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if ".layers.0." in name).partition("layers.0.")[0]
    for source, name in zip(layout.copies, layout.layers, strict=True):
        old = f"{first}layers.{source}."
        tensors |= {f"{name}.{each.removeprefix(old)}": value.clone() for each, value in list(tensors.items()) if each.startswith(old)}
    generator = torch.Generator().manual_seed(3)
    own = {f"{name}.weight": torch.randn(hidden, generator=generator) * 0.1 + 1 - layout.offset for name in layout.norms}
    own[f"{layout.projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5
    save_file(tensors | own, file, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, layout.key: 1}))
    return own


@torch.no_grad()
def expected(model: Any, layout: Layout, own: dict[str, torch.Tensor], ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The module's states, by layers of transformers over the whole row."""
    eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own[f"{name}.weight"] + layout.offset, eps)

    body, positions = model.model, torch.arange(len(ids))[None]
    joined = torch.cat((norm(model.get_input_embeddings()(ids), layout.norms[0]), norm(states, layout.norms[1])), -1)
    x = (joined @ own[f"{layout.projection}.weight"].T)[None]
    mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
    axes = positions.expand(3, 1, -1) if "3_5" in type(model).__name__ else positions  # time, height and width of images
    options = {"position_embeddings": body.rotary_emb(x, axes)} if hasattr(body, "rotary_emb") else {}
    for source in layout.copies:
        found = body.layers[source](x, attention_mask=mask, position_ids=positions, **options)
        x = found[0] if isinstance(found, tuple) else found
    return norm(x[0], layout.norms[2])


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_the_module_computes_what_its_layers_do(architecture: str, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[architecture], make_checkpoint(architecture, tmp_path / "plain")
    model = load_reference(folder)
    own = add_module(folder, tmp_path / "with", layout, model.config.hidden_size)
    session = open_session(tmp_path / "with", page_size=4)
    assert session.model_config.num_draft_layers == 1
    build = build_context(session.model_config)
    first = session.model_config.num_layers
    context = DraftModelContext(session.model, ModelContext.from_build(build, session.model_config), first)
    make: Callable[[], Any] = partial(PredictionLayer, context)
    drafter, _ = load_model(make, replace(build, attention=None), checkpoint_of(tmp_path / "with"))
    ids = torch.randint(6, 384, (13,), generator=torch.Generator().manual_seed(1))
    states = torch.randn(13, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    batch = session.batch([(0, ids.tolist())], 0)
    caches = [layer for group in model_geometry(drafter, group_layers((), 4, torch.float32)).groups for layer in group.layers]
    pool = NaivePool(caches, int(session.page_table.max()) + 1, 4, session.slots, torch.float32)
    with torch.inference_mode():
        got = drafter.forward(replace(batch, kv=pool), states)
    torch.testing.assert_close(got, expected(model, layout, own, ids, states), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "NemotronHForCausalLM", "DeepseekV32ForCausalLM"])
def test_drafts_change_no_token(architecture: str, tmp_path: Path) -> None:
    """A whole engine with experts on both sides, recurrent layers, or indexers: random drafts, of
    which few are accepted."""
    folder = make_checkpoint(architecture, tmp_path / "plain")
    add_module(folder, tmp_path / "with", LAYOUTS.get(architecture, GLM), 64)
    prompts = [[number + 6 for number in range(length)] for length in (5, 30, 17)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    loops = [make_loop(path=str(tmp_path / "with"), algorithm=algorithm) for algorithm in (None, "mtp")]
    outputs = [loop.generate(prompts, params) for loop in loops]
    assert outputs[0] == outputs[1]
    assert loops[1].scheduler.get_load()["drafted_tokens"] > 0
