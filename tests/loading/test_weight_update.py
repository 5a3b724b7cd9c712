"""Updates of the weights from a folder: the errors of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from frame.core.interfaces.platform import HOST
from frame.core.interfaces.runner import WeightOrder
from frame.loading.loader import record_form
from frame.loading.weight_update import UpdateSource, UpdatingRunner, WeightUpdater
from frame.testing.checkpoints import make_checkpoint
from tests.loading.test_weight_commands import Recording


def test_a_runner_names_errors(tmp_path: Path) -> None:
    """One sentence of a checkpoint's fault, and of any other one; no rank raises."""

    def fail(*_: Any) -> Any:
        raise OSError("no disk")

    folder = str(make_checkpoint("LlamaForCausalLM", tmp_path))
    runner = UpdatingRunner(Recording(), WeightUpdater(fail, UpdateSource("LlamaForCausalLM", fail), HOST))
    assert "is no folder" in runner.update_weights(WeightOrder("/nowhere", is_check=True), int)
    assert "has the architecture LlamaForCausalLM" in UpdatingRunner(
        Recording(), WeightUpdater(fail, UpdateSource("Other", fail), HOST)
    ).update_weights(WeightOrder(folder, is_check=True), int)
    assert "could not be loaded: no disk" in runner.update_weights(WeightOrder(folder), int).replace("OSError: ", "")


def test_the_form_changes_with_an_address() -> None:
    module = nn.Linear(2, 2)
    before = record_form(module)
    with torch.no_grad():
        module.weight.fill_(1.0)
    assert record_form(module) == before
    module.weight.data = module.weight.data.clone()
    assert record_form(module) != before
