"""One rank's side of an update by the tensors of a trainer: `TensorUpdates` carries out the orders
of `WeightCommands`.

A part is checked against an empty model, received whole, and then goes through the model's
`load_weights`, as a checkpoint does at a start. A layer is brought into the form that is multiplied
once its last tensor came, so that an update takes the memory of one layer and one part. Must not
know requests, nor a transfer by name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from frame.core.blame import explain
from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.platform import Platform, SupportsStreams
from frame.core.interfaces.runner import TransferOrder
from frame.core.interfaces.weight_transfer import TensorSpec, TransferError, TransferPart
from frame.interfaces.weight_transfer import WeightTransfer
from frame.loading.loader import (
    UpdatedModel,
    beat_for_each,
    forget_loaded,
    join_names,
    list_missing,
    process_weights_after_loading,
    record_form,
)
from frame.loading.update_copy import UpdateCopy
from frame.loading.weight_commands import JOINING

log = logging.getLogger(__name__)

T = TypeVar("T")
BEAT = 0.1  # seconds between two beats while a trainer is awaited
MAX_LEFT = 64  # rendezvous that were left and wait in torch, which no call ends


class LoadedModel:
    """A model during an update, and what its parameters needed at the start. empty: the same model
    on the meta device, against which parts are checked."""

    def __init__(self, model: Any, empty: Any) -> None:
        self.model = model
        self.empty = empty
        parameters = find_sharded(model)
        # By parameter: the checkpoint names that it is made of. Of an optional one those that came.
        self.needed = {key: frozenset(each.loaded if each.optional else each.sources) for key, each in parameters.items()}
        # Parameters whose values live in another form, and have to be loaded whole.
        self.released = {key for key, each in parameters.items() if each.shape != each.whole_shape or each.dtype != each.stored_dtype}
        self.units: dict[str, list[str]] = {}  # layers that are not finished, by path: their parameters
        self.complete: set[str] = set()  # parameters of `model` whose tensors came
        self.checked: set[str] = set()  # the same of `empty`
        self.is_started = False  # a tensor was written
        self.form: Any = None  # see `record_form`

    def begin(self) -> None:
        forget_loaded(self.empty)
        self.complete, self.checked, self.units, self.is_started = set(), set(), {}, False

    def check(self, tensors: Sequence[TensorSpec], *, is_whole: bool) -> None:
        """Raises CheckpointError for a name, shape or type that is not the model's. is_whole: also
        for tensors that would be missing if no other part came."""
        before = {key: set(parameter.loaded) for key, parameter in find_sharded(self.empty).items()}
        try:
            self.checked |= self.empty.load_weights((spec.name, make_header(spec)) for spec in tensors)
            if is_whole and (missing := list_missing(self.empty, self.checked) or self._list_unsent(self.empty, self.released)):
                raise CheckpointError(f"{join_names(missing)} would be missing: send all tensors, or set partial")
        except BaseException:
            for key, parameter in find_sharded(self.empty).items():
                parameter.loaded = before.get(key, set())
            raise

    def _start(self) -> None:
        """Note the form of the model before the first write."""
        self.is_started, self.form = True, record_form(self.model)
        forget_loaded(self.model)
        for key in find_sharded(self.model):
            if unit := find_unit(key):
                self.units.setdefault(unit, []).append(key)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.is_started:
            self._start()
        self.complete |= self.model.load_weights(tensors)
        for unit, keys in list(self.units.items()):
            if not self._list_unsent(self.model, keys):
                del self.units[unit]
                process_weights_after_loading(self.model.get_submodule(unit))

    def list_missing(self, *, is_partial: bool) -> list[str]:
        """The checkpoint names without which the update cannot be committed. is_partial: of layers
        of another form that were touched alone."""
        if not is_partial:
            return list_missing(self.model, self.complete) or self._list_unsent(self.model, self.released)
        parameters = find_sharded(self.model)
        touched = {key.rpartition(".")[0] for key, each in parameters.items() if each.loaded}
        return self._list_unsent(self.model, [key for key in sorted(self.released) if key.rpartition(".")[0] in touched])

    def finish_update(self) -> None:
        for key, parameter in find_sharded(self.model).items():
            if parameter.optional and not parameter.loaded:  # a scale that the trainer does not send stays
                parameter.loaded = set(self.needed.get(key, ()))
        process_weights_after_loading(self.model)

    def _list_unsent(self, model: Any, keys: Iterable[str]) -> list[str]:
        """The names that these parameters need and that did not come."""
        parameters = find_sharded(model)
        return [name for key in keys if key in parameters for name in sorted(self.needed.get(key, frozenset()) - parameters[key].loaded)]


def find_sharded(model: nn.Module) -> dict[str, Any]:
    """The parameters that know their checkpoint tensors, by name; of a shared one the first."""
    return {key: parameter for key, parameter in model.named_parameters() if hasattr(parameter, "sources")}


def find_unit(key: str) -> str:
    """The path of the layer that a parameter belongs to: up to its first number; empty for those
    outside of layers."""
    path = key.split(".")
    index = next((place for place, name in enumerate(path[:-1]) if name.isdecimal()), None)
    return "" if index is None else ".".join(path[: index + 1])


def make_header(spec: TensorSpec) -> torch.Tensor:
    """A tensor without values; a scalar has the value 1."""
    dtype = getattr(torch, spec.dtype)
    return torch.empty(spec.shape, dtype=dtype, device="meta") if spec.shape else torch.ones((), dtype=dtype)


class Rendezvous:
    """`transfer.open` in a thread of its own, beside the steps of the engine. error: why it failed.
    activate: makes the device the thread's own."""

    def __init__(self, transfer: WeightTransfer, info: Mapping[str, Any], activate: Callable[[], object]) -> None:
        self.transfer, self._info, self._activate = transfer, info, activate
        self.error: Exception | None = None
        self._is_left = False
        self._thread = threading.Thread(target=self._open, name="weight-rendezvous", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Leave the trainer, now or when the thread ends."""
        self._is_left = True
        self.transfer.close()

    def _open(self) -> None:
        try:
            self._activate()
            self.transfer.open(self._info)
        except Exception as error:  # noqa: BLE001 - raised where the rendezvous is awaited
            self.error = error
        if self._is_left:
            self.transfer.close()


class TensorUpdates:
    """The connections to trainers, and the update in progress. connect: makes a transfer, by name
    of the plugin. copy: keeps the tensors for a restart; of rank 0 alone."""

    def __init__(
        self,
        open_models: Callable[[], Sequence[UpdatedModel]],
        connect: Mapping[str, Callable[[], WeightTransfer]],
        platform: Platform,
        copy: UpdateCopy | None = None,
    ) -> None:
        self._open_models = open_models
        self._connect = connect
        self._platform = platform
        self._copy = copy
        self._models: list[LoadedModel] | None = None
        self._channels: dict[str, WeightTransfer] = {}
        self._rendezvous: dict[str, Rendezvous] = {}  # by channel
        self._left: list[Rendezvous] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []  # the part that was received

    def run(self, order: TransferOrder, beat: Callable[[], object]) -> str:
        """Carry out an order. -> why it failed, one sentence; empty if it was carried out.

        open, close: a channel. join: begin the rendezvous with a channel's trainer, which goes on
        while steps run; await_join: end it, or say `JOINING`. begin: an update. check: the part of
        the order. receive: the tensors of the part, into memory of their own; drop: free them.
        load: write them. check_names: whether the update could be committed. commit, cancel: end
        it; a cancel writes nothing.
        """
        try:
            action: Any = getattr(self, f"_{order.action}")
            action(order, beat)
        except (ConfigurationError, TransferError) as error:
            return str(error)
        except Exception as error:
            log.exception("the order %s of an update of the weights failed", order.action)
            return f"{order.action} failed: {explain(error)}"
        return ""

    def close(self) -> None:
        """Leave all trainers."""
        for channel in {*self._channels, *self._rendezvous}:
            self._leave(channel)

    # orders ---------------------------------------------------------------------------------------

    def _open(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        self._close(order, beat)
        transfer = self._connect[order.channel.partition("/")[0]]()
        self._await(lambda: transfer.open(order.info), beat)
        self._channels[order.channel] = transfer

    def _join(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        self._close(order, beat)
        self._left = [each for each in self._left if each.is_running]
        if len(self._left) >= MAX_LEFT:
            raise TransferError(f"{MAX_LEFT} trainers that were left do not answer; end them, and call init_weights_update_group again")
        transfer = self._connect[order.channel.partition("/")[0]]()
        self._rendezvous[order.channel] = Rendezvous(transfer, order.info, self._platform.activate)

    def _await_join(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        rendezvous = self._rendezvous.get(order.channel)
        if rendezvous is None:
            raise TransferError("no rendezvous was begun")
        if rendezvous.is_running:
            raise TransferError(JOINING)
        del self._rendezvous[order.channel]
        if rendezvous.error is not None:
            raise rendezvous.error
        self._channels[order.channel] = rendezvous.transfer

    def _close(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        self._leave(order.channel)

    def _leave(self, channel: str) -> None:
        if (transfer := self._channels.pop(channel, None)) is not None:
            transfer.close()
        if (rendezvous := self._rendezvous.pop(channel, None)) is not None:
            rendezvous.close()
            self._left.append(rendezvous)

    def _begin(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        if self._models is None:
            self._models = [LoadedModel(each.model, build_empty(each)) for each in self._open_models()]
        for each in self._models:
            each.begin()
            beat()

    def _check(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        part = self._require_part(order)
        try:
            for each in self._require_models():
                each.check(part.tensors, is_whole=order.is_last and not order.is_partial)
        except ConfigurationError as error:
            if isinstance(error, CheckpointError) and error.remedy:  # for files
                raise CheckpointError(error.sentence, "send the tensors of the model that is served") from error
            raise
        except Exception as error:
            raise CheckpointError(
                f"these tensors cannot be checked before they are loaded ({explain(error)}): update from a folder"
            ) from error

    def _receive(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        part, transfer = self._require_part(order), self._channels[order.channel]
        self._tensors = self._await(lambda: receive_part(transfer, part), beat)
        if (copy := self._copy) is not None:  # before a tensor is written, so that a full disk costs no weights
            self._await(lambda: copy.add(self._tensors), beat)

    def _drop(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        self._tensors = []
        if self._copy is not None:
            self._copy.drop()

    def _load(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        tensors, self._tensors = self._tensors, []
        self._synchronize()  # steps run on another stream
        for each in self._require_models():
            each.load(beat_for_each(tensors, beat))
        if self._copy is not None:
            self._copy.keep()
        self._synchronize()

    def _check_names(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        for each in self._require_models():
            if not each.is_started:
                raise CheckpointError("no tensor came")
            if missing := each.list_missing(is_partial=order.is_partial):
                raise CheckpointError(f"the tensors {join_names(missing)} are missing")

    def _commit(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        for each in self._require_models():
            each.finish_update()
            beat()
            if isinstance(self._platform, SupportsStreams) and record_form(each.model) != each.form:
                raise CheckpointError("the update changes tensors or scales that captured graphs have read: restart with a checkpoint")
        self._synchronize()
        self._platform.release_memory()
        if self._copy is not None:
            self._copy.commit()

    def _cancel(self, order: TransferOrder, beat: Callable[[], object]) -> None:
        self._tensors = []
        if self._copy is not None:
            self._copy.cancel()

    # ----------------------------------------------------------------------------------------------

    def _require_part(self, order: TransferOrder) -> TransferPart:
        if order.part is None:
            raise RuntimeError(f"the order {order.action} has no part")
        return order.part

    def _require_models(self) -> list[LoadedModel]:
        if self._models is None:
            raise RuntimeError("no update has begun")
        return self._models

    def _synchronize(self) -> None:
        self._platform.activate()
        if isinstance(self._platform, SupportsStreams):
            self._platform.synchronize()

    def _await(self, call: Callable[[], T], beat: Callable[[], object]) -> T:
        """The result of a call that waits for a trainer, which runs in a thread; calls `beat`
        meanwhile."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._platform.activate()
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                errors.append(error)

        thread = threading.Thread(target=work, name="weight-transfer", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(BEAT)
            beat()
        if errors:
            raise errors[0]
        return results[0]


@torch.no_grad()
def receive_part(transfer: WeightTransfer, part: TransferPart) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a part in memory of their own. Raises TransferError if they are not those of
    its message."""
    tensors = []
    for spec, (name, tensor) in zip(part.tensors, transfer.receive(part), strict=True):
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, getattr(torch, spec.dtype)):
            raise TransferError(f"{name} came as {tensor.dtype} {list(tensor.shape)} where the message has {spec.name}")
        tensors.append((name, tensor.clone()))
    return tensors


def build_empty(model: UpdatedModel) -> Any:
    with torch.device("meta"):
        return model.make()
