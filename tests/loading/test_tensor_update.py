"""A rank's side of an update by tensors: layers one after another, and orders that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from frame.core.interfaces.platform import HOST
from frame.core.interfaces.runner import TransferOrder
from frame.core.interfaces.weight_transfer import TensorSpec, TransferError, TransferPart
from frame.interfaces.weight_transfer import WeightTransfer, WeightTransferContext
from frame.loading import tensor_update
from frame.loading.loader import UpdatedModel, process_weights_after_loading
from frame.loading.tensor_update import TensorUpdates, find_sharded, find_unit
from tests.models.harness import open_session
from tests.models.test_reloading import logits_of

Tensors = dict[str, torch.Tensor]


class DictTransfer(WeightTransfer):
    """Tensors of a dictionary."""

    tensors: Tensors = {}  # noqa: RUF012 - the tests set it

    def open(self, info: Mapping[str, Any]) -> None:
        if info:
            raise TransferError("the trainer has gone")

    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in part.tensors:
            yield spec.name, self.tensors[spec.name]

    def close(self) -> None:
        return


class StuckTransfer(DictTransfer):
    """A trainer's that no `close` ends."""

    end = threading.Event()

    def open(self, info: Mapping[str, Any]) -> None:
        self.end.wait()


class Rig:
    """A model, and the orders to it."""

    def __init__(self, folder: Path, **names: Any) -> None:
        self.session = open_session(folder, **names)
        model: Any = self.session.model
        self.tensors = dict(load_file(folder / "model.safetensors"))
        make = DictTransfer(WeightTransferContext(torch.device("cpu")))
        self.updates = TensorUpdates(lambda: [UpdatedModel(model, lambda: type(model)(model.context))], {"dict": lambda: make}, HOST)
        self.transfer = make
        assert self.order("open") == self.order("begin") == ""

    def order(self, action: Any, **values: Any) -> str:
        return self.updates.run(TransferOrder(action, channel="dict/", **values), int)

    def send(self, tensors: Tensors) -> None:
        self.transfer.tensors = tensors
        specs = tuple(TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items())
        part = TransferPart(specs)
        assert [self.order(action, part=part) for action in ("check", "receive", "load")] == [""] * 3


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_layer_is_finished_with_its_last_tensor(quantization: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And no layer but that one has the memory of tensors that are not in their last form."""
    rig = Rig(folders[0], quantization=quantization)
    model: Any = rig.session.model
    finished: list[str] = []
    paths = {id(module): name for name, module in model.named_modules()}

    def finish(module: nn.Module) -> None:
        finished.append(paths[id(module)])
        process_weights_after_loading(module)

    monkeypatch.setattr("frame.loading.tensor_update.process_weights_after_loading", finish)
    released = {key for key, each in find_sharded(model).items() if each.shape != each.whole_shape}
    sent = sorted(load_file(folders[1] / "model.safetensors").items())
    for number, (name, tensor) in enumerate(sent):
        rig.send({name: tensor})
        layers = [layer for layer in (0, 1) if all(f"layers.{layer}." not in other for other, _ in sent[number + 1 :])]
        assert finished == [f"layers.{layer}" for layer in layers]
        stored = {find_unit(key) for key in released if (each := find_sharded(model)[key]).shape == each.whole_shape}
        assert len(stored - {""}) <= 1
    assert rig.order("check_names") == rig.order("commit") == ""
    assert finished == ["layers.0", "layers.1", ""]
    assert torch.equal(logits_of(rig.session), logits_of(open_session(folders[1], quantization=quantization)))


def test_a_check_that_fails_forgets_its_part(folders: list[Path]) -> None:
    rig = Rig(folders[0])
    name, tensor = next(iter(rig.tensors.items()))
    wrong = TransferPart((TensorSpec(name, "float32", tuple(tensor.shape)), TensorSpec("other", "float32", (1,))))
    why = rig.order("check", part=wrong)
    assert why.endswith("holds other, which the model does not have: send the tensors of the model that is served")
    rest = tuple(TensorSpec(key, "float32", tuple(each.shape)) for key, each in rig.tensors.items() if key != name)
    assert f"{name} would be missing" in rig.order("check", part=TransferPart(rest), is_last=True)


def test_orders_fail_with_a_sentence(folders: list[Path]) -> None:
    rig = Rig(folders[0])
    assert rig.order("open", info={"x": 1}) == "the trainer has gone"
    assert rig.order("open") == ""
    assert rig.order("check_names") == "no tensor came"
    assert "receive failed" in rig.order("receive")
    rig.transfer.tensors = {"a": torch.ones(3)}
    part = TransferPart((TensorSpec("a", "float32", (2,)),))
    assert "came as torch.float32 [3] where the message has a" in rig.order("receive", part=part)
    rig.updates.close()
    assert "receive failed" in rig.order("receive", part=part)


def test_rendezvous_that_no_close_ends_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_update, "MAX_LEFT", 2)
    transfer = StuckTransfer(WeightTransferContext(torch.device("cpu")))
    updates = TensorUpdates(list, {"stuck": lambda: transfer}, HOST)

    def join() -> str:
        return updates.run(TransferOrder("join", channel="stuck/"), int)

    try:
        assert join() == join() == ""
        assert "2 trainers that were left do not answer; end them" in join()
    finally:
        transfer.end.set()
    for each in updates._left:
        each._thread.join(10.0)
    assert join() == ""
