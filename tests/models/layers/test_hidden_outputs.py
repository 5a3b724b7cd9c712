"""Hidden states that a batch asks for equal those of transformers, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from frame.core.interfaces.batch import HiddenStateOutputs
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.models.harness import open_session


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_taps_are_the_streams_between_the_layers(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path)
    session, tokens = open_session(folder), [3, 14, 15, 92, 65, 35]
    num_layers = session.model_config.num_layers
    batch = session.batch([(0, tokens)], 0)
    hidden_outputs = HiddenStateOutputs(frozenset({0, 1, num_layers}))
    with torch.inference_mode():
        hidden = session.model.forward(replace(batch, extensions={HiddenStateOutputs: hidden_outputs}))
        expected = load_reference(folder)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert hidden_outputs.states.keys() == hidden_outputs.layers
    for layer, state in hidden_outputs.states.items():
        torch.testing.assert_close(state, expected[layer][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hidden_outputs.states[num_layers], hidden)
