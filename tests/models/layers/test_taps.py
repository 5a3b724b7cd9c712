"""Hidden states that a batch asks for equal those of transformers, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from frame.core.interfaces.batch import HiddenStateTaps
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import open_session


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_taps_are_the_streams_between_the_layers(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    session, tokens = open_session(folder), [3, 14, 15, 92, 65, 35]
    num_layers = session.model_config.num_layers
    batch = session.batch([(0, tokens)], 0)
    taps = HiddenStateTaps(frozenset({0, 1, num_layers}))
    with torch.inference_mode():
        hidden = session.model.forward(replace(batch, extensions={HiddenStateTaps: taps}))
        expected = load_reference(folder)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert taps.states.keys() == taps.layers
    for layer, state in taps.states.items():
        torch.testing.assert_close(state, expected[layer][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(taps.states[num_layers], hidden)
